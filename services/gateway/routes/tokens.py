"""POST /tokenize and /detokenize: what the model reads, for clients that count or build prompts themselves."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from biphase.errors import InvalidRequestError
from services.gateway.bodies import body_schema
from services.gateway.domain import Limits
from services.gateway.gateway import Gateway
from services.gateway.http_errors import shown
from services.gateway.parsing.chat import chat_token_ids
from services.gateway.parsing.lengths import too_long
from services.gateway.wire import ChatRequest, DetokenizeRequest, TokenizeRequest

# Counting is for prompts that are too long as well, within reason.
_LENGTH_FACTOR = 16


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=body_schema(TokenizeRequest), summary="Text or chat to token ids")
    async def tokenize(request: Request) -> dict[str, Any]:
        body = await gateway.bodies.read(request, TokenizeRequest)
        gateway.model.check_name(body.model)
        length = gateway.max_model_len()
        token_ids = await _token_ids(gateway, body, length or 2**20)
        tokenizer = gateway.model.tokenizer
        return {
            "count": len(token_ids),
            "max_model_len": length,
            "tokens": token_ids,
            "token_strs": [tokenizer.token_string(token_id) for token_id in token_ids]
            if body.return_token_strs
            else None,
        }

    @router.post("/detokenize", openapi_extra=body_schema(DetokenizeRequest), summary="Token ids to text")
    async def detokenize(request: Request) -> dict[str, Any]:
        body = await gateway.bodies.read(request, DetokenizeRequest)
        gateway.model.check_name(body.model)
        tokenizer = gateway.model.tokenizer
        for place, token_id in enumerate(body.tokens):
            if not 0 <= token_id < tokenizer.vocab_size:
                raise InvalidRequestError(f"Token id {shown(token_id)} is out of vocabulary", f"tokens.{place}")
        return {"prompt": tokenizer.decode(body.tokens)}

    if gateway.settings.enable_tokenizer_info_endpoint:

        @router.get("/tokenizer_info", summary="The tokenizer's settings")
        async def tokenizer_info() -> dict[str, Any]:
            model = gateway.model
            template = None if model.chat_template is None else model.chat_template.text
            return {
                "tokenizer_class": "PreTrainedTokenizerFast",
                **model.tokenizer.special_tokens_map,
                "vocab_size": model.tokenizer.vocab_size,
                "model_max_length": gateway.max_model_len(),
                "chat_template": template,
            }

    return router


async def _token_ids(gateway: Gateway, body: TokenizeRequest, max_model_len: int) -> list[int]:
    limits = Limits(max_model_len * _LENGTH_FACTOR, gateway.model.tokenizer.vocab_size, 0, 1)
    if body.messages is not None:
        chat = ChatRequest(
            messages=body.messages,
            tools=body.tools,
            chat_template=body.chat_template,
            chat_template_kwargs=body.chat_template_kwargs,
            add_generation_prompt=body.add_generation_prompt,
            continue_final_message=body.continue_final_message,
            add_special_tokens=body.add_special_tokens,
        )
        return await chat_token_ids(chat, model=gateway.model, limits=limits, reserve=1)
    if body.prompt is None:
        raise InvalidRequestError("Either prompt or messages must be given.", "prompt")
    token_ids = await gateway.model.encode(
        body.prompt, max_tokens=limits.max_model_len, add_special_tokens=body.add_special_tokens is not False
    )
    if token_ids is None:
        raise too_long(limits.max_model_len, limits, at_least=True)
    return token_ids
