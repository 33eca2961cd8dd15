"""The engine's thread: inbox, sinks, sleep, failure, and other threads that call at any moment."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.engine import BlocksComputed, Engine, EngineEvent, Finished, Reserved, SchedulerConfig, Tokens
from biphase.errors import InvalidRequestError, OverloadedError, TransferFailedError, UnavailableError
from biphase.request import FinishReason, Request, RequestId, SamplingParams
from biphase.scheduler.output import RunnerOutput, SampledToken, SchedulerOutput
from tests.fake_runner import Begun, FakeOverlappingRunner, FakeRunner, expected_tokens

SIZE = 4


class Owner:
    """Collects one request's events and lets a test wait for the end."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.threads: set[str] = set()
        self.done = threading.Event()
        self.on_event: Callable[[EngineEvent], None] | None = None

    def __call__(self, event: EngineEvent) -> None:
        assert not self.done.is_set(), "an event after Finished"
        self.events.append(event)
        self.threads.add(threading.current_thread().name)
        if self.on_event is not None:
            self.on_event(event)
        if isinstance(event, Finished):
            self.done.set()

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events if isinstance(e, Tokens) for t in e.token_ids]

    @property
    def finished(self) -> Finished:
        assert self.done.wait(20), "no end"
        event = self.events[-1]
        assert isinstance(event, Finished)
        return event


class HookedRunner(FakeRunner):
    """Calls `during` in the middle of a step."""

    during: Callable[[SchedulerOutput], None] | None = None

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        if self.during is not None:
            self.during(output)
        return super().execute(output)


class HookedOverlappingRunner(FakeOverlappingRunner):
    """The same at the beginning of a step; `at_end` when its result is asked for."""

    during: Callable[[SchedulerOutput], None] | None = None
    at_end: Callable[[SchedulerOutput], None] | None = None

    def begin(self, output: SchedulerOutput) -> Begun:
        if self.during is not None:
            self.during(output)
        return super().begin(output)

    def finish(self, pending: Begun) -> RunnerOutput:
        result = super().finish(pending)
        if self.at_end is not None:
            self.at_end(pending.output)
        return result


class Rig:
    def __init__(
        self,
        num_blocks: int = 64,
        after_step: Callable[[], None] = lambda: None,
        overlap: bool = False,
        **config: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.manager = KVCacheManager(self.pool, block_size=SIZE, namespace=b"test")
        self.overlapping = HookedOverlappingRunner(self.pool, SIZE)
        self.runner: HookedRunner | HookedOverlappingRunner = (
            self.overlapping if overlap else HookedRunner(self.pool, SIZE)
        )
        settings = {"max_num_seqs": 8, "max_num_batched_tokens": 32, "overlap": overlap, **config}
        self.engine = Engine(self.runner, self.manager, SchedulerConfig(**settings), after_step=after_step)

    def add(self, name: str, prompt: list[int], max_tokens: int = 8, **fields: Any) -> Owner:
        owner = Owner()
        self.engine.add_request(
            Request(RequestId(name), prompt, SamplingParams(max_tokens=max_tokens), **fields), owner
        )
        return owner


@pytest.fixture(params=[False, True], ids=["alone", "overlapping"])
def engine_rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(overlap=request.param)
    rig.engine.start()
    yield rig
    rig.engine.shutdown()
    assert rig.pool.num_used == 0
    rig.engine._scheduler.check_integrity()
    assert not [t for t in threading.enumerate() if t.name == "engine"]


def test_serves_requests_in_its_thread(engine_rig: Rig) -> None:
    prompts = {f"r{n}": list(range(n, n + 5 + n)) for n in range(12)}
    owners = {name: engine_rig.add(name, prompt) for name, prompt in prompts.items()}
    for name, owner in owners.items():
        assert owner.finished == Finished(FinishReason.LENGTH)
        assert owner.tokens == expected_tokens(prompts[name], SamplingParams(max_tokens=8))
        assert owner.threads == {"engine"}
    stats = engine_rig.engine.stats()
    assert (stats.num_generated_tokens, stats.num_finished) == (12 * 8, {"length": 12})
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_queued_prefill_tokens) == (
        0,
        0,
        0,
        0,
    )
    assert stats.prefix_cache_queries_tokens == sum(map(len, prompts.values()))


def test_idle_costs_nothing(engine_rig: Rig) -> None:
    engine_rig.add("a", [1, 2, 3]).finished  # noqa: B018
    remote = engine_rig.add("b", [1, 2, 3], awaits_kv=True)  # waits for others, not for the engine
    time.sleep(0.05)
    steps, spent = engine_rig.runner.num_steps, time.process_time()
    time.sleep(0.3)
    assert engine_rig.runner.num_steps == steps
    assert time.process_time() - spent < 0.03
    engine_rig.engine.abort("b")
    assert remote.finished.reason is FinishReason.ABORT


def test_abort_is_idempotent_and_effective_in_any_state(engine_rig: Rig) -> None:
    engine_rig.engine.abort("never heard of")
    running = engine_rig.add("a", [1, 2, 3], max_tokens=150)
    running.on_event = lambda event: engine_rig.engine.abort("a") if len(running.tokens) == 3 else None
    assert running.finished == Finished(FinishReason.ABORT)
    assert running.tokens == expected_tokens([1, 2, 3], SamplingParams(max_tokens=3))
    engine_rig.engine.abort("a")
    assert engine_rig.add("a", [1, 2, 3]).finished.reason is FinishReason.LENGTH


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_of_the_step_that_an_abort_falls_into_are_dropped(overlap: bool) -> None:
    rig = Rig(overlap=overlap)
    a, b = rig.add("a", [1, 2, 3]), rig.add("b", [4, 5])
    rig.runner.during = lambda output: rig.engine.abort("a")
    for _ in range(1 + overlap):
        assert rig.engine.step()
    assert a.events == [Finished(FinishReason.ABORT)]
    assert len(b.tokens) == 1
    rig.engine.shutdown()
    assert b.events[-1] == Finished(FinishReason.ABORT)
    assert rig.pool.num_used == 0


def test_an_ended_id_may_be_used_again_at_once(engine_rig: Rig) -> None:
    second = Owner()
    request = Request(RequestId("a"), [7, 8], SamplingParams(max_tokens=2))
    first = engine_rig.add("a", [1, 2, 3], max_tokens=2)
    first.on_event = lambda e: engine_rig.engine.add_request(request, second) if isinstance(e, Finished) else None
    assert second.finished.reason is FinishReason.LENGTH
    assert second.tokens == expected_tokens([7, 8], SamplingParams(max_tokens=2))


def test_refusals_reach_the_caller() -> None:
    rig = Rig(num_blocks=8, max_waiting=2, max_model_len=100)
    rig.add("a", [1, 2, 3])
    with pytest.raises(InvalidRequestError, match="'a' is in use") as duplicate:
        rig.add("a", [1, 2, 3])
    assert duplicate.value.param == "request_id"
    with pytest.raises(InvalidRequestError, match="this worker has 8 blocks of 4"):
        rig.add("big", [1] * 20, max_tokens=14)
    with pytest.raises(InvalidRequestError, match="context ends at 100"):
        rig.add("long", [1] * 100)
    rig.add("b", [1, 2, 3])
    with pytest.raises(OverloadedError) as full:
        rig.add("c", [1, 2, 3])
    assert full.value.retry_after_seconds >= 1
    assert rig.engine.stats().num_waiting == 2
    rig.engine.step()
    rig.add("c", [1, 2, 3])
    rig.engine.shutdown()
    with pytest.raises(UnavailableError):
        rig.add("d", [1, 2, 3])


def test_reservations_go_out_before_the_step_runs() -> None:
    order: list[str] = []
    rig = Rig(after_step=lambda: order.append("after_step"))
    rig.runner.during = lambda output: order.append("execute")
    rig.add("a", [1, 2, 3])
    waits = rig.add("b", list(range(10)), awaits_kv=True)
    waits.on_event = lambda event: order.append(type(event).__name__)
    rig.engine.step()
    assert order == ["Reserved", "after_step", "execute", "after_step"]
    rig.engine.shutdown()


def test_a_hand_off_completes_from_another_thread(engine_rig: Rig) -> None:
    prompt = list(range(50))
    want = expected_tokens(prompt, SamplingParams(max_tokens=8))
    owner = Owner()
    request = Request(RequestId("a"), prompt, SamplingParams(max_tokens=8), awaits_kv=True)
    reserved = threading.Event()

    def on_event(event: EngineEvent) -> None:
        if isinstance(event, Reserved):
            engine_rig.pool.acquire(event.block_ids)
            reserved.set()

    owner.on_event = on_event
    engine_rig.engine.add_request(request, owner)
    assert reserved.wait(5)
    event = owner.events[0]
    assert isinstance(event, Reserved)
    engine_rig.runner.receive(event.block_ids, prompt, 0, 50)
    engine_rig.engine.kv_ready("a", num_valid_tokens=50, num_external_tokens=50, first_token=SampledToken(want[0]))
    assert owner.finished.reason is FinishReason.LENGTH
    assert owner.tokens == want
    engine_rig.pool.release(event.block_ids)
    assert request.num_external_tokens == 50


def test_a_failing_step_ends_its_requests_and_the_engine_lives_on(
    engine_rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(output: SchedulerOutput) -> None:
        engine_rig.runner.during = None
        raise RuntimeError("boom")

    engine_rig.runner.during = fail
    failed = engine_rig.add("a", [1, 2, 3]).finished
    assert failed.reason is FinishReason.ERROR
    assert failed.error is not None and "boom" in failed.error.message
    (line,) = [record for record in caplog.records if record.message == "step_failed"]
    assert line.__dict__["event_fields"]["request_ids"] == ["a"]
    assert engine_rig.add("b", [1, 2, 3]).finished.reason is FinishReason.LENGTH
    assert engine_rig.engine.failure is None


def test_errors_of_ours_keep_their_code(engine_rig: Rig) -> None:
    def fail(output: SchedulerOutput) -> None:
        raise TransferFailedError("the peer is gone")

    engine_rig.runner.during = fail
    error = engine_rig.add("a", [1, 2, 3]).finished.error
    assert isinstance(error, TransferFailedError)


def test_a_failing_sink_costs_its_own_request_only(engine_rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: EngineEvent) -> None:
        raise ValueError("sink")

    bad = engine_rig.add("a", [1, 2, 3], max_tokens=150)
    good = engine_rig.add("b", [1, 2, 3], max_tokens=30)
    bad.on_event = fail
    assert good.finished.reason is FinishReason.LENGTH
    assert "sink_failed" in caplog.text
    assert len(bad.tokens) < 150


@pytest.mark.parametrize("place", ["during", "at_end"])
def test_a_step_that_fails_takes_no_tokens_of_the_step_before(place: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(overlap=True)
    a = rig.add("a", [1, 2, 3])

    def fail(output: SchedulerOutput) -> None:
        if a.tokens or place == "during":
            raise RuntimeError("boom")

    rig.engine.step()
    rig.engine.step()  # the second is begun, the first is in
    setattr(rig.overlapping, place, fail)
    while not a.done.is_set():
        rig.engine.step()
    setattr(rig.overlapping, place, None)
    assert a.finished.error is not None and "boom" in a.finished.error.message
    # A third that could not be begun costs none of the second.
    assert a.tokens == expected_tokens([1, 2, 3], SamplingParams(max_tokens=2 if place == "during" else 1))
    assert [record.message for record in caplog.records].count("step_failed") == 1
    while rig.engine.step():
        rig.engine._scheduler.check_integrity()
    assert rig.pool.num_used == 0
    b = rig.add("b", [1, 2, 3])
    while rig.engine.step():
        pass
    assert b.tokens == expected_tokens([1, 2, 3], SamplingParams(max_tokens=8))


def test_shutdown_takes_the_step_in_flight_in() -> None:
    rig = Rig(overlap=True)
    a = rig.add("a", [1, 2, 3])
    rig.engine.step()
    rig.engine.step()
    assert len(rig.engine._scheduler._in_flight) == 1
    rig.engine.shutdown()
    assert a.tokens == expected_tokens([1, 2, 3], SamplingParams(max_tokens=2))
    assert a.finished == Finished(FinishReason.ABORT)
    assert rig.pool.num_used == 0


def test_time_of_overlapping_steps_is_counted_once() -> None:
    now = [0.0]
    rig = Rig(overlap=True)
    engine = Engine(rig.runner, rig.manager, SchedulerConfig(overlap=True), clock=lambda: now[0])

    def pass_time(output: SchedulerOutput) -> None:
        now[0] += 2.0

    rig.overlapping.at_end = pass_time
    engine.add_request(Request(RequestId("a"), [1, 2, 3], SamplingParams(max_tokens=6)), lambda event: None)
    while engine.step():
        now[0] += 1.0
    # The first decode step was begun before the prompt's two seconds were over, and ran for the rest of its own.
    assert engine.stats().decode_step_seconds == pytest.approx(3.0)
    assert engine.stats().num_steps == 6


def test_overlapping_needs_a_runner_that_can() -> None:
    rig = Rig()
    with pytest.raises(AssertionError, match="HookedRunner does not begin and finish steps"):
        Engine(rig.runner, rig.manager, SchedulerConfig(overlap=True))


def test_a_bug_in_the_engine_is_told_to_everyone(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    rig.engine._scheduler.schedule = lambda: 1 / 0  # type: ignore[method-assign,assignment,return-value]
    a, b = rig.add("a", [1, 2, 3]), rig.add("b", [1, 2, 3])
    rig.engine.start()
    for owner in (a, b):
        assert owner.finished.reason is FinishReason.ERROR
    assert isinstance(rig.engine.failure, UnavailableError)
    with pytest.raises(UnavailableError, match="ZeroDivisionError"):
        rig.add("c", [1])
    rig.engine.shutdown()
    assert "engine_failed" in caplog.text


def test_blocks_released_elsewhere_wake_it(engine_rig: Rig) -> None:
    lease = engine_rig.pool.allocate(63)
    assert lease is not None
    owner = engine_rig.add("a", list(range(40)))
    time.sleep(0.05)
    assert owner.events == []
    engine_rig.pool.release(lease)
    assert owner.finished.reason is FinishReason.LENGTH
    assert owner.tokens == expected_tokens(list(range(40)), SamplingParams(max_tokens=8))


@pytest.mark.parametrize("overlap", [False, True])
def test_shutdown_aborts_what_is_left(overlap: bool) -> None:
    rig = Rig(max_num_seqs=2, overlap=overlap)
    rig.engine.start()
    owners = [rig.add(f"r{n}", [n, 1, 2], max_tokens=200) for n in range(3)]
    waits = rig.add("w", [1, 2, 3], awaits_kv=True)
    rig.engine.shutdown()
    assert {o.finished.reason for o in [*owners, waits]} == {FinishReason.ABORT}
    assert rig.pool.num_used == 0
    rig.engine.shutdown()


def test_stats_say_what_runs_where() -> None:
    rig = Rig(num_blocks=30, max_num_seqs=3)
    rig.add("a", list(range(6)))
    rig.add("b", list(range(100, 140)))
    rig.add("c", list(range(200, 210)), awaits_kv=True)
    rig.add("d", list(range(300, 310)))
    rig.add("e", list(range(400, 410)), awaits_kv=True)
    rig.engine.step()
    stats = rig.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_for_remote_kv) == (2, 2, 1)
    # b has 14 of 40 left, the last of which is a decode step by count; d has all of its own; e's come from elsewhere.
    assert stats.num_queued_prefill_tokens == 13 + 10
    assert stats.num_used_blocks == 2 + 7 + 3
    assert stats.kv_waste_ratio == pytest.approx((2 + 2) / (12 * 4))  # what waits for KV counts as filled
    assert stats.num_prefill_tokens == 32
    assert stats.prefill_tokens_per_second > 0
    rig.engine.shutdown()


def test_waste_stays_under_four_percent_in_a_mixed_load() -> None:
    rng = random.Random(4)
    pool = BlockPool(1200)
    manager = KVCacheManager(pool, block_size=16, namespace=b"test")
    engine = Engine(FakeRunnerWithoutKv(), manager, SchedulerConfig(max_num_seqs=32, max_num_batched_tokens=512))
    for n in range(64):
        prompt = [rng.randrange(97) for _ in range(rng.choice([32, 128, 512, 2000]))]
        request = Request(RequestId(f"r{n}"), prompt, SamplingParams(max_tokens=rng.choice([16, 64, 200])))
        engine.add_request(request, lambda event: None)
    ratios = []
    while engine.step():
        ratios.append(engine.stats().kv_waste_ratio)
    assert sum(ratios) / len(ratios) < 0.04
    assert pool.num_used == 0


class FakeRunnerWithoutKv:
    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        return RunnerOutput({s.request.request_id: SampledToken(1) for s in output.scheduled if s.samples})


@pytest.mark.parametrize("overlap", [False, True])
def test_threads_add_abort_and_complete_at_any_moment(overlap: bool) -> None:
    """Four clients with requests of every kind, and a peer that leases, on a pool that is too small."""
    rig = Rig(num_blocks=48, max_waiting=64, overlap=overlap)
    rig.engine.start()
    failures: list[BaseException] = []
    ends = dict.fromkeys(FinishReason, 0)

    def client(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for n in range(60):
                one_request(rng, f"c{seed}-{n}")
        except BaseException as error:
            failures.append(error)

    def one_request(rng: random.Random, name: str) -> None:
        stem = [5] * rng.choice([0, 8, 16, 24])
        prompt = stem + [rng.randrange(97) for _ in range(rng.randint(1, 20))]
        sampling = SamplingParams(max_tokens=rng.choice([1, 5, 30]), eos_token_ids=frozenset({2}))
        kind = rng.choice(["normal", "awaits", "prefill", "abort"])
        request = Request(RequestId(name), prompt, sampling, awaits_kv=kind == "awaits", prefill_only=kind == "prefill")
        owner, reserved = Owner(), threading.Event()
        io: list[int] = []
        leased: list[int] = []

        def on_event(event: EngineEvent) -> None:
            if isinstance(event, Reserved):
                io.extend(event.block_ids)
                rig.pool.acquire(io)
                reserved.set()
            elif isinstance(event, BlocksComputed):
                ids = [block.block_id for block in event.blocks]
                rig.pool.acquire(ids)
                leased.extend(ids)

        owner.on_event = on_event
        want = expected_tokens(prompt, sampling)
        rig.engine.add_request(request, owner)
        if kind == "abort":
            time.sleep(rng.random() * 0.003)
            rig.engine.abort(name)
        if kind == "awaits":
            assert reserved.wait(20)
            event = owner.events[0]
            assert isinstance(event, Reserved)
            if rng.random() < 0.2:
                rig.engine.abort(name)
            num_valid = rng.choice([len(prompt), len(prompt), event.num_cached_tokens, len(prompt) - 1])
            num_valid = max(num_valid, event.num_cached_tokens)
            rig.runner.receive(event.block_ids, prompt, event.num_cached_tokens, num_valid)
            first = SampledToken(want[0]) if num_valid == len(prompt) and rng.random() < 0.7 else None
            rig.engine.kv_ready(name, num_valid_tokens=num_valid, num_external_tokens=num_valid, first_token=first)
            if rng.random() < 0.1:
                rig.engine.kv_ready(name, num_valid_tokens=0, num_external_tokens=0)
        reason = owner.finished.reason
        ends[reason] += 1
        if reason is FinishReason.ABORT:
            assert owner.tokens == want[: len(owner.tokens)]
        else:
            assert owner.tokens == (want[:1] if kind == "prefill" else want)
        rig.pool.release(io)
        rig.pool.release(leased)

    threads = [threading.Thread(target=client, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rig.engine.shutdown()
    assert not failures
    assert sum(ends.values()) == 240 and ends[FinishReason.ERROR] == 0 and ends[FinishReason.ABORT] > 0
    assert rig.pool.num_used == 0
    rig.engine._scheduler.check_integrity()
