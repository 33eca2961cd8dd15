"""Workers whose steps run in a memory of their own: what peers see is what was staged, on both ends of a hand-off."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from biphase.errors import ConfigError
from biphase.model.spec import ModelSpec, RopeSpec
from biphase.request import Request, RequestId, SamplingParams
from biphase.scheduler.output import RunnerOutput, ScheduledRequest, SchedulerOutput
from biphase.worker import core as worker_core
from biphase.worker.capacity import DeviceMemory, num_kv_blocks, working_bytes
from biphase.worker.core import build_core
from biphase.worker.staging import HostMirror, StagedRunner, final_blocks
from tests.tiny_models import expected_tokens
from tests.worker.pair import Client, candidate, running_worker, settings


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> list[HostMirror]:
    """Every worker computes in a second, poisoned memory, as if it were a GPU's."""
    mirrors: list[HostMirror] = []

    class Mirror(HostMirror):
        def __init__(self, device_blocks: torch.Tensor, host_blocks: torch.Tensor) -> None:
            device_blocks.fill_(255)  # NaN in every dtype
            super().__init__(device_blocks, host_blocks)
            mirrors.append(self)

    monkeypatch.setattr(worker_core, "shares_memory", lambda device: False)
    monkeypatch.setattr(worker_core, "HostMirror", Mirror)
    return mirrors


def prompt(seed: int, length: int) -> list[int]:
    return [3 + (seed * 31 + i * 7) % 200 for i in range(length)]


@pytest.mark.parametrize("overlap", ["off", "on"])
async def test_a_hand_off_between_two_such_workers(
    tiny_llama: Path, own_memory: list[HostMirror], overlap: str
) -> None:
    flags = ("--overlap-scheduling", overlap)
    async with (
        running_worker("prefill", tiny_llama, "p", *flags) as prefill,
        running_worker("decode", tiny_llama, "d", *flags) as decode,
    ):
        client = Client(decode)
        for length in (1, 15, 16, 33, 150):
            tokens = prompt(length, length)
            answer = await client.generate(tokens, [candidate(prefill)])
            assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
            assert answer.report.prefill_mode == "remote"
        # The second one extends what both hold by now; the third comes from decode's own cache.
        longer = prompt(150, 150) + prompt(3, 40)
        for _ in range(2):
            answer = await client.generate(longer, [candidate(prefill)])
            assert answer.token_ids == expected_tokens(tiny_llama, [longer], 8)[0]
    staged_out, staged_in = own_memory
    assert staged_out.num_saved >= 16
    assert staged_out.num_loaded == 0
    assert staged_in.num_loaded >= 16


@pytest.mark.parametrize("staged", ["prefill", "decode"])
async def test_one_such_worker_and_one_of_the_other_kind(
    tiny_llama: Path, own_memory: list[HostMirror], monkeypatch: pytest.MonkeyPatch, staged: str
) -> None:
    kinds = iter([staged != "prefill", staged != "decode"])
    monkeypatch.setattr(worker_core, "shares_memory", lambda device: next(kinds))
    async with (
        running_worker("prefill", tiny_llama, "p") as prefill,
        running_worker("decode", tiny_llama, "d") as decode,
    ):
        prompts = [prompt(seed, 10 + 11 * seed) for seed in range(6)]
        client = Client(decode)
        answers = await asyncio.gather(*(client.generate(tokens, [candidate(prefill)]) for tokens in prompts))
        assert [answer.token_ids for answer in answers] == expected_tokens(tiny_llama, prompts, 8)
    assert len(own_memory) == 1


def scheduled(start: int, count: int, *, samples: bool = False, **fields: Any) -> ScheduledRequest:
    request = Request(RequestId("r"), list(range(100)), SamplingParams(), **fields)
    return ScheduledRequest(request, start, count, [7, 3, 9, 1], samples)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (scheduled(0, 3), []),
        (scheduled(0, 4), [7]),
        (scheduled(2, 7), [7, 3]),
        (scheduled(7, 1, samples=True), [3]),
        (scheduled(8, 1, samples=True), []),
        (scheduled(4, 6, samples=True, prefill_only=True), [3, 9]),
        (scheduled(4, 6, prefill_only=True), [3]),
        (scheduled(4, 8, samples=True, prefill_only=True), [3, 9]),
    ],
)
def test_final_blocks(share: ScheduledRequest, expected: list[int]) -> None:
    assert final_blocks(SchedulerOutput([share]), 4) == expected


@pytest.mark.parametrize("in_halves", [False, True])
def test_blocks_are_copied_whole_and_no_others(in_halves: bool) -> None:
    device, host = torch.randn(6, 2, 3), torch.zeros(6, 2, 3)
    mirror = HostMirror(device, host)

    class Runner:
        def execute(self, output: SchedulerOutput) -> RunnerOutput:
            return self.finish(self.begin(output))

        def begin(self, output: SchedulerOutput) -> None:
            return None

        def finish(self, pending: None) -> RunnerOutput:
            device[3] += 5.0
            return RunnerOutput()

        def num_awaited_outputs(self, sampling: SamplingParams) -> int:
            return 7

    device[3] = 0.0
    step = SchedulerOutput([ScheduledRequest(scheduled(0, 4).request, 0, 4, [3], True)])
    runner = StagedRunner(Runner(), mirror, 4)
    if in_halves:
        pending = runner.begin(step)
        assert not bool(host.any())
        runner.finish(pending)
    else:
        runner.execute(step)
    assert runner.num_awaited_outputs(SamplingParams()) == 7
    assert bool((host[3] == 5.0).all())
    assert not bool(host[[0, 1, 2, 4, 5]].any())
    host[1] = 8.0
    mirror.load([1])
    assert bool((device[1] == 8.0).all())
    assert (mirror.num_saved, mirror.num_loaded) == (1, 1)


SPEC = ModelSpec("x", 128256, 4096, 32, 32, 8, 128, 14336, 131072, 1e-5, RopeSpec(5e5, 128))


def test_a_gpu_s_blocks_fit_the_gpu_and_the_host(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    monkeypatch.setattr("biphase.worker.capacity.available_memory_bytes", lambda: 1000 * 2**30)
    chosen = settings(tiny_llama, "x", "--num-blocks", "0")
    block_bytes = SPEC.kv_elements_per_token * 2 * 16
    working = working_bytes(SPEC, 8192, 256, 2)
    assert 2.5 * 2**30 < working < 6 * 2**30
    memory = DeviceMemory(140 * 2**30, 124 * 2**30, working)
    num_blocks = num_kv_blocks(chosen, block_bytes, 8192, memory)
    assert num_blocks == (124 * 2**30 - (14 * 2**30) - working) // block_bytes
    monkeypatch.setattr("biphase.worker.capacity.available_memory_bytes", lambda: 10 * 2**30)
    assert num_kv_blocks(chosen, block_bytes, 8192, memory) == (7 * 2**30) // block_bytes
    with pytest.raises(ConfigError, match="mirrored"):
        num_kv_blocks(chosen, block_bytes, 131072, memory)
    with pytest.raises(ConfigError, match="gpu-memory-utilization"):
        num_kv_blocks(chosen, block_bytes, 8192, DeviceMemory(16 * 2**30, 2**28, working))


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_steps_overlap_where_a_device_computes(setting: str, device: str, expected: bool) -> None:
    assert worker_core.overlaps(setting, torch.device(device)) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_cuda_without_a_gpu_is_refused_in_one_sentence(tiny_llama: Path) -> None:
    with pytest.raises(ConfigError, match=r"--device cuda: torch .* on this machine; use --device cpu"):
        build_core(settings(tiny_llama, "x", "--device", "cuda"), "decode")
