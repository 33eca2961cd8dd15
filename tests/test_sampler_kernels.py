"""The sampler with the GPU's kernels, run by Triton's interpreter: token for token what it is without them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from biphase.ops import sampling as triton_kernels
from biphase.request import SamplingParams
from biphase.sampler import SamplingRow, device, filters, logprobs, sample
from biphase.scheduler.output import SampledToken

VOCAB_SIZE = 5003
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=0.7, seed=2, min_p=0.02, logprobs=0),
    SamplingParams(temperature=1.5, seed=3, top_k=40),
    SamplingParams(temperature=0.9, seed=4, top_p=0.8, logprobs=5),
    SamplingParams(temperature=1.0, seed=5, logit_bias=((7, 90.0),), repetition_penalty=1.2),
    SamplingParams(temperature=1.0, seed=6, allowed_token_ids=(3, 9, 4000)),
]


class Counting:
    """The kernels; counts what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        self.calls.append(name)
        kernel: Callable[..., object] = getattr(triton_kernels, name)
        return kernel


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Makes the sampler take the kernels here."""
    counting = Counting()
    for module in (device, filters, logprobs):
        monkeypatch.setattr(module, "kernels_for", lambda logits: counting)
    return counting


def logits(num_rows: int) -> Tensor:
    drawn = torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 4
    drawn[:, 11] = drawn.amax(1)  # a tie: the lower id of equals wins
    return drawn.to(DEVICE)


def choose(params: list[SamplingParams], position: int) -> list[SampledToken]:
    rows = [SamplingRow(p, [1, 2, 3], VOCAB_SIZE) for p in params]
    return sample(logits(len(rows)), rows, [position] * len(rows))


@pytest.mark.parametrize("params", [PARAMS, PARAMS[:1], PARAMS[:2], PARAMS[2:4], PARAMS[4:6]])
def test_the_same_tokens_and_logprobs(
    params: list[SamplingParams], kernels: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [choose(params, position) for position in (3, 4)]
    assert kernels.calls or all(p.top_k or p.top_p < 1.0 for p in params)
    monkeypatch.undo()
    expected = [choose(params, position) for position in (3, 4)]
    assert [[s.token_id for s in step] for step in found] == [[s.token_id for s in step] for step in expected]
    for step, other in zip(found, expected, strict=True):
        for one, wanted in zip(step, other, strict=True):
            if wanted.logprobs is None:
                assert one.logprobs is None
                continue
            assert one.logprobs is not None
            assert sorted(one.logprobs.token_ids) == sorted(wanted.logprobs.token_ids)
            assert one.logprobs.rank == wanted.logprobs.rank
            assert one.logprobs.logprobs == pytest.approx(wanted.logprobs.logprobs, abs=1e-5)


def test_each_kernel_does_its_part(kernels: Counting) -> None:
    choose(PARAMS, 3)
    assert set(kernels.calls) == {"argmax", "draw", "gather_logprobs"}


def test_on_cpu_there_are_none() -> None:
    assert device.kernels_for(torch.zeros(1, 4)) is None
