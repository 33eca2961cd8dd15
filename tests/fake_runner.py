"""A model that is a few integers: its KV lies in real slots of real blocks, so that a wrong block gives a wrong token.

The KV of a token mixes the KV of the token before it, read back through the block table, with the token itself. The
next token folds the KV of all tokens, read the same way. So a block reused too early, shared wrongly, filled in the
wrong place or computed twice differently changes what is sampled; and what should be sampled is a pure function of the
token ids, `expected_tokens`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from biphase.cache.block_pool import BlockPool
from biphase.errors import BiphaseError
from biphase.request import Request, RequestId, SamplingParams
from biphase.scheduler.output import RunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput

VOCAB_SIZE = 97
_MASK = (1 << 61) - 1


def mix(previous: int, token_id: int) -> int:
    return (previous * 1_000_003 + token_id * 7919 + 12345) & _MASK


def kv_of(token_ids: Sequence[int]) -> list[int]:
    """The KV that every token must have."""
    values: list[int] = []
    previous = 0
    for token_id in token_ids:
        previous = mix(previous, token_id)
        values.append(previous)
    return values


def fold(values: Sequence[int]) -> int:
    """The token sampled after these."""
    return sum(value * (3 * i + 1) for i, value in enumerate(values)) % 1_000_000_007 % VOCAB_SIZE


def expected_tokens(prompt: Sequence[int], sampling: SamplingParams, max_model_len: int = 1 << 30) -> list[int]:
    """All output tokens of an undisturbed run. Stop conditions written out anew, on purpose."""
    tokens, output = list(prompt), list[int]()
    while True:
        output.append(fold(kv_of(tokens)))
        tokens.append(output[-1])
        if len(output) >= sampling.min_tokens:
            if not sampling.ignore_eos and output[-1] in sampling.eos_token_ids:
                return output
            if output[-1] in sampling.stop_token_ids:
                return output
        if len(output) == sampling.max_tokens or len(tokens) == max_model_len:
            return output


class FakeRunner:
    """Runs steps on the fake model and checks what any runner may rely on."""

    def __init__(self, pool: BlockPool, block_size: int, max_num_batched_tokens: int = 1 << 30) -> None:
        self.pool = pool
        self.block_size = block_size
        self.max_num_batched_tokens = max_num_batched_tokens
        self.memory: list[int | None] = [None] * (pool.num_blocks * block_size)
        self.num_steps = 0
        # Of the last step: request id -> tokens run.
        self.last_step: dict[str, int] = {}

    def slot(self, block_ids: Sequence[int], position: int) -> int:
        return block_ids[position // self.block_size] * self.block_size + position % self.block_size

    def read(self, block_ids: Sequence[int], num_tokens: int) -> list[int]:
        values = [self.memory[self.slot(block_ids, position)] for position in range(num_tokens)]
        return [-1 if value is None else value for value in values]

    def receive(self, block_ids: Sequence[int], token_ids: Sequence[int], start: int, stop: int) -> None:
        """What a transfer does: fills the slots of tokens [start, stop) with KV computed elsewhere."""
        values = kv_of(token_ids[:stop])
        for position in range(start, stop):
            self.memory[self.slot(block_ids, position)] = values[position]

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        assert 0 < output.num_tokens <= self.max_num_batched_tokens
        self.num_steps += 1
        self.last_step = {s.request.request_id: s.num_scheduled_tokens for s in output.scheduled}
        assert len(self.last_step) == len(output.scheduled), "a request twice in one step"
        result = RunnerOutput()
        for s in output.scheduled:
            assert s.num_computed_tokens == s.request.num_computed_tokens
            token = self.compute(s, s.block_ids, s.request.all_token_ids)
            if token is not None:
                result.sampled[s.request.request_id] = SampledToken(token)
        return result

    def compute(self, s: ScheduledRequest, block_ids: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Runs one request's share. Returns the token it samples, if it does."""
        stop = s.num_computed_tokens + s.num_scheduled_tokens
        assert s.num_scheduled_tokens > 0 and stop <= len(tokens)
        assert stop <= len(block_ids) * self.block_size, "tokens without slots"
        assert s.samples == (stop == len(tokens))
        for position in range(s.num_computed_tokens, stop):
            slot = self.slot(block_ids, position)
            block_id = slot // self.block_size
            assert self.pool.hash_of(block_id) is None, "a findable block is written"
            assert self.pool.ref_count(block_id) > 0, "a free block is written"
            previous = self.memory[self.slot(block_ids, position - 1)] or 0 if position else 0
            self.memory[slot] = mix(previous, tokens[position])
        return fold(self.read(block_ids, stop)) if s.samples else None


@dataclass
class Begun:
    """A step in flight, with what was known when it was begun."""

    output: SchedulerOutput
    block_ids: list[list[int]]
    tokens: list[list[int]]
    # Whether the last token of each is the one that the step before samples.
    fed: list[bool]
    result: RunnerOutput = field(default_factory=RunnerOutput)
    num_run: int = 0


class FakeOverlappingRunner(FakeRunner):
    """Runs a step at any moment between its two halves, share by share, but never before the step before it."""

    def __init__(
        self, pool: BlockPool, block_size: int, max_num_batched_tokens: int = 1 << 30, *, seed: int = 0
    ) -> None:
        super().__init__(pool, block_size, max_num_batched_tokens)
        self._rng = random.Random(seed)
        self._begun: deque[Begun] = deque()
        self._last: dict[Request, int] = {}
        self.num_fed = self.num_overlapping = 0
        # Requests that get no further token, and why.
        self.failing: dict[RequestId, BiphaseError] = {}

    def num_awaited_outputs(self, sampling: SamplingParams) -> int:
        """As the real one, with what the fake model leaves of the reasons."""
        if sampling.prompt_logprobs is not None:
            return 1
        return 1 << 30 if sampling.structured_output is not None else sampling.min_tokens

    def begin(self, output: SchedulerOutput) -> Begun:
        assert 0 < output.num_tokens <= self.max_num_batched_tokens
        assert len(self._begun) < 2, "a third step in flight"
        assert len({s.request for s in output.scheduled}) == len(output.scheduled), "a request twice in one step"
        self.num_steps += 1
        self.num_overlapping += len(self._begun)
        begun = Begun(output, [list(s.block_ids) for s in output.scheduled], [], [])
        before = self._begun[-1].output.scheduled if self._begun else []
        samplers = {s.request for s in before if s.samples}
        for s in output.scheduled:
            tokens = s.request.all_token_ids
            fed = s.num_computed_tokens == len(tokens)
            if fed:
                assert s.num_scheduled_tokens == 1 and s.request in samplers
                assert s.request.num_output_tokens >= self.num_awaited_outputs(s.request.sampling)
                self.num_fed += 1
            begun.tokens.append(tokens)
            begun.fed.append(fed)
        self._begun.append(begun)
        self.work()
        return begun

    def work(self) -> None:
        """Time passes: some shares of what is in flight are run."""
        pace = self._rng.choice((0.0, 0.5, 0.9, 1.0))
        for begun in self._begun:
            while begun.num_run < len(begun.tokens):
                if self._rng.random() >= pace:
                    return
                self._run_next(begun)

    def finish(self, pending: Begun) -> RunnerOutput:
        assert self._begun.popleft() is pending, "not the oldest"
        while pending.num_run < len(pending.tokens):
            self._run_next(pending)
        return pending.result

    def _run_next(self, begun: Begun) -> None:
        n = begun.num_run
        begun.num_run += 1
        s = begun.output.scheduled[n]
        tokens = begun.tokens[n] + ([self._last[s.request]] if begun.fed[n] else [])
        token = self.compute(s, begun.block_ids[n], tokens)
        if token is not None:
            self._last[s.request] = token
            request_id = s.request.request_id
            if request_id in self.failing:
                begun.result.failed[request_id] = self.failing[request_id]
            else:
                begun.result.sampled[request_id] = SampledToken(token)


def assert_kv(runner: FakeRunner, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
    """The request's blocks hold what they must."""
    assert runner.read(block_ids, num_tokens) == kv_of(request.all_token_ids[:num_tokens])
