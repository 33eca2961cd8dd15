"""The runner: what a request gets does not depend on chunks, blocks or company; state follows its requests."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.request import Request, RequestId, SamplingParams
from biphase.scheduler.output import ScheduledRequest, SchedulerOutput
from tests.stepping import Stepper, requests_of
from tests.tiny_models import save_tiny

PROMPTS = [[5, 9, 200, 41], [7], [3 + i % 190 for i in range(100)], [50, 60, 70]]


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder = save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")
    yield load_model(resolve_model(str(folder)), "float32")


def _params(**changes: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 12, "temperature": 1.0, "seed": 3} | changes))


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_blocks_and_company_do_not_matter(tiny_model: LoadedModel, block_size: int, chunk: int) -> None:
    params = _params(frequency_penalty=0.3, top_p=0.9)
    alone = [Stepper(tiny_model, num_blocks=600).generate(requests_of([p], params))[0] for p in PROMPTS]
    stepper = Stepper(tiny_model, block_size=block_size, num_blocks=600, seed=9)
    assert stepper.generate(requests_of(PROMPTS, params), chunk=chunk) == alone


def test_preset_outputs_continue_as_if_nothing_happened(tiny_model: LoadedModel) -> None:
    params = _params(presence_penalty=0.5, repetition_penalty=1.2, min_tokens=8, eos_token_ids=frozenset(range(60)))
    whole = Stepper(tiny_model).generate(requests_of(PROMPTS, params))
    moved = requests_of(PROMPTS, params)
    for request, tokens in zip(moved, whole, strict=True):
        request.output_token_ids.extend(tokens[:5])
    assert Stepper(tiny_model).generate(moved) == whole


def test_preemption_recomputes_to_the_same_tokens(tiny_model: LoadedModel) -> None:
    params = _params(frequency_penalty=0.3)
    expected = Stepper(tiny_model).generate(requests_of(PROMPTS, params))
    stepper = Stepper(tiny_model)
    requests = requests_of(PROMPTS, params)
    for _ in range(8):
        stepper.step([r for r in requests if r.num_output_tokens < 12])
    victim = requests[2]
    victim.num_computed_tokens = 0
    stepper.blocks.pop(victim.request_id)
    stepper.runner.execute(SchedulerOutput(preempted=[victim.request_id]))
    assert stepper.generate(requests) == expected


def test_rows_are_given_back_and_reused(tiny_model: LoadedModel) -> None:
    stepper = Stepper(tiny_model, max_num_seqs=2)
    expected = [Stepper(tiny_model).generate(requests_of([p], _params()))[0] for p in PROMPTS]
    for i, prompt in enumerate(PROMPTS):
        request = Request(RequestId(f"x{i}"), prompt, _params())
        assert stepper.generate([request])[0] == expected[i]
        if i % 2:  # also when nobody said that it finished
            stepper.runner.execute(SchedulerOutput(finished=[request.request_id]))


def test_an_id_used_again_starts_afresh(tiny_model: LoadedModel) -> None:
    stepper = Stepper(tiny_model)
    for prompt in PROMPTS:
        request = Request(RequestId("same"), prompt, _params())
        stepper.blocks.pop(request.request_id, None)
        assert stepper.generate([request])[0] == Stepper(tiny_model).generate(requests_of([prompt], _params()))[0]


def test_an_unfinished_chunk_yields_no_token(tiny_model: LoadedModel) -> None:
    stepper = Stepper(tiny_model, max_num_batched_tokens=16)
    request = requests_of([PROMPTS[2]])[0]
    assert stepper.step([request]).sampled == {}


def test_empty_step(tiny_model: LoadedModel) -> None:
    out = Stepper(tiny_model).runner.execute(SchedulerOutput())
    assert (out.sampled, out.prompt_logprobs) == ({}, {})


@pytest.mark.parametrize("chunk", [5, 64])
def test_prompt_logprobs_equal_one_whole_pass(tiny_model: LoadedModel, chunk: int) -> None:
    params = SamplingParams(max_tokens=3, prompt_logprobs=2, logprobs=1)
    plain = SamplingParams(max_tokens=3)
    prompt = PROMPTS[2]
    stepper = Stepper(tiny_model, max_num_seqs=4)
    asking, other = requests_of([prompt, prompt])
    asking.sampling, other.sampling = params, plain
    tokens = stepper.generate([asking, other], chunk=chunk)
    assert tokens[0] == tokens[1]
    found = [item for out in stepper.outputs for item in out.prompt_logprobs.get(asking.request_id, [])]
    # Not again when the prompt is computed anew after output was given.
    assert len(found) == len(prompt) - 1
    asking.num_computed_tokens = 0
    assert stepper.step([asking]).prompt_logprobs == {}
    # One token at a time through a fresh cache gives the distribution at each position.
    check = Stepper(tiny_model)
    replayed = requests_of([prompt[:1]], SamplingParams(max_tokens=200, logprobs=2))[0]
    for position in range(1, len(prompt)):
        out = check.runner.execute(
            SchedulerOutput([ScheduledRequest(replayed, position - 1, 1, list(range(32)), samples=True)])
        )
        expected = out.sampled[replayed.request_id].logprobs
        assert expected is not None
        item = found[position - 1]
        assert item.token_ids[0] == prompt[position]
        assert item.token_ids[1:] == expected.token_ids[1:]
        assert item.logprobs[1:] == pytest.approx(expected.logprobs[1:], abs=1e-4)
        replayed.output_token_ids.append(prompt[position])


def test_eager_is_chosen_loudly_when_the_native_program_is_not_there(
    tiny_model: LoadedModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = importlib.import_module

    def refuse(name: str, package: str | None = None) -> Any:
        if name == "biphase.ops.cpu_program":
            raise ImportError("not compiled")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", refuse)
    with caplog.at_level(logging.WARNING):
        stepper = Stepper(tiny_model, native=True)
    assert stepper.runner.executor == "eager"
    assert "native_kernels_unavailable" in caplog.text


def test_native_program_gives_the_same_tokens(tiny_model: LoadedModel) -> None:
    stepper = Stepper(tiny_model, native=True)
    if stepper.runner.executor != "native":
        pytest.skip("the CPU kernels are not compiled here")
    produced = stepper.generate(requests_of(PROMPTS, SamplingParams(max_tokens=12)))
    assert produced == Stepper(tiny_model).generate(requests_of(PROMPTS, SamplingParams(max_tokens=12)))


def test_weights_and_cache_stay_as_they_are_but_for_the_slots_written(tiny_model: LoadedModel, tmp_path: Path) -> None:
    before = {name: weight.clone() for name, weight in tiny_model.weights.items()}
    stepper = Stepper(tiny_model, block_size=4)
    stepper.generate(requests_of([PROMPTS[0]], SamplingParams(max_tokens=2)))
    assert all(torch.equal(before[name], weight) for name, weight in tiny_model.weights.items())
    written = ~stepper.kv_cache.isnan().all(dim=(1, 2, 3, 5))  # [num_blocks, block_size]
    first, second = stepper.blocks[RequestId("r0")]
    assert written.sum() == 5
    assert bool(written[first].all())
    assert written[second].tolist() == [True, False, False, False]
