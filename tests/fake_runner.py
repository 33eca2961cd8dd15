"""A model that is a few integers: its KV lies in real slots of real blocks, so that a wrong block gives a wrong token.

The KV of a token mixes the KV of the token before it, read back through the block table, with the token itself. The
next token folds the KV of all tokens, read the same way. So a block reused too early, shared wrongly, filled in the
wrong place or computed twice differently changes what is sampled; and what should be sampled is a pure function of the
token ids, `expected_tokens`.
"""

from __future__ import annotations

from collections.abc import Sequence

from biphase.cache.block_pool import BlockPool
from biphase.request import Request, SamplingParams
from biphase.scheduler.output import RunnerOutput, SampledToken, SchedulerOutput

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
        sampled = {}
        for s in output.scheduled:
            tokens = s.request.all_token_ids
            stop = s.num_computed_tokens + s.num_scheduled_tokens
            assert s.num_computed_tokens == s.request.num_computed_tokens
            assert s.num_scheduled_tokens > 0 and stop <= len(tokens)
            assert stop <= len(s.block_ids) * self.block_size, "tokens without slots"
            assert s.samples == (stop == len(tokens))
            for position in range(s.num_computed_tokens, stop):
                slot = self.slot(s.block_ids, position)
                block_id = slot // self.block_size
                assert self.pool.hash_of(block_id) is None, "a findable block is written"
                previous = self.memory[self.slot(s.block_ids, position - 1)] or 0 if position else 0
                self.memory[slot] = mix(previous, tokens[position])
            if s.samples:
                sampled[s.request.request_id] = SampledToken(fold(self.read(s.block_ids, stop)))
        return RunnerOutput(sampled=sampled)


def assert_kv(runner: FakeRunner, request: Request, block_ids: Sequence[int], num_tokens: int) -> None:
    """The request's blocks hold what they must."""
    assert runner.read(block_ids, num_tokens) == kv_of(request.all_token_ids[:num_tokens])
