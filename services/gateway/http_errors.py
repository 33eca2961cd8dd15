"""Every refusal as {"error": {message, type, param, code}}, whatever raised it and however early.

Owns the form of errors on the wire and the handlers that turn exceptions into it. What came in is echoed in small
pieces only, so that a hostile body is not answered with a larger one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from biphase.errors import BiphaseError, ErrorCode, OverloadedError
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    413: "RequestTooLargeError",
    429: "RateLimitError",
    499: "RequestCancelledError",
    500: "InternalServerError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
    504: "TimeoutError",
}
_MAX_ENTRIES = 8
_MAX_MESSAGE = 2000
_MAX_ECHO = 80


def error_object(
    status: int, message: str, *, param: str | None = None, type_name: str | None = None
) -> dict[str, Any]:
    kind = type_name or _TYPES.get(status, "InternalServerError" if status >= 500 else "BadRequestError")
    return {"error": {"message": message[:_MAX_MESSAGE], "type": kind, "param": param, "code": status}}


def error_response(
    status: int,
    message: str,
    *,
    param: str | None = None,
    type_name: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    content = json.dumps(error_object(status, message, param=param, type_name=type_name))
    return Response(content, status, headers=dict(headers or {}), media_type="application/json")


def object_of(error: BiphaseError) -> dict[str, Any]:
    return error_object(error.http_status, error.message, param=getattr(error, "param", None))


def response_of(error: BiphaseError) -> Response:
    headers = {}
    if isinstance(error, OverloadedError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_seconds)))
    elif error.http_status == 503:
        headers["Retry-After"] = "1"
    elif error.http_status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    elif error.code is ErrorCode.UNSUPPORTED:
        # The OpenAI SDKs try again after any 5xx unless told that it is of no use.
        headers["x-should-retry"] = "false"
    return error_response(error.http_status, error.message, param=getattr(error, "param", None), headers=headers)


def shown(value: Any) -> str:
    """A piece of input, short enough to be sent back."""
    if isinstance(value, list | tuple | dict | set):
        return f"<{type(value).__name__} of {len(value)} items>"
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 256:
        return "<huge integer>"
    text = str(value)
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= _MAX_ECHO else text[:_MAX_ECHO] + "..."


def validation_response(error: ValidationError) -> Response:
    """A body that is not JSON, or whose fields are not of their types."""
    count = error.error_count()
    entries = error.errors(include_url=False, include_context=False)[:_MAX_ENTRIES]
    lines = []
    first = "body"
    for place, entry in enumerate(entries):
        where = _path(entry["loc"])
        if place == 0:
            first = where
        told = f"'type': '{entry['type']}', 'loc': '{where}', 'msg': '{shown(entry['msg'])}'"
        if entry["type"] != "json_invalid":
            told += f", 'input': '{shown(entry['input'])}'"
        lines.append(f"  {{{told}}}")
    if count > len(entries):
        lines.append(f"  and {count - len(entries)} more")
    message = f"{count} validation error{'s' if count > 1 else ''}:\n" + "\n".join(lines)
    return error_response(400, message, param=first, type_name="Bad Request")


def _path(loc: Sequence[str | int]) -> str:
    # Members of a union add the name of the type that was tried; it is no part of the path.
    kept = [str(part) for part in loc if not (isinstance(part, str) and ("[" in part or part in ("str", "int")))]
    return shown(".".join(["body", *kept]))


def _methods(routes: Sequence[BaseRoute], scope: Scope) -> set[str]:
    allowed: set[str] = set()
    for route in routes:
        if isinstance(route, Route) and route.matches(scope)[0] is not Match.NONE:
            allowed |= route.methods or set()
    return allowed


def install(app: FastAPI, routes: Sequence[BaseRoute]) -> None:
    """Adds handlers for everything that can be raised below a route.

    Args:
        routes: all of them, for what a wrong method could have been.
    """

    async def on_known(_: Request, error: Exception) -> Response:
        assert isinstance(error, BiphaseError)
        return response_of(error)

    async def on_validation(_: Request, error: Exception) -> Response:
        assert isinstance(error, ValidationError)
        return validation_response(error)

    async def on_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        headers = error.headers
        if error.status_code == 405:
            # The router names the methods of the first route with this path only.
            headers = {"Allow": ", ".join(sorted(_methods(routes, request.scope)))}
        return error_response(error.status_code, str(error.detail), headers=headers)

    async def on_unknown(request: Request, error: Exception) -> Response:
        log.error("request_failed", path=request.url.path, error=type(error).__name__)
        return error_response(500, "Internal server error.")

    app.add_exception_handler(BiphaseError, on_known)
    app.add_exception_handler(ValidationError, on_validation)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, on_unknown)
