"""KV that comes from elsewhere, and KV that is computed for others."""

from __future__ import annotations

from biphase.request import FinishReason, RequestId, RequestStatus, SamplingParams
from biphase.scheduler.events import Reserved
from biphase.scheduler.output import SampledToken
from tests.fake_runner import expected_tokens
from tests.step_bench import Bench


def reserved(bench: Bench, name: str) -> Reserved | None:
    return next((e for who, e in bench.events if who == name and isinstance(e, Reserved)), None)


def test_reserves_all_blocks_and_a_place_for_the_first_token() -> None:
    bench = Bench()
    a = bench.add("a", 16, awaits_kv=True)
    assert bench.step() == {}
    assert reserved(bench, "a") == Reserved((0, 1, 2, 3, 4), 0)
    assert a.status is RequestStatus.WAITING_FOR_REMOTE_KV
    bench.runner.receive([0, 1, 2, 3, 4], a.prompt_token_ids, 0, 16)
    want = expected_tokens(a.prompt_token_ids, a.sampling)
    bench.scheduler.kv_ready(a.request_id, 16, 16, SampledToken(want[0]))
    assert (a.status, a.num_computed_tokens, a.num_external_tokens) == (RequestStatus.RUNNING, 16, 16)
    assert bench.tokens("a") == want[:1]
    assert bench.step() == {"a": 1}
    bench.run()
    assert bench.tokens("a") == want
    assert bench.pool.num_used == 0


def test_own_prefix_is_not_awaited() -> None:
    bench = Bench()
    bench.add("x", 10, max_tokens=1)
    bench.run()
    prompt = [*range(120_000, 120_010), 1, 2, 3]
    a = bench.add("a", 0, prompt=prompt, awaits_kv=True)
    bench.step()
    assert reserved(bench, "a") == Reserved((0, 1, 2, 3), 8)
    assert (a.num_cached_tokens, a.num_computed_tokens) == (8, 8)
    # Nothing came: what stood here already stays valid, the rest is computed.
    bench.scheduler.kv_ready(a.request_id, 0, 0)
    assert bench.step() == {"a": 5}
    bench.run()
    assert bench.tokens("a") == expected_tokens(prompt, SamplingParams(max_tokens=8))


def test_computes_what_did_not_arrive_and_at_least_one_token() -> None:
    for num_valid, left in ((0, 12), (5, 7), (8, 4), (12, 1)):
        bench = Bench()
        a = bench.add("a", 12, awaits_kv=True)
        bench.step()
        bench.runner.receive(bench.manager.block_ids(a), a.prompt_token_ids, 0, num_valid)
        bench.scheduler.kv_ready(a.request_id, num_valid, num_valid)
        assert bench.step() == {"a": left}
        assert a.num_external_tokens == min(num_valid, 11)
        bench.run()
        assert bench.tokens("a") == expected_tokens(a.prompt_token_ids, a.sampling)


def test_received_blocks_are_cache_like_any_other() -> None:
    bench = Bench()
    a = bench.add("a", 12, awaits_kv=True)
    bench.step()
    bench.runner.receive(bench.manager.block_ids(a), a.prompt_token_ids, 0, 12)
    bench.scheduler.kv_ready(a.request_id, 12, 12, SampledToken(5))
    b = bench.add("b", 0, prompt=[*a.prompt_token_ids, 1])
    assert bench.step() == {"a": 1, "b": 1}
    assert b.num_cached_tokens == 12


def test_reservations_are_made_in_order() -> None:
    bench = Bench(num_blocks=8)
    bench.add("a", 15, awaits_kv=True)
    bench.add("b", 20, awaits_kv=True)
    bench.add("c", 3, awaits_kv=True)
    bench.step()
    assert reserved(bench, "a") and not reserved(bench, "b") and not reserved(bench, "c")
    bench.scheduler.abort(RequestId("a"))
    bench.step()
    assert reserved(bench, "b") and reserved(bench, "c")


def test_what_waits_for_kv_is_never_preempted() -> None:
    bench = Bench(num_blocks=8, enable_caching=False)
    bench.add("a", 12, max_tokens=17)
    bench.step()
    bench.add("b", 10, awaits_kv=True)
    for _ in range(40):
        bench.step()
    places = bench.scheduler.places
    assert list(places.remote) == ["b"]
    assert [r.request_id for r in places.waiting.requests] == ["a"]
    bench.scheduler.abort(RequestId("b"))
    bench.run()
    assert bench.tokens("a") == expected_tokens(range(97_000, 97_012), SamplingParams(max_tokens=17))


def test_kv_for_nobody_is_ignored() -> None:
    bench = Bench()
    bench.add("a", 8)
    bench.scheduler.kv_ready(RequestId("a"), 8, 8)
    bench.scheduler.kv_ready(RequestId("never heard of"), 8, 8, SampledToken(1))
    bench.step()
    bench.scheduler.kv_ready(RequestId("a"), 8, 8, SampledToken(1))
    bench.run()
    assert bench.tokens("a") == expected_tokens(range(97_000, 97_008), SamplingParams(max_tokens=8))


def test_a_first_token_without_all_kv_is_an_error_not_an_answer() -> None:
    bench = Bench()
    bench.add("a", 8, awaits_kv=True)
    bench.step()
    bench.scheduler.kv_ready(RequestId("a"), 7, 7, SampledToken(1))
    assert bench.finished() == {"a": FinishReason.ERROR}
    assert bench.tokens("a") == []
    assert bench.pool.num_used == 0


def test_the_handed_over_token_may_be_the_last() -> None:
    bench = Bench()
    bench.add("a", 8, awaits_kv=True, sampling=SamplingParams(max_tokens=9, eos_token_ids=frozenset({5})))
    bench.step()
    bench.scheduler.kv_ready(RequestId("a"), 8, 8, SampledToken(5))
    assert (bench.tokens("a"), bench.finished()) == ([5], {"a": FinishReason.STOP})
    assert bench.pool.num_used == 0


def test_announces_each_block_once_as_chunks_end() -> None:
    bench = Bench(max_num_batched_tokens=10)
    bench.add("p", 22, prefill_only=True)
    for _ in range(3):
        bench.step()
    assert bench.announced("p") == [[0, 1], [2, 3, 4], [5]]
    kinds = [type(e).__name__ for _, e in bench.events]
    assert kinds == ["BlocksComputed"] * 3 + ["Tokens", "Finished"]
    assert bench.tokens("p") == expected_tokens(range(112_000, 112_022), SamplingParams(max_tokens=1))
    assert bench.pool.num_used == 0


def test_announces_its_own_hits_before_the_step_and_leaves_out_what_the_asker_holds() -> None:
    bench = Bench()
    bench.add("x", 16, max_tokens=1)
    bench.run()
    bench.add("p", 0, prompt=[*range(120_000, 120_016), 1, 2], prefill_only=True, num_held_blocks=1)
    bench.schedule()
    assert bench.announced("p") == [[1, 2, 3]]
    bench = Bench()
    bench.add("p", 8, prefill_only=True, num_held_blocks=2)
    bench.step()
    assert bench.announced("p") == []
    assert bench.finished() == {"p": FinishReason.LENGTH}


def test_prefill_of_a_loaded_prefix_announces_it_on_arrival() -> None:
    bench = Bench()
    p = bench.add("p", 14, prefill_only=True, awaits_kv=True)
    bench.step()
    assert reserved(bench, "p") == Reserved((0, 1, 2, 3), 0)
    bench.runner.receive([0, 1, 2, 3], p.prompt_token_ids, 0, 8)
    bench.scheduler.kv_ready(p.request_id, 8, 8)
    assert bench.announced("p") == [[0, 1]]
    assert bench.step() == {"p": 6}
    assert bench.announced("p") == [[0, 1], [2, 3]]


def test_a_preempted_prefill_announces_nothing_twice() -> None:
    bench = Bench(num_blocks=12, max_num_batched_tokens=8)
    bench.add("a", 8, max_tokens=35)
    bench.step()
    p = bench.add("p", 24, prefill_only=True)
    bench.step()
    lease = bench.pool.allocate(6)  # someone else takes what p was promised
    assert lease is not None
    bench.run_until(lambda: p.num_preemptions == 1)
    bench.pool.release(lease)
    bench.run()
    assert [i for chunk in bench.announced("p") for i in chunk] == list(range(6))
    assert bench.tokens("p") == expected_tokens(p.prompt_token_ids, SamplingParams(max_tokens=1))
