"""A request as the engine sees it: plain data, stdlib only.

Owns the words: ids, sampling parameters, status, finish reasons. Owns no behaviour beyond what follows from the data
itself. Where a request stands is said by its counters, as in vLLM: a step gives it `num_scheduled_tokens`, and a
request is caught up when `num_computed_tokens` reaches `num_tokens`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

RequestId = NewType("RequestId", str)
NodeId = NewType("NodeId", str)
BlockHash = NewType("BlockHash", bytes)


class FinishReason(StrEnum):
    """Why generation ended. `STOP` and `LENGTH` are OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class RequestStatus(Enum):
    WAITING = "waiting"
    WAITING_FOR_REMOTE_KV = "waiting_for_remote_kv"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "finished_stopped"
    FINISHED_LENGTH = "finished_length"
    FINISHED_ABORTED = "finished_aborted"
    FINISHED_ERROR = "finished_error"

    @property
    def is_finished(self) -> bool:
        return self.value.startswith("finished")


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """A grammar the output follows: `kind` and `spec` as in the wire message (biphase.grammar.spec builds them).

    With `reasoning_end` it holds only after that text; with `reasoning_start` besides, the model may open with that
    text or go without reasoning.
    """

    kind: str
    spec: str
    reasoning_start: str = ""
    reasoning_end: str = ""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How logits become a token; every value explicit and already validated. See common.proto for units and ranges."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    structured_output: StructuredOutput | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    def ends_at(self, token_id: int, num_output_tokens: int) -> bool:
        """Whether this token, the num_output_tokens-th of the output, ends the sequence.

        Nothing ends it before min_tokens, but for the end of sequence in structured output: it is sampled where the
        grammar leaves nothing else, and nothing can follow it.
        """
        if token_id in self.eos_token_ids and self.structured_output is not None:
            return True
        if num_output_tokens < self.min_tokens:
            return False
        return token_id in self.stop_token_ids or (token_id in self.eos_token_ids and not self.ignore_eos)

    def is_named_stop(self, token_id: int) -> bool:
        """Whether a token that ends the sequence is one the client named, and not an end of sequence."""
        return token_id in self.stop_token_ids and (self.ignore_eos or token_id not in self.eos_token_ids)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the sampled token first, then the most likely, best first.

    `token_ids` and `logprobs` have equal length; `rank` is the sampled token's place in the vocabulary, 1 = best.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    rank: int


# Chunks of a prompt that are told apart; those of a longer one are counted with the last.
MAX_CHUNKS_TOLD = 48


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens of one request that one step computed before its first token; monotonic seconds."""

    start_time: float
    end_time: float
    num_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """One sequence in one engine. Mutated by the scheduler only, in the engine's thread."""

    request_id: RequestId
    prompt_token_ids: list[int]
    sampling: SamplingParams
    # Output so far. Not empty at arrival when a stream moved here from another worker.
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    cache_salt: str = ""
    arrival_time: float = field(default_factory=time.monotonic)
    # True on a prefill worker: compute the KV of all tokens, sample one token, keep the blocks until released.
    prefill_only: bool = False
    # Leading blocks that the asker of a prefill_only request holds already: not announced to it.
    num_held_blocks: int = 0
    # Blocks for all tokens are reserved first and filled by reads from another node (hand-off, or a prefix that a
    # store holds); the engine computes nothing for it until it is told what arrived.
    awaits_kv: bool = False

    status: RequestStatus = RequestStatus.WAITING
    # Tokens whose KV stands in this worker's cache.
    num_computed_tokens: int = 0
    # Of those, found in this worker's own prefix cache at first admission.
    num_cached_tokens: int = 0
    # Of those, read from another node.
    num_external_tokens: int = 0
    # How many of output_token_ids came in with the request.
    num_preset_output_tokens: int = 0
    num_preemptions: int = 0
    # Chain hashes of the full blocks of all tokens; extended by the cache manager as blocks fill.
    block_hashes: list[BlockHash] = field(default_factory=list)
    # Prompt tokens that stood in no cache when the request arrived: an estimate, for queue order and load.
    num_uncached_tokens: int = 0
    # Leading blocks of a prefill_only request that were announced as computed; survives preemption.
    num_announced_blocks: int = 0
    # Collected over the prompt's chunks, handed over with the first token.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    # Monotonic seconds; None until it happened.
    first_scheduled_time: float | None = None
    last_scheduled_time: float | None = None
    first_token_time: float | None = None
    # Of an awaits_kv request: when what was read had arrived.
    kv_ready_time: float | None = None
    # What was computed for the first token, step by step.
    chunks: list[Chunk] = field(default_factory=list)
    stop_token_id: int | None = None

    def note_chunk(self, end_time: float, num_tokens: int) -> None:
        """A step that ended now computed so many of its tokens, and there is no first token yet."""
        start_time = max(self.last_scheduled_time or 0.0, self.kv_ready_time or 0.0) or end_time
        if len(self.chunks) == MAX_CHUNKS_TOLD:
            last = self.chunks.pop()
            start_time, num_tokens = last.start_time, last.num_tokens + num_tokens
        self.chunks.append(Chunk(start_time, end_time, num_tokens))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.output_token_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt and output together; the KV of all but the newest is needed to sample the next."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def token_slice(self, start: int, stop: int) -> list[int]:
        """Tokens [start, stop) of prompt and output together, without building all of them."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if stop <= num_prompt_tokens:
            return self.prompt_token_ids[start:stop]
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : stop - num_prompt_tokens]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - num_prompt_tokens]

    @property
    def all_token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids
