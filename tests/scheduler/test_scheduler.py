"""Exact steps: who gets how many tokens in which blocks, and how requests end."""

from __future__ import annotations

import pytest

from biphase.errors import InternalError
from biphase.request import FinishReason, RequestId, RequestStatus, SamplingParams, TokenLogprobs
from biphase.scheduler.events import Finished, Tokens
from biphase.scheduler.output import RunnerOutput, SampledToken
from tests.fake_runner import expected_tokens
from tests.step_bench import Bench


def test_decodes_first_then_chunks_under_one_budget() -> None:
    bench = Bench()
    bench.add("a", 6)
    assert bench.step() == {"a": 6}
    bench.add("b", 40)
    bench.add("c", 3)
    assert bench.step() == {"a": 1, "b": 15}
    assert bench.step() == {"a": 1, "b": 15}
    assert bench.step() == {"a": 1, "b": 10, "c": 3}
    assert bench.step() == {"a": 1, "b": 1, "c": 1}
    bench.run()
    for name, length in (("a", 6), ("b", 40), ("c", 3)):
        start = sum(name.encode()) * 1000
        assert bench.tokens(name) == expected_tokens(range(start, start + length), SamplingParams(max_tokens=8))
    assert set(bench.finished().values()) == {FinishReason.LENGTH}
    assert bench.pool.num_used == 0


def test_block_tables_grow_with_the_tokens() -> None:
    bench = Bench()
    a = bench.add("a", 30)
    output = bench.schedule()
    assert list(output.scheduled[0].block_ids) == [0, 1, 2, 3]
    assert (output.scheduled[0].samples, output.num_tokens) == (False, 16)
    bench.scheduler.update_from_output(output, bench.runner.execute(output))
    bench.step()
    assert bench.manager.block_ids(a) == [0, 1, 2, 3, 4, 5, 6, 7]
    bench.step()
    bench.step()
    bench.step()  # token 33 starts a block
    assert bench.manager.block_ids(a) == [0, 1, 2, 3, 4, 5, 6, 7, 8]


def test_max_num_seqs_counts_running_and_remote() -> None:
    bench = Bench(max_num_seqs=2)
    bench.add("a", 3, awaits_kv=True)
    bench.add("b", 3)
    bench.add("c", 3)
    assert bench.step() == {"b": 3}
    assert bench.step() == {"b": 1}
    bench.scheduler.abort(RequestId("a"))
    assert bench.step() == {"b": 1, "c": 3}


def test_a_step_that_decodes_limits_its_prompt_tokens() -> None:
    bench = Bench(max_mixed_prefill_tokens=4)
    bench.add("a", 16)
    assert bench.step() == {"a": 16}
    bench.add("b", 9)
    assert [bench.step() for _ in range(3)] == [{"a": 1, "b": 4}, {"a": 1, "b": 4}, {"a": 1, "b": 1}]


def test_reservations_do_not_wait_for_tokens() -> None:
    bench = Bench(max_mixed_prefill_tokens=4)
    bench.add("a", 3)
    bench.step()
    bench.add("b", 40)
    bench.add("c", 20, awaits_kv=True)
    assert bench.step() == {"a": 1, "b": 4}
    assert "c" in bench.scheduler.places.remote


def test_prefix_hits_within_a_batch_of_steps() -> None:
    bench = Bench()
    bench.add("a", 12)
    bench.step()
    prompt = [*range(97_000, 97_012), 5, 6]
    b = bench.add("b", 0, prompt=prompt)
    assert bench.step() == {"a": 1, "b": 2}
    assert bench.manager.block_ids(b)[:3] == [0, 1, 2]
    assert b.num_cached_tokens == 12
    bench.run()
    assert bench.tokens("b") == expected_tokens(prompt, SamplingParams(max_tokens=8))


@pytest.mark.parametrize("place", ["waiting", "remote", "prompt", "decoding", "preempted"])
def test_abort_frees_everything_anywhere(place: str) -> None:
    bench = Bench(num_blocks=8, enable_caching=False, max_num_batched_tokens=8)
    a = bench.add("a", 12, max_tokens=17, awaits_kv=place == "remote")
    if place == "preempted":
        bench.now = -1.0
        bench.add("important", 12, max_tokens=17)
    steps = {"waiting": 0, "remote": 1, "prompt": 1, "decoding": 4, "preempted": 40}[place]
    for _ in range(steps):
        bench.step()
        if a.status is RequestStatus.PREEMPTED:
            break
    wanted = {
        "waiting": RequestStatus.WAITING,
        "remote": RequestStatus.WAITING_FOR_REMOTE_KV,
        "preempted": RequestStatus.PREEMPTED,
    }
    assert a.status is wanted.get(place, RequestStatus.RUNNING)
    bench.scheduler.abort(a.request_id)
    bench.scheduler.abort(a.request_id)
    bench.scheduler.check_integrity()
    assert [e for who, e in bench.events if who == "a" and isinstance(e, Finished)] == [Finished(FinishReason.ABORT)]
    bench.run()
    assert bench.pool.num_used == 0


def test_tokens_of_a_step_in_which_it_was_aborted_are_dropped() -> None:
    bench = Bench()
    bench.add("a", 4)
    bench.add("b", 4)
    output = bench.schedule()
    result = bench.runner.execute(output)
    bench.scheduler.abort(RequestId("a"))
    # Even when the id is in use again by then.
    bench.add("a", 5)
    bench.scheduler.update_from_output(output, result)
    bench.scheduler.check_integrity()
    assert bench.tokens("a") == []
    assert len(bench.tokens("b")) == 1
    assert "a" in bench.scheduler.places.requests


def test_a_failed_step_ends_its_requests_only() -> None:
    bench = Bench(max_num_seqs=1)
    bench.add("a", 4)
    bench.add("b", 4)
    output = bench.schedule()
    error = InternalError("no memory")
    bench.scheduler.fail_step(output, error)
    bench.scheduler.check_integrity()
    assert bench.events == [("a", Finished(FinishReason.ERROR, None, error))]
    assert bench.pool.num_used == 0
    assert bench.step() == {"b": 4}


def test_a_missing_token_is_an_error_for_its_request() -> None:
    bench = Bench()
    bench.add("a", 4)
    bench.scheduler.update_from_output(bench.schedule(), RunnerOutput())
    assert bench.finished() == {"a": FinishReason.ERROR}


def test_logprobs_travel_with_their_tokens() -> None:
    bench = Bench(max_num_batched_tokens=8)
    bench.add("a", 10, sampling=SamplingParams(max_tokens=2, logprobs=0, prompt_logprobs=0))
    entry = TokenLogprobs((1,), (-0.5,), 1)
    for chunk, sampled in ((7, {}), (2, {"a": SampledToken(4, entry)}), (0, {"a": SampledToken(5, entry)})):
        output = bench.schedule()
        result = RunnerOutput(sampled=sampled, prompt_logprobs={"a": [entry] * chunk} if chunk else {})  # type: ignore[arg-type,dict-item]
        bench.scheduler.update_from_output(output, result)
    tokens = [e for _, e in bench.events if isinstance(e, Tokens)]
    assert tokens == [Tokens((4,), (entry,), (entry,) * 9), Tokens((5,), (entry,))]


def test_logprobs_of_a_prompt_computed_twice_come_once() -> None:
    bench = Bench(num_blocks=12, max_num_batched_tokens=8)
    bench.add("a", 8, max_tokens=35)
    bench.step()
    p = bench.add("p", 24, sampling=SamplingParams(max_tokens=1, prompt_logprobs=0))
    lease: list[int] = []
    while "p" not in bench.finished():
        output = bench.schedule()
        result = bench.runner.execute(output) if output.scheduled else RunnerOutput()
        for s in output.scheduled:
            stop = s.num_computed_tokens + s.num_scheduled_tokens
            entries = [TokenLogprobs((n,), (0.0,), 1) for n in range(max(1, s.num_computed_tokens), stop)]
            result.prompt_logprobs[s.request.request_id] = entries
        bench.scheduler.update_from_output(output, result)
        if p.num_computed_tokens == 14 and not p.num_preemptions and not lease:
            lease = bench.pool.allocate(bench.pool.num_free) or []  # someone takes what p was promised
        elif p.num_preemptions:
            bench.pool.release(lease)
            lease = []
    assert p.num_preemptions == 1
    (tokens,) = [e for who, e in bench.events if who == "p" and isinstance(e, Tokens)]
    assert [entry.token_ids[0] for entry in tokens.prompt_logprobs] == list(range(1, 24))


def test_a_moved_stream_counts_its_tokens() -> None:
    sampling = SamplingParams(max_tokens=12)
    whole = expected_tokens(range(97_000, 97_006), sampling)
    bench = Bench()
    bench.add("a", 6, sampling=sampling, output_token_ids=whole[:7], num_preset_output_tokens=7)
    assert bench.step() == {"a": 13}
    bench.run()
    assert bench.tokens("a") == whole[7:]


def test_the_runner_hears_of_ended_requests() -> None:
    bench = Bench()
    bench.add("a", 4, max_tokens=1)
    bench.add("b", 4, max_tokens=3)
    assert bench.schedule().finished == []
    bench = Bench()
    bench.add("a", 4, max_tokens=1)
    bench.add("b", 4, max_tokens=3)
    bench.step()
    assert bench.schedule().finished == ["a"]
