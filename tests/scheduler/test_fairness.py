"""Who gives way when blocks run out, and that everyone gets a turn."""

from __future__ import annotations

import pytest

from biphase.request import FinishReason, RequestStatus, SamplingParams
from tests.fake_runner import expected_tokens
from tests.step_bench import SIZE, Bench


def test_the_latest_gives_way_and_resumes_with_the_same_tokens() -> None:
    bench = Bench(num_blocks=8, enable_caching=False)
    bench.add("a", 12, max_tokens=17)
    bench.add("b", 12, max_tokens=17)
    order: list[list[str]] = []
    for _ in range(200):
        output = bench.schedule()
        if output.preempted:
            order.append(list(output.preempted))
        if not output.scheduled:
            break
        bench.scheduler.update_from_output(output, bench.runner.execute(output))
    assert order and all(who == ["b"] for who in order)
    assert bench.scheduler.num_preemptions == len(order)
    for name in "ab":
        start = ord(name) * 1000
        assert bench.tokens(name) == expected_tokens(range(start, start + 12), SamplingParams(max_tokens=17))
    assert list(bench.finished()) == ["a", "b"]


def test_low_priority_gives_way_to_high() -> None:
    bench = Bench(num_blocks=8, policy="priority", enable_caching=False)
    low = bench.add("low", 12, max_tokens=17, priority=1)
    bench.step()
    bench.add("high", 8, max_tokens=17)
    bench.run()
    assert list(bench.finished()) == ["high", "low"]
    assert bench.tokens("low") == expected_tokens(low.prompt_token_ids, low.sampling)


def test_priority_admits_the_important_first() -> None:
    bench = Bench(policy="priority", max_num_seqs=1)
    for name, priority in (("c", 2), ("a", 0), ("b", 1)):
        bench.add(name, 4, max_tokens=1, priority=priority)
    bench.run()
    assert list(bench.finished()) == ["a", "b", "c"]


def test_fcfs_does_not_look_at_priority() -> None:
    bench = Bench(max_num_seqs=1)
    for name, priority in (("c", 2), ("a", 0)):
        bench.add(name, 4, max_tokens=1, priority=priority)
    bench.run()
    assert list(bench.finished()) == ["c", "a"]


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    bench = Bench(num_blocks=8, enable_caching=False, policy="shortest_first")
    bench.add("a", 12, max_tokens=17)
    bench.step()
    bench.add("b", 12, max_tokens=17)
    bench.step()
    bench.add("c", 2, max_tokens=2)  # shorter than b, and there is a block for it once b is gone
    for _ in range(100):
        output = bench.schedule()
        assert "c" not in [s.request.request_id for s in output.scheduled]
        if output.preempted:
            break
        bench.scheduler.update_from_output(output, bench.runner.execute(output))
    assert output.preempted == ["b"]
    assert bench.pool.num_free == 3


def test_two_prompts_that_fit_only_one_after_the_other_do_not_start_together() -> None:
    bench = Bench(num_blocks=8, max_num_batched_tokens=8, enable_caching=False)
    bench.add("a", 20, max_tokens=1)
    bench.add("b", 20, max_tokens=1)
    bench.run()
    assert bench.scheduler.num_preemptions == 0
    assert list(bench.finished()) == ["a", "b"]


def test_growing_sequences_keep_a_block_each() -> None:
    bench = Bench(num_blocks=8, enable_caching=False)
    bench.add("a", 12, max_tokens=9)
    bench.step()
    bench.add("b", 15, max_tokens=1)  # 4 blocks, and 4 are free when a has taken its next, but it needs more
    assert bench.step() == {"a": 1}
    assert bench.pool.num_free == 4
    bench.run()
    assert bench.scheduler.num_preemptions == 0


def test_a_prompt_in_progress_gives_way_to_a_more_important_one() -> None:
    """When others took the blocks that both were promised."""
    bench = Bench(num_blocks=14, max_num_batched_tokens=8, policy="priority", enable_caching=False)
    low = bench.add("low", 24, max_tokens=1, priority=1)
    assert bench.step() == {"low": 8}
    high = bench.add("high", 24, max_tokens=1)
    assert bench.step() == {"high": 8}
    lease = bench.pool.allocate(9)
    assert lease is not None
    bench.add("other", 3, max_tokens=1)
    output = bench.schedule()
    assert output.preempted == ["low"]
    assert [(s.request.request_id, s.num_scheduled_tokens) for s in output.scheduled] == [("high", 8)]
    assert high.status is RequestStatus.RUNNING
    bench.scheduler.update_from_output(output, bench.runner.execute(output))
    bench.pool.release(lease)
    bench.run()
    assert bench.finished().keys() == {"high", "other", "low"}
    assert bench.tokens("low") == expected_tokens(low.prompt_token_ids, low.sampling)


def test_nobody_slips_into_the_blocks_of_a_prompt_that_gave_way() -> None:
    bench = Bench(num_blocks=21, max_num_batched_tokens=12, policy="priority", enable_caching=False)
    bench.add("low", 60, max_tokens=1, priority=1)
    for _ in range(3):
        assert bench.step() == {"low": 12}
    bench.add("high", 20, max_tokens=1)
    assert bench.step() == {"high": 12}
    assert bench.pool.allocate(9)
    bench.add("later", 3, max_tokens=1)
    output = bench.schedule()
    assert output.preempted == ["low"]
    assert [(s.request.request_id, s.num_scheduled_tokens) for s in output.scheduled] == [("high", 8)]
    assert bench.pool.num_free == 7


def test_as_many_prompts_give_way_as_it_takes() -> None:
    bench = Bench(num_blocks=30, max_mixed_prefill_tokens=8, policy="priority", enable_caching=False)
    bench.add("decode", 4, max_tokens=3)
    bench.step()
    bench.add("last", 30, max_tokens=1, priority=2)
    assert bench.step() == {"decode": 1, "last": 8}
    bench.add("low", 30, max_tokens=1, priority=1)
    assert bench.step() == {"decode": 1, "low": 8}
    bench.add("high", 40, max_tokens=1)
    assert bench.step() == {"high": 16}
    assert bench.pool.allocate(bench.pool.num_free)
    output = bench.schedule()
    assert output.preempted == ["last", "low"]
    assert [(s.request.request_id, s.num_scheduled_tokens) for s in output.scheduled] == [("high", 16)]


def test_nobody_is_admitted_while_a_prompt_lacks_blocks() -> None:
    bench = Bench(num_blocks=8, max_num_batched_tokens=8, enable_caching=False)
    bench.add("a", 24, max_tokens=1)
    bench.step()
    lease = bench.pool.allocate(5)
    assert lease is not None
    bench.add("b", 3, max_tokens=1)
    assert bench.step() == {}
    bench.pool.release(lease[:1])
    assert bench.step() == {"a": 8}
    assert bench.step() == {}
    bench.pool.release(lease[1:])
    assert bench.step() == {"a": 8}


def test_an_important_prompt_passes_one_in_progress() -> None:
    bench = Bench(policy="priority")
    bench.add("low", 40, max_tokens=1, priority=1)
    assert bench.step() == {"low": 16}
    bench.add("high", 20, max_tokens=1)
    assert [bench.step() for _ in range(3)] == [{"high": 16}, {"high": 4, "low": 12}, {"low": 12}]


def test_watermark_holds_for_admission_only() -> None:
    bench = Bench(num_blocks=10, watermark=0.5, enable_caching=False)
    bench.add("a", 40, max_tokens=1)  # alone it may have all
    assert bench.step() == {"a": 16}
    bench.run()
    bench.add("b", 4)
    bench.step()
    bench.add("c", 13)  # 4 blocks of 9, 5 + 1 have to stay
    assert bench.step() == {"b": 1}


def test_a_lone_sequence_blocked_by_leases_waits_and_goes_on() -> None:
    bench = Bench(num_blocks=4, enable_caching=False)
    bench.add("a", 8, max_tokens=8)
    bench.step()
    lease = bench.pool.allocate(2)
    assert lease is not None
    assert bench.step() == {}
    assert bench.step() == {}
    bench.pool.release(lease)
    bench.run()
    assert bench.tokens("a") == expected_tokens(range(97_000, 97_008), SamplingParams(max_tokens=8))


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_first"])
def test_a_long_prompt_finishes_among_endless_short_ones(policy: str) -> None:
    """The short ones alone would fill every step, all places and most blocks for ever."""
    bench = Bench(num_blocks=40, policy=policy, max_num_seqs=4, ageing_seconds=2.0)
    bench.add("first", 8, max_tokens=1)
    bench.add("long", 120, max_tokens=20)
    for n in range(1500):
        while len(bench.scheduler.places.waiting) < 6:
            bench.add(f"s{n}.{bench.now}", 8, max_tokens=3)
        bench.step()
        if "long" in bench.finished():
            break
    assert bench.finished().get("long") is FinishReason.LENGTH
    assert n < 700


def test_a_sequence_as_big_as_the_pool_finishes_among_small_ones() -> None:
    bench = Bench(num_blocks=16, policy="shortest_first", max_num_seqs=4, ageing_seconds=2.0)
    big = bench.add("big", 50, max_tokens=15)
    assert big.num_tokens + 14 == 16 * SIZE
    for n in range(1500):
        while len(bench.scheduler.places.waiting) < 4:
            bench.add(f"s{n}.{bench.now}", 6, max_tokens=10)
        bench.step()
        if "big" in bench.finished():
            break
    assert bench.tokens("big") == expected_tokens(big.prompt_token_ids, SamplingParams(max_tokens=15))


def test_short_prompts_pass_a_long_one_and_do_not_carry_its_chunk() -> None:
    bench = Bench(num_blocks=64, policy="shortest_first")
    bench.add("long", 100, max_tokens=1, prefill_only=True)
    assert bench.step() == {"long": 16}
    bench.add("s", 10, max_tokens=1, prefill_only=True)
    bench.add("t", 5, max_tokens=1, prefill_only=True)
    assert bench.step() == {"t": 5, "s": 10}
    assert bench.step() == {"long": 16}


def test_under_fcfs_short_prompts_wait() -> None:
    bench = Bench(num_blocks=64)
    bench.add("long", 40, max_tokens=1)
    bench.add("s", 4, max_tokens=1)
    assert [bench.step() for _ in range(3)] == [{"long": 16}, {"long": 16}, {"long": 8, "s": 4}]


def test_ageing_gives_a_long_prompt_its_chunk() -> None:
    bench = Bench(num_blocks=200, policy="shortest_first", ageing_seconds=1.0)
    bench.add("long", 200, max_tokens=1, prefill_only=True)
    steps = []
    for n in range(40):
        bench.add(f"s{n}", 12, max_tokens=1, prefill_only=True)
        steps.append(bench.step())
    long_steps = [n for n, step in enumerate(steps) if "long" in step]
    assert long_steps == [10, 20, 30]
