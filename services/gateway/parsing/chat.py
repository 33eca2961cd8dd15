"""POST /v1/chat/completions: body to Generation."""

from __future__ import annotations

from typing import Any

from biphase.errors import InvalidRequestError
from services.gateway.domain import AnswerOptions, Generation, Limits, Prompt
from services.gateway.model import ServedModel
from services.gateway.parsing.identity import Identity
from services.gateway.parsing.lengths import check_max_tokens, check_min_tokens, room_for_output, too_long, truncated
from services.gateway.parsing.messages import parse_messages
from services.gateway.parsing.sampling import (
    check_logprobs,
    invalid,
    parse_cache_salt,
    parse_n,
    parse_priority,
    parse_sampling,
    parse_text_options,
    refuse_unsupported,
)
from services.gateway.parsing.stream import parse_stream
from services.gateway.parsing.tools import parse_tools, refuse_structured_output
from services.gateway.wire import ChatRequest


async def parse_chat(body: ChatRequest, *, identity: Identity, model: ServedModel, limits: Limits) -> Generation:
    """
    Raises:
        BiphaseError: whatever is wrong with it, before anything is dispatched.
    """
    name = model.check_name(body.model)
    param, asked = "max_completion_tokens", body.max_completion_tokens
    if asked is None:
        param, asked = "max_tokens", body.max_tokens
    check_max_tokens(asked, limits, param)
    refuse_unsupported(body)
    refuse_structured_output(body)
    stream = parse_stream(body)
    logprobs = _logprobs(body, limits)
    prompt_logprobs = check_logprobs(body.prompt_logprobs, limits, "prompt_logprobs")
    if prompt_logprobs is not None and stream.stream:
        raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    sampling = parse_sampling(
        body,
        limits=limits,
        tokenizer=model.tokenizer,
        defaults=model.generation_defaults,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    check_min_tokens(sampling.min_tokens, asked)
    n = parse_n(body, limits)
    token_ids = await chat_token_ids(body, model=model, limits=limits, reserve=asked or 1)
    return Generation(
        endpoint=identity.endpoint,
        response_id=identity.response_id,
        request_id=identity.request_id,
        created=identity.created,
        model=name,
        prompts=(Prompt(token_ids, room_for_output(len(token_ids), asked, limits)),),
        n=n,
        sampling=sampling,
        text=parse_text_options(body),
        answer=AnswerOptions(
            stream=stream.stream,
            include_usage=stream.include_usage,
            continuous_usage=stream.continuous_usage,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ),
        priority=parse_priority(body),
        cache_salt=parse_cache_salt(body),
    )


async def chat_token_ids(body: ChatRequest, *, model: ServedModel, limits: Limits, reserve: int) -> list[int]:
    """The conversation as the model reads it."""
    template = model.require_chat_template()
    tools = parse_tools(body)
    messages = parse_messages(
        body.messages, limits=limits, content_parts=template.wants_content_parts(with_tools=tools is not None)
    )
    final = bool(body.continue_final_message)
    if final and body.add_generation_prompt:
        raise InvalidRequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )
    text = await model.render(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False and not final,
        continue_final_message=final,
        tools=tools,
        documents=body.documents,
        variables=_template_variables(body),
    )
    token_ids = await model.encode(
        text, max_tokens=limits.max_model_len, add_special_tokens=bool(body.add_special_tokens)
    )
    if token_ids is None:
        raise too_long(limits.max_model_len + 1, limits, at_least=True)
    if not token_ids:
        raise InvalidRequestError("The conversation is empty once the chat template is applied.", "messages")
    cut = truncated(token_ids, body.truncate_prompt_tokens, body.truncation_side, limits, reserve)
    if len(cut) >= limits.max_model_len:
        raise too_long(len(cut), limits)
    return list(cut)


def _template_variables(body: ChatRequest) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    if body.chat_template is not None or "chat_template" in variables:
        raise InvalidRequestError(
            "A chat template that comes with the request is not accepted; start the gateway with --chat-template.",
            "chat_template",
        )
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
        variables.setdefault("enable_thinking", body.reasoning_effort != "none")
    return variables


def _logprobs(body: ChatRequest, limits: Limits) -> int | None:
    alternatives = check_logprobs(body.top_logprobs, limits, "top_logprobs")
    if body.logprobs:
        return alternatives or 0
    if alternatives:
        raise invalid("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
    return None
