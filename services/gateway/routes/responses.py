"""POST /v1/responses, and what can be done with a stored one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from biphase.errors import InvalidRequestError, NotFoundError, UnsupportedError
from services.gateway.bodies import body_schema
from services.gateway.domain import Endpoint, Generation
from services.gateway.frames.responses import ResponseFrames
from services.gateway.frames.text import to_json
from services.gateway.gateway import Gateway
from services.gateway.http_errors import shown
from services.gateway.parsing.chat import parse_chat
from services.gateway.parsing.identity import identify
from services.gateway.parsing.responses import Item, chat_request, new_items, rename
from services.gateway.responding import Keeping, streamed_response, whole_response
from services.gateway.response_events import RUNNING, replayed_events, stored_events
from services.gateway.response_store import StoredResponse
from services.gateway.routes.beginning import begin_run
from services.gateway.routes.query import query_flag, query_number, query_parameters
from services.gateway.sse import EventStream
from services.gateway.wire_responses import ResponsesRequest

_CANCEL_POLL_SECONDS = 0.1
_CANCEL_WAIT_SECONDS = 3.0


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/responses", openapi_extra=body_schema(ResponsesRequest), summary="Response")
    async def create(request: Request) -> Response:
        arrival = time.monotonic()
        body = await gateway.bodies.read(request, ResponsesRequest)
        owner = request.state.grant.key_id
        items = new_items(body, await gateway.limits())
        history: list[Item] = []
        if body.previous_response_id is not None:
            history = _finished(await _stored(gateway, body.previous_response_id, owner)).conversation()
        generation = await _generation(gateway, body, [*history, *items])
        frames = ResponseFrames(body, generation, gateway.model.tokenizer)
        keeping = Keeping(None if body.store is False else gateway.responses, items, history, owner)
        if body.background:
            run = await begin_run(gateway, request, generation, arrival, watched=False)
            response = await gateway.background.start(run, frames, keeping, request.state.grant)
            told = gateway.background.events(generation.response_id)
            return _json(response) if told is None else EventStream(told.follow(0), gateway.slow_readers)
        run = await begin_run(gateway, request, generation, arrival)
        if generation.answer.stream:
            return await streamed_response(
                run, frames, keeping, request.receive, gateway.slow_readers, gateway.settings.sse_keep_alive_seconds
            )
        return await whole_response(run, frames, keeping, request.receive)

    @router.get(
        "/v1/responses/{response_id}",
        summary="A stored response",
        openapi_extra=query_parameters(stream="boolean", starting_after="integer"),
    )
    async def retrieve(request: Request, response_id: str) -> Response:
        owner = request.state.grant.key_id
        streams, after = query_flag(request, "stream"), query_number(request, "starting_after")
        record = await _stored(gateway, response_id, owner)
        if not streams:
            return _json(record.response)
        events = await _events(gateway, record, owner, 0 if after is None else after + 1)
        return EventStream(events, gateway.slow_readers)

    @router.get("/v1/responses/{response_id}/input_items", summary="What a stored response answered")
    async def input_items(request: Request, response_id: str) -> dict[str, Any]:
        items = (await _stored(gateway, response_id, request.state.grant.key_id)).input
        shown_items = [{"id": f"in_{place}", **item} for place, item in enumerate(items)]
        first, last = shown_items[0]["id"], shown_items[-1]["id"]
        return {"object": "list", "data": shown_items, "first_id": first, "last_id": last, "has_more": False}

    @router.post("/v1/responses/{response_id}/cancel", summary="Cancel a background response")
    async def cancel(request: Request, response_id: str) -> dict[str, Any]:
        return await _cancelled(gateway, response_id, request.state.grant.key_id)

    @router.delete("/v1/responses/{response_id}", summary="Forget a stored response")
    async def delete(request: Request, response_id: str) -> dict[str, Any]:
        await _stored(gateway, response_id, request.state.grant.key_id)
        await gateway.responses.delete(response_id)
        return {"id": response_id, "object": "response", "deleted": True}

    return router


async def _generation(gateway: Gateway, body: ResponsesRequest, items: list[Item]) -> Generation:
    try:
        return await parse_chat(
            chat_request(body, items),
            # The id is a secret that gives access to what is stored: never one that a client chose.
            identity=identify(Endpoint.RESPONSES, ""),
            model=gateway.model,
            limits=await gateway.limits(),
        )
    except (InvalidRequestError, UnsupportedError) as error:
        rename(error)
        raise


async def _events(gateway: Gateway, record: StoredResponse, owner: str, start: int) -> AsyncGenerator[bytes, None]:
    """The events of a response from the start-th on; those to come too, while it runs."""
    response_id = record.response["id"]
    told = gateway.background.events(response_id)
    if told is not None:
        return told.follow(start)
    if await gateway.responses.events(response_id, 0):
        return stored_events(gateway.responses, response_id, owner, start)
    if record.response["status"] in RUNNING:
        raise InvalidRequestError("The response was not asked to be streamed; it can be once it has ended.", "stream")
    return replayed_events(record.response, start)


async def _stored(gateway: Gateway, response_id: str, owner: str) -> StoredResponse:
    record = await gateway.responses.get(response_id, owner)
    if record is None:
        raise NotFoundError(f"Response with id '{shown(response_id)}' not found.", "response_id")
    return record


def _finished(record: StoredResponse) -> StoredResponse:
    if record.response["status"] in RUNNING:
        raise InvalidRequestError("The previous response is not finished yet.", "previous_response_id")
    return record


async def _cancelled(gateway: Gateway, response_id: str, owner: str) -> dict[str, Any]:
    record = await _stored(gateway, response_id, owner)
    if not record.response["background"]:
        raise InvalidRequestError("Only a background response can be cancelled.", "response_id")
    if record.response["status"] in RUNNING:
        await gateway.responses.ask_cancel(response_id)
        # It may run at another gateway, which looks once a second.
        give_up = time.monotonic() + _CANCEL_WAIT_SECONDS
        while record.response["status"] in RUNNING and time.monotonic() < give_up:
            await asyncio.sleep(_CANCEL_POLL_SECONDS)
            record = await _stored(gateway, response_id, owner)
    return record.response


def _json(response: dict[str, Any]) -> Response:
    return Response(to_json(response), media_type="application/json")
