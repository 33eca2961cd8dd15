"""POST /v1/completions: body to Generation."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from biphase.errors import InvalidRequestError, UnsupportedError
from services.gateway.domain import AnswerOptions, Generation, Limits, Prompt
from services.gateway.http_errors import shown
from services.gateway.model import ServedModel
from services.gateway.parsing.identity import Identity
from services.gateway.parsing.lengths import check_max_tokens, check_min_tokens, room_for_output, too_long, truncated
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
from services.gateway.parsing.structured import parse_structured
from services.gateway.wire import CompletionRequest

MAX_PROMPTS = 1024
DEFAULT_MAX_TOKENS = 16


async def parse_completion(
    body: CompletionRequest, *, identity: Identity, model: ServedModel, limits: Limits
) -> Generation:
    """
    Raises:
        BiphaseError: whatever is wrong with it, before anything is dispatched.
    """
    name = model.check_name(body.model)
    asked = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompt_only = asked == 0 and bool(body.echo)
    if not prompt_only:
        check_max_tokens(asked, limits, "max_tokens")
    refuse_unsupported(body)
    form = parse_structured(body)
    if body.suffix:
        raise UnsupportedError("suffix is not supported.", "suffix")
    if body.prompt_embeds is not None:
        raise UnsupportedError("prompt_embeds is not supported.", "prompt_embeds")
    stream = parse_stream(body)
    logprobs = check_logprobs(body.logprobs, limits, "logprobs")
    prompt_logprobs = check_logprobs(body.prompt_logprobs, limits, "prompt_logprobs")
    if prompt_logprobs is not None and stream.stream:
        raise invalid("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    # Echo shows the prompt's own logprobs in the same place as the output's.
    wanted = [count for count in (prompt_logprobs, logprobs if body.echo else None) if count is not None]
    sampling = parse_sampling(
        body,
        limits=limits,
        tokenizer=model.tokenizer,
        defaults=model.generation_defaults,
        logprobs=logprobs,
        prompt_logprobs=max(wanted, default=None),
    )
    if not prompt_only:
        check_min_tokens(sampling.min_tokens, asked)
    if isinstance(body.prompt, list) and len(body.prompt) > max(limits.max_model_len, MAX_PROMPTS):
        # Neither that many prompts nor one so long: no need to look at each item.
        raise too_long(len(body.prompt), limits, at_least=True)
    raw = _prompts(body.prompt)
    n = parse_n(body, limits, len(raw))
    prompts = []
    for item in raw:
        prompts.append(await _prompt(item, body, asked=1 if prompt_only else asked, model=model, limits=limits))
        if len(raw) > 1:
            # A thousand prompts are a second of work: others get their turn in between.
            await asyncio.sleep(0)
    if form is not None:
        await model.check_grammar(form.structured, form.param)
        sampling = replace(sampling, structured_output=form.structured)
    return Generation(
        endpoint=identity.endpoint,
        response_id=identity.response_id,
        request_id=identity.request_id,
        created=identity.created,
        model=name,
        prompts=tuple(prompts),
        n=n,
        sampling=sampling,
        text=parse_text_options(body),
        answer=AnswerOptions(
            stream=stream.stream,
            include_usage=stream.include_usage,
            continuous_usage=stream.continuous_usage,
            logprobs=num_alternatives(logprobs, sampling),
            prompt_logprobs=prompt_logprobs,
            echo=bool(body.echo),
            prompt_only=prompt_only,
            return_token_ids=bool(body.return_token_ids),
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        ),
        priority=parse_priority(body),
        cache_salt=parse_cache_salt(body),
    )


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The four forms of `prompt` as a list of texts or token lists."""
    if prompt is None or prompt == "":
        raise invalid("prompt must be provided and non-empty.", "prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list):
        raise invalid("prompt must be a string, a list of strings, token ids or lists of token ids.", "prompt")
    if not prompt:
        raise invalid("You must pass at least one prompt.", "prompt")
    if _all_ids(prompt):
        return [prompt]
    if len(prompt) > MAX_PROMPTS:
        raise invalid(f"prompt may hold at most {MAX_PROMPTS} prompts, got {len(prompt)}.", "prompt")
    for place, item in enumerate(prompt):
        if not item:
            raise invalid("a prompt must not be empty.", f"prompt.{place}")
        if not isinstance(item, str) and not (isinstance(item, list) and _all_ids(item)):
            raise invalid(
                "prompt must be a string, a list of strings, token ids or lists of token ids.", f"prompt.{place}", item
            )
    return prompt


def _all_ids(items: Sequence[Any]) -> bool:
    return all(type(item) is int for item in items)


async def _prompt(
    raw: str | list[int], body: CompletionRequest, *, asked: int, model: ServedModel, limits: Limits
) -> Prompt:
    token_ids: Sequence[int]
    if isinstance(raw, str):
        encoded = await model.encode(
            raw, max_tokens=limits.max_model_len, add_special_tokens=body.add_special_tokens is not False
        )
        if encoded is None:
            raise too_long(limits.max_model_len + 1, limits, at_least=True)
        if not encoded:
            raise invalid("prompt must be provided and non-empty.", "prompt")
        token_ids = encoded
    else:
        if min(raw) < 0 or max(raw) >= limits.vocab_size:
            bad = min(raw) if min(raw) < 0 else max(raw)
            raise InvalidRequestError(f"Token id {shown(bad)} is out of vocabulary", "prompt")
        token_ids = raw
    cut = truncated(token_ids, body.truncate_prompt_tokens, body.truncation_side, limits, asked)
    max_tokens = room_for_output(len(cut), asked, limits)
    text = ""
    if body.echo:
        text = raw if isinstance(raw, str) and cut is token_ids else model.tokenizer.decode(cut)
    return Prompt(cut, max_tokens, text)
