"""What stands around every route: request ids, API keys, spans, rate limits, the count of open requests.

Plain ASGI: no task and no copy for each message.
"""

from __future__ import annotations

import secrets

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from biphase.errors import UnauthorizedError
from biphase.rpc.carrying import clean_traceparent
from biphase.telemetry import context, tracing
from biphase.telemetry.metrics import GatewayMetrics
from services.gateway.auth import ApiKeys
from services.gateway.http_errors import response_of
from services.gateway.parsing.identity import clean_client_id
from services.gateway.rate_limits import RateLimitedError, RateLimits
from services.gateway.recorder import Recorder

REQUEST_ID_HEADER = "x-request-id"
# Beside everything under /v1. Status tells who asked for how much, and where the nodes are.
_GUARDED_PATHS = frozenset({"/metrics/targets", "/reset_prefix_cache", "/status"})
_TEXT_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses"})


class RequestIds:
    """X-Request-Id of every request: the client's, or one made here. It goes back with the answer.

    `scope["state"]["client_id"]` has the client's own, or "".
    """

    def __init__(self, app: ASGIApp, metrics: GatewayMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = clean_client_id(Headers(scope=scope).get(REQUEST_ID_HEADER))
        scope.setdefault("state", {})["client_id"] = given
        shown = given or secrets.token_hex(12)
        context.request_id.set(shown)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = shown
                if scope["path"] in _TEXT_PATHS:
                    self._metrics.answered(scope["path"], message["status"])
            await send(message)

        await self._app(scope, receive, send_with_id)


class Authentication:
    """Asks for an API key on everything under /v1, and on what is done to all.

    `scope["state"]["grant"]` says what the key may do.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (_is_api(scope["path"]) or scope["path"] in _GUARDED_PATHS):
            try:
                grant = self._keys.check(Headers(scope=scope).get("authorization"))
                scope.setdefault("state", {})["grant"] = grant
            except UnauthorizedError as error:
                await response_of(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class Tracing:
    """The span of every request for text, in the trace that the client names.

    Stands behind authentication: the client says whether its trace is kept, and strangers shall not fill it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in _TEXT_PATHS:
            await self._app(scope, receive, send)
            return
        context.traceparent.set(clean_traceparent(Headers(scope=scope).get("traceparent", "")))
        method, path = scope["method"], scope["path"]
        span = tracing.span(
            f"{method} {path}", is_server=True, attributes={"http.request.method": method, "http.route": path}
        )

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set({"http.response.status_code": message["status"]})
            await send(message)

        try:
            await self._app(scope, receive, send_with_status)
        finally:
            span.end()


class RateLimiting:
    """Takes a request for text from its key's minute, and what it generated when it has ended.

    `scope["state"]["rate"]` is what the answer's headers tell; the route puts `run` beside it.
    """

    def __init__(self, app: ASGIApp, limits: RateLimits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in _TEXT_PATHS:
            await self._app(scope, receive, send)
            return
        state = scope["state"]

        async def send_with_limits(message: Message) -> None:
            rate = state.get("rate")
            if rate is not None and message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(rate.headers())
            await send(message)

        grant = state["grant"]
        try:
            state["rate"] = await self._limits.take(grant, requests=1)
        except RateLimitedError as error:
            state["rate"] = error.state
            await response_of(error)(scope, receive, send_with_limits)
            return
        try:
            await self._app(scope, receive, send_with_limits)
        finally:
            run = state.get("run")
            if run is not None:
                await self._limits.debit(grant, run.usage.completion_tokens)


class OpenRequests:
    """Counts the requests for text that are being answered, streams until their end."""

    def __init__(self, app: ASGIApp, recorder: Recorder) -> None:
        self._app = app
        self._recorder = recorder

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_api(scope["path"]):
            await self._app(scope, receive, send)
            return
        self._recorder.num_open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._recorder.num_open -= 1


def _is_api(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")
