"""Exact steps decided while another runs: who is in them, who waits, and whose blocks are kept."""

from __future__ import annotations

from typing import Any

import pytest

from biphase.errors import InternalError, InvalidRequestError
from biphase.request import FinishReason, RequestId, RequestStatus, SamplingParams, StructuredOutput
from biphase.scheduler.output import SchedulerOutput
from biphase.scheduler.scheduler import Scheduler
from tests.fake_runner import Begun, FakeOverlappingRunner, expected_tokens
from tests.step_bench import SIZE, Bench


class AheadBench(Bench):
    """Steps in two halves; `begin` and `take` are what an engine does."""

    def __init__(self, num_blocks: int = 32, enable_caching: bool = True, **config: Any) -> None:
        super().__init__(num_blocks, enable_caching, overlap=True, **config)
        self.ahead_runner = FakeOverlappingRunner(self.pool, SIZE)
        self.scheduler = Scheduler(
            self.manager,
            self.scheduler.config,
            lambda request, event: self.events.append((request.request_id, event)),
            lambda: self.now,
            num_awaited_outputs=self.ahead_runner.num_awaited_outputs,
        )
        self.in_flight: list[Begun] = []

    def begin(self) -> dict[str, int]:
        """Returns request id -> tokens of the step that was begun; empty when there is nothing to begin."""
        output = self.schedule()
        self.now += 0.1
        if output.scheduled:
            self.in_flight.append(self.ahead_runner.begin(output))
        return {s.request.request_id: s.num_scheduled_tokens for s in output.scheduled}

    def take(self) -> None:
        begun = self.in_flight.pop(0)
        self.scheduler.update_from_output(begun.output, self.ahead_runner.finish(begun))
        self.scheduler.check_integrity()

    def finish_all(self) -> None:
        for _ in range(500):
            if len(self.in_flight) == 2:
                self.take()
            elif not self.begin():
                if not self.in_flight:
                    return
                self.take()
        raise AssertionError("it does not end")


def prompt_of(name: str, num_tokens: int) -> list[int]:
    start = sum(name.encode()) * 1000
    return list(range(start, start + num_tokens))


def outputs_of(name: str, num_tokens: int, **sampling: Any) -> list[int]:
    return expected_tokens(prompt_of(name, num_tokens), SamplingParams(**{"max_tokens": 8, **sampling}))


def test_decodes_and_chunks_go_on_ahead() -> None:
    bench = AheadBench()
    a = bench.add("a", 6)
    assert bench.begin() == {"a": 6}
    bench.add("b", 40)
    assert bench.begin() == {"a": 1, "b": 15}
    # Nothing counts before its result.
    assert (a.num_computed_tokens, a.num_tokens, bench.tokens("a")) == (0, 6, [])
    bench.take()
    assert (a.num_computed_tokens, a.num_tokens) == (6, 7)
    assert bench.begin() == {"a": 1, "b": 15}
    bench.take()
    assert bench.begin() == {"a": 1, "b": 10}
    bench.take()
    assert bench.begin() == {"a": 1, "b": 1}
    bench.finish_all()
    assert bench.tokens("a") == outputs_of("a", 6)
    assert bench.tokens("b") == outputs_of("b", 40)
    assert bench.pool.num_used == 0


def test_without_a_sequence_that_goes_on_nothing_is_decided_ahead() -> None:
    bench = AheadBench()
    bench.add("long", 40)
    assert bench.begin() == {"long": 16}
    bench.add("other", 3)
    assert bench.begin() == {}
    bench.take()
    assert bench.begin() == {"long": 16}


@pytest.mark.parametrize("how", ["max_tokens", "max_model_len", "prefill_only"])
def test_what_ends_in_any_case_is_not_decided_ahead(how: str) -> None:
    bench = AheadBench(max_model_len=8 if how == "max_model_len" else 100)
    bench.add("a", 7, max_tokens=1 if how == "max_tokens" else 8, prefill_only=how == "prefill_only")
    bench.add("b", 3, max_tokens=4)
    assert bench.begin() == {"a": 7, "b": 3}
    assert bench.begin() == {"b": 1}
    bench.take()
    assert bench.finished() == {"a": FinishReason.LENGTH}
    bench.finish_all()
    # Exactly its four steps: none of them for nothing.
    assert bench.ahead_runner.num_steps == 4
    assert bench.tokens("b") == outputs_of("b", 3, max_tokens=4)


@pytest.mark.parametrize(
    "sampling",
    [
        {"structured_output": StructuredOutput("regex", "a")},
        {"min_tokens": 1},
        {"prompt_logprobs": 0},
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_a_request_that_must_see_its_last_token_has_all_wait(sampling: dict[str, Any]) -> None:
    bench = AheadBench()
    bench.add("a", 3)
    assert bench.begin() == {"a": 3}
    bench.add("s", 3, sampling=SamplingParams(max_tokens=8, **sampling))
    # Not even admitted beside the step in flight: sampling it may wait for the device.
    assert bench.begin() == {}
    bench.take()
    assert bench.begin() == {"a": 1, "s": 3}
    assert bench.begin() == {}
    bench.take()
    assert bench.begin() == {"a": 1, "s": 1}
    # One output token is known now, which is all that the latter two await.
    ahead = {} if "structured_output" in sampling else {"a": 1, "s": 1}
    assert bench.begin() == ahead
    bench.take()
    bench.finish_all()
    assert bench.tokens("s") == outputs_of("s", 3)


def test_a_stop_token_makes_the_next_row_void_and_its_blocks_stay_until_then() -> None:
    whole = outputs_of("a", 7)
    bench = AheadBench()
    a = bench.add("a", 7, sampling=SamplingParams(max_tokens=8, stop_token_ids=frozenset({whole[1]})))
    assert whole[1] != whole[0]
    bench.begin()
    bench.begin()
    bench.take()
    assert bench.begin() == {"a": 1}  # for the token after the stop token, in a block of its own by now
    held = list(bench.manager.block_ids(a))
    assert len(held) == 3
    bench.take()
    assert bench.finished() == {"a": FinishReason.STOP}
    assert bench.tokens("a") == whole[:2]
    assert not bench.manager.has_blocks(a)
    assert [bench.pool.ref_count(block_id) for block_id in held] == [1, 1, 1]
    assert bench.manager.num_draining_blocks == 3
    bench.take()
    assert bench.pool.num_used == 0
    assert bench.tokens("a") == whole[:2]
    # What was written for real can be found, and the void token's block can not.
    assert [bench.pool.hash_of(block_id) is not None for block_id in held] == [True, True, False]


@pytest.mark.parametrize("num_in_flight", [1, 2])
def test_abort_keeps_the_blocks_of_steps_in_flight(num_in_flight: int) -> None:
    bench = AheadBench()
    a = bench.add("a", 6)
    bench.add("b", 3)
    for _ in range(num_in_flight):
        bench.begin()
    held = list(bench.manager.block_ids(a))
    bench.scheduler.abort(RequestId("a"))
    bench.scheduler.check_integrity()
    assert all(bench.pool.ref_count(block_id) == 1 for block_id in held)
    # The id is free at once.
    bench.add("a", 5)
    for _ in range(num_in_flight):
        bench.take()
    assert all(bench.pool.ref_count(block_id) == 0 for block_id in held)
    bench.finish_all()
    assert bench.tokens("a") == outputs_of("a", 5)
    assert bench.tokens("b") == outputs_of("b", 3)


def test_nobody_is_preempted_while_a_step_runs() -> None:
    bench = AheadBench(num_blocks=5, enable_caching=False)
    a, b = bench.add("a", 7, max_tokens=9), bench.add("b", 7, max_tokens=9)
    assert bench.begin() == {"a": 7, "b": 7}
    # Their next tokens fill the blocks; of the ones after those one finds a block.
    assert bench.begin() == {"a": 1, "b": 1}
    bench.take()
    assert bench.begin() == {}
    assert a.status is b.status is RequestStatus.RUNNING
    bench.take()
    assert bench.begin() == {"a": 1}
    assert b.status is RequestStatus.PREEMPTED
    bench.finish_all()
    for name in ("a", "b"):
        assert bench.tokens(name) == outputs_of(name, 7, max_tokens=9)


def test_a_row_that_fails_makes_the_next_one_void() -> None:
    bench = AheadBench()
    bench.add("a", 3)
    bench.add("b", 3)
    bench.ahead_runner.failing[RequestId("a")] = InvalidRequestError("no token")
    bench.begin()
    assert bench.begin() == {"a": 1, "b": 1}
    bench.take()
    assert bench.finished() == {"a": FinishReason.ERROR}
    bench.take()
    bench.finish_all()
    assert bench.tokens("a") == []
    assert bench.tokens("b") == outputs_of("b", 3)


def test_a_failed_step_ends_its_requests_in_the_next_one_too() -> None:
    bench = AheadBench()
    bench.add("a", 3)
    bench.begin()
    bench.add("b", 3)
    assert bench.begin() == {"a": 1, "b": 3}
    failed = bench.in_flight.pop(0)
    bench.ahead_runner.finish(failed)
    bench.scheduler.fail_step(failed.output, InternalError("no memory"))
    bench.scheduler.check_integrity()
    bench.take()
    assert bench.finished() == {"a": FinishReason.ERROR}
    bench.finish_all()
    assert bench.tokens("b") == outputs_of("b", 3)
    assert bench.pool.num_used == 0


def test_a_prompt_counts_as_served_from_when_its_chunk_runs() -> None:
    bench = AheadBench()
    bench.add("a", 3, max_tokens=20)
    bench.begin()
    p = bench.add("p", 40)
    bench.now = 5.0
    bench.begin()
    assert p.last_scheduled_time is None
    bench.take()
    assert p.last_scheduled_time == 5.0
    bench.now = 7.0
    bench.begin()
    assert p.last_scheduled_time == 5.0
    bench.take()
    assert [(chunk.start_time, chunk.num_tokens) for chunk in p.chunks] == [(5.0, 15)]
    assert p.last_scheduled_time == 7.0


def test_alone_nothing_is_in_flight() -> None:
    bench = Bench()
    bench.add("a", 3)
    output = bench.schedule()
    assert output.scheduled
    assert not bench.scheduler._in_flight
    assert isinstance(bench.schedule(), SchedulerOutput)
