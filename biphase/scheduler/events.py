"""What the engine tells the owner of a request. A request's events come in order; Finished is the last, once."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.cache.blocks import ComputedBlock
from biphase.errors import BiphaseError
from biphase.request import FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reserved:
    """An awaits_kv request has all its blocks and waits for their content.

    `block_ids` is the whole block table. The leading `num_cached_tokens` (whole blocks) stand here already and must
    not be written. Whoever posts reads into the others acquires them from the pool while handling this event: only
    then is an abort free to give the request's blocks up at once.
    """

    block_ids: tuple[int, ...]
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class BlocksComputed:
    """Blocks of a prefill_only request that are final from now on, in order, each announced once.

    The request still holds them while this event is handled, and may not afterwards.
    """

    blocks: tuple[ComputedBlock, ...]


@dataclass(frozen=True, slots=True)
class Tokens:
    """New output tokens, the one that ends the request included.

    `logprobs` has one entry per token where the request asked for them; `prompt_logprobs` comes with the first token
    sampled here, one entry per prompt token after the first.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """`stop_token_id` is set when one of the request's stop_token_ids ended it; `error` with FinishReason.ERROR."""

    reason: FinishReason
    stop_token_id: int | None = None
    error: BiphaseError | None = None


EngineEvent = Reserved | BlocksComputed | Tokens | Finished
