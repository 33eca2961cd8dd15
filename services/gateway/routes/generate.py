"""POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.gateway.answers import streamed_answer, whole_answer
from services.gateway.bodies import body_schema
from services.gateway.domain import Endpoint, Generation
from services.gateway.frames.chat import ChatFrames
from services.gateway.frames.completions import CompletionFrames
from services.gateway.frames.frames import Frames
from services.gateway.gateway import Gateway
from services.gateway.parsing.chat import parse_chat
from services.gateway.parsing.completions import parse_completion
from services.gateway.parsing.identity import Identity, clean_client_id, identify
from services.gateway.routes.beginning import begin_run
from services.gateway.wire import ChatRequest, CompletionRequest, GenerationFields


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/chat/completions", openapi_extra=body_schema(ChatRequest), summary="Chat completion")
    async def chat_completions(request: Request) -> Response:
        arrival = time.monotonic()
        body = await gateway.bodies.read(request, ChatRequest)
        generation = await parse_chat(
            body,
            identity=_identity(Endpoint.CHAT, request, body),
            model=gateway.model,
            limits=await gateway.limits(),
        )
        frames = ChatFrames(generation, gateway.model.tokenizer, gateway.fingerprint)
        return await _answer(gateway, request, generation, frames, arrival)

    @router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest), summary="Text completion")
    async def completions(request: Request) -> Response:
        arrival = time.monotonic()
        body = await gateway.bodies.read(request, CompletionRequest)
        generation = await parse_completion(
            body,
            identity=_identity(Endpoint.COMPLETIONS, request, body),
            model=gateway.model,
            limits=await gateway.limits(),
        )
        frames = CompletionFrames(generation, gateway.model.tokenizer, gateway.fingerprint)
        return await _answer(gateway, request, generation, frames, arrival)

    return router


def _identity(endpoint: Endpoint, request: Request, body: GenerationFields) -> Identity:
    return identify(endpoint, clean_client_id(body.request_id) or request.state.client_id)


async def _answer(
    gateway: Gateway, request: Request, generation: Generation, frames: Frames, arrival: float
) -> Response:
    run = await begin_run(gateway, request, generation, arrival)
    if generation.answer.stream:
        return await streamed_answer(
            run, frames, request.receive, gateway.slow_readers, gateway.settings.sse_keep_alive_seconds
        )
    return await whole_answer(run, frames, request.receive)
