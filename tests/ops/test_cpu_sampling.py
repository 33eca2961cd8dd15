"""Draws on the host: with the compiled kernel and, said aloud, without it; the same tokens."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch

from biphase.ops import cpu_sampling
from biphase.request import SamplingParams
from kernels.cpu.library import LibraryUnavailableError


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def missing() -> None:
        raise LibraryUnavailableError("not compiled")

    cpu_sampling._is_compiled.cache_clear()
    monkeypatch.setattr(cpu_sampling, "load", missing)
    yield
    cpu_sampling._is_compiled.cache_clear()


PARAMS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.0, top_k=1 << 40),
    SamplingParams(temperature=1.0, top_k=-1, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40, min_p=0.01),
]


def draws() -> list[int]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 3000, generator=generator) * 3
    uniform = torch.rand(40, generator=generator, dtype=torch.float64)
    return cpu_sampling.draw(logits, PARAMS * 10, uniform).tolist()


@pytest.mark.usefixtures("no_kernel")
def test_without_a_kernel_numpy_draws_and_that_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        draws()
        draws()
    assert [record.message for record in caplog.records] == ["draw_kernel_unavailable"]


def test_both_draw_the_same(request: pytest.FixtureRequest) -> None:
    compiled = draws()
    request.getfixturevalue("no_kernel")
    assert draws() == compiled
