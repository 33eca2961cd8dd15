"""Tells the owner of a request what became of it, and marks on the request what was told.

Owns the events' content: which blocks are new to the reader, which logprobs go with which token. Does not own when
they are due (scheduler), nor where they go (engine).
"""

from __future__ import annotations

from collections.abc import Callable

from biphase.cache.blocks import num_blocks_for
from biphase.cache.manager import KVCacheManager
from biphase.errors import BiphaseError
from biphase.request import FinishReason, Request, TokenLogprobs
from biphase.scheduler.events import BlocksComputed, EngineEvent, Finished, Reserved, Tokens
from biphase.scheduler.output import SampledToken


class Reporter:
    """Every event is emitted while the request still holds the blocks that it names."""

    def __init__(
        self, manager: KVCacheManager, emit: Callable[[Request, EngineEvent], None], clock: Callable[[], float]
    ) -> None:
        self._manager = manager
        self._emit = emit
        self._clock = clock

    def reserved(self, request: Request) -> None:
        block_ids = tuple(self._manager.block_ids(request))
        self._emit(request, Reserved(block_ids, request.num_computed_tokens))

    def announce(self, request: Request) -> None:
        """Says which blocks became final: full ones, and the partial last one when all tokens are computed."""
        block_size, num_computed_tokens = self._manager.block_size, request.num_computed_tokens
        stop = num_computed_tokens // block_size
        if num_computed_tokens == request.num_tokens:
            stop = num_blocks_for(num_computed_tokens, block_size)
        start = max(request.num_announced_blocks, request.num_held_blocks)
        if stop > start:
            request.num_announced_blocks = stop
            self._emit(request, BlocksComputed(self._manager.computed_blocks(request, start, stop)))

    def append(self, request: Request, sampled: SampledToken) -> None:
        """Appends a token to the output; the prompt's logprobs go out with the first."""
        request.output_token_ids.append(sampled.token_id)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if request.first_token_time is None:
            request.first_token_time = self._clock()
            prompt_logprobs = tuple(request.prompt_logprobs)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        self._emit(request, Tokens((sampled.token_id,), logprobs, prompt_logprobs))

    def finished(self, request: Request, reason: FinishReason, error: BiphaseError | None) -> None:
        self._emit(request, Finished(reason, request.stop_token_id, error))
