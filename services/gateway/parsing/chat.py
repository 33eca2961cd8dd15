"""POST /v1/chat/completions: body to Generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from biphase.errors import InvalidRequestError
from biphase.request import StructuredOutput
from services.gateway.domain import AnswerOptions, Generation, Limits, Prompt, TextOptions
from services.gateway.message.reader import MessageForm
from services.gateway.message.tool_formats import described, written_out
from services.gateway.model import ServedModel
from services.gateway.parsing.identity import Identity
from services.gateway.parsing.lengths import check_max_tokens, check_min_tokens, room_for_output, too_long, truncated
from services.gateway.parsing.messages import parse_messages
from services.gateway.parsing.sampling import (
    check_logprobs,
    invalid,
    num_alternatives,
    parse_cache_salt,
    parse_n,
    parse_priority,
    parse_sampling,
    parse_text_options,
    refuse_unsupported,
)
from services.gateway.parsing.stream import parse_stream
from services.gateway.parsing.structured import AskedForm, parse_structured
from services.gateway.parsing.tools import AskedTools, parse_tools
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
    form = parse_structured(body)
    if len(body.tools or ()) > limits.max_model_len:
        # The model is shown each of them.
        raise too_long(len(body.tools or ()), limits, at_least=True)
    tools = parse_tools(body)
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
    prompt, token_ids = await _prompt(body, tools, model=model, limits=limits, reserve=asked or 1)
    message = _message_form(body, tools, prompt, model)
    structured = await _structured(form, tools, message, prompt, model)
    return Generation(
        endpoint=identity.endpoint,
        response_id=identity.response_id,
        request_id=identity.request_id,
        created=identity.created,
        model=name,
        prompts=(Prompt(token_ids, room_for_output(len(token_ids), asked, limits)),),
        n=n,
        sampling=sampling if structured is None else replace(sampling, structured_output=structured),
        text=_text_options(parse_text_options(body), message, model),
        answer=AnswerOptions(
            stream=stream.stream,
            include_usage=stream.include_usage,
            continuous_usage=stream.continuous_usage,
            logprobs=num_alternatives(logprobs, sampling),
            prompt_logprobs=prompt_logprobs,
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ),
        priority=parse_priority(body),
        cache_salt=parse_cache_salt(body),
        message=message,
    )


async def chat_token_ids(body: ChatRequest, *, model: ServedModel, limits: Limits, reserve: int) -> list[int]:
    """The conversation as the model reads it."""
    _, token_ids = await _prompt(body, parse_tools(body), model=model, limits=limits, reserve=reserve)
    return token_ids


async def _prompt(
    body: ChatRequest, tools: AskedTools | None, *, model: ServedModel, limits: Limits, reserve: int
) -> tuple[str, list[int]]:
    """The conversation as text and as tokens."""
    template = model.require_chat_template()
    shown = None if tools is None else tools.shown
    messages = parse_messages(
        body.messages, limits=limits, content_parts=template.wants_content_parts(with_tools=tools is not None)
    )
    if not template.uses("tool_calls"):
        messages = written_out(messages, model.tool_format)
    if shown is not None and not template.uses("tools"):
        messages, shown = described(messages, shown, model.tool_format), None
    final = bool(body.continue_final_message)
    if final and body.add_generation_prompt:
        raise InvalidRequestError(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True.", "continue_final_message"
        )
    text = await model.render(
        messages,
        add_generation_prompt=body.add_generation_prompt is not False and not final,
        continue_final_message=final,
        tools=shown,
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
    return text, list(cut)


def _message_form(body: ChatRequest, tools: AskedTools | None, prompt: str, model: ServedModel) -> MessageForm | None:
    """How answers are read; None when their text is nothing but content."""
    reasoning, budget = model.reasoning_format, body.thinking_token_budget
    if budget is not None and budget < -1:
        raise invalid("thinking_token_budget must be at least 0, or -1 for no limit.", "thinking_token_budget", budget)
    if reasoning is None and tools is None:
        return None
    ends = [] if reasoning is None else model.tokenizer.encode(reasoning.end, add_special_tokens=False)
    return MessageForm(
        reasoning=reasoning,
        reasoning_is_open=reasoning is not None and reasoning.is_open_after(prompt),
        include_reasoning=body.include_reasoning is not False,
        max_reasoning_tokens=None if budget == -1 else budget,
        reasoning_end_ids=ends,
        tools=None if tools is None else model.tool_format,
        tool_names=frozenset() if tools is None else frozenset(tool["function"]["name"] for tool in tools.callable),
        max_calls=0 if tools is None or tools.many else 1,
        is_named=tools is not None and tools.is_named,
    )


async def _structured(
    form: AskedForm | None, tools: AskedTools | None, message: MessageForm | None, prompt: str, model: ServedModel
) -> StructuredOutput | None:
    """The grammar that the whole text follows: calls where they are required, after the reasoning where there is any.

    Raises:
        InvalidRequestError: it does not compile.
    """
    structured, param = (None, "tools") if form is None else (form.structured, form.param)
    if tools is not None and tools.is_required:
        # A form is one of the content; there will be none.
        structured, param = model.tool_format.grammar(tools.callable, many=tools.many), "tools"
    elif tools is not None and structured is not None:
        # What the model says is of that form, but it may also call.
        structured = model.tool_format.grammar(tools.callable, many=tools.many, content=structured)
    if structured is None:
        return None
    reasoning = None if message is None else message.reasoning
    if reasoning is not None and message is not None and not reasoning.is_closed_after(prompt):
        start = "" if message.reasoning_is_open else reasoning.start
        structured = replace(structured, reasoning_start=start, reasoning_end=reasoning.end)
    await model.check_grammar(structured, param)
    return structured


def _text_options(options: TextOptions, message: MessageForm | None, model: ServedModel) -> TextOptions:
    """Marks of calls and reasoning stay in the text where they are special tokens: they are read, and not shown."""
    if message is None:
        return options
    marks = set() if message.tools is None else set(message.tools.marks)
    if message.reasoning is not None:
        marks |= {message.reasoning.start, message.reasoning.end}
    return replace(options, skip_special_tokens=False) if marks & model.special_texts else options


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
