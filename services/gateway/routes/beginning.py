"""What every request for text goes through between its parser and its run: the key's limits and its salt."""

from __future__ import annotations

from dataclasses import replace

from fastapi import Request

from services.gateway.domain import Generation
from services.gateway.gateway import Gateway
from services.gateway.generation import GenerationRun
from services.gateway.key_file import KeyGrant
from services.gateway.rate_limits import RateLimitedError


async def begin_run(
    gateway: Gateway, request: Request, generation: Generation, arrival: float, *, watched: bool = True
) -> GenerationRun:
    """
    Args:
        arrival: when the request came in, monotonic.
        watched: the tokens it generates are taken from the key's minute when the HTTP answer ends.

    Raises:
        RateLimitedError: the key has used up its tokens.
    """
    grant: KeyGrant = request.state.grant
    try:
        num_tokens = sum(len(prompt.token_ids) for prompt in generation.prompts)
        request.state.rate = await gateway.rate_limits.take(grant, tokens=num_tokens) or request.state.rate
    except RateLimitedError as error:
        request.state.rate = error.state
        raise
    if grant.cache_salt:
        # No request's own salt has a slash, so that nobody can name another key's.
        generation = replace(generation, cache_salt=f"{grant.cache_salt}/{generation.cache_salt}")
    run = GenerationRun(
        generation,
        dispatcher=gateway.dispatcher,
        tokenizer=gateway.model.tokenizer,
        recorder=gateway.recorder,
        deadline=arrival + gateway.settings.request_timeout,
        arrival=arrival,
        client_id=request.state.client_id,
    )
    gateway.metrics.asked(generation.n, max(prompt.max_tokens for prompt in generation.prompts))
    if watched:
        request.state.run = run
    return run
