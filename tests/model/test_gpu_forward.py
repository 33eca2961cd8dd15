"""The GPU's forward pass on what there is: Triton's interpreter, and a recorder that replays on CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.cache.tensors import FP8
from biphase.engine import Engine, EngineEvent, SchedulerConfig, Tokens
from biphase.model import executors
from biphase.model.executors import Executor, ExecutorOptions
from biphase.model.forward import ForwardBatch
from biphase.model.gpu_forward import CudaGraphs, GpuForward
from biphase.model.loader import LoadedModel, load_model
from biphase.model.packed import PackedMatrix
from biphase.model.source import resolve_model
from biphase.ops.gpu import can_multiply
from biphase.request import Request, RequestId, SamplingParams
from biphase.runner import ModelRunner
from tests.model.packed_checkpoints import save_packed
from tests.stepping import Stepper, poisoned_cache, requests_of
from tests.tiny_models import save_tiny

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Small: the interpreter takes a millisecond for what a GPU does in one of thousands of programs.
PROMPTS = [[5, 9, 200], [7], [3 + i % 190 for i in range(14)]]


class Replays:
    """Keeps what was recorded and runs it again; counts."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.num_recorded += 1
        run()

        def replay() -> None:
            self.num_replayed += 1
            run()

        return replay


@pytest.fixture
def gpu_recorder(monkeypatch: pytest.MonkeyPatch) -> Replays:
    """Makes runners take the GPU's executor here."""
    recorder = Replays()

    def choose(model: LoadedModel, kv_cache: torch.Tensor, options: ExecutorOptions) -> Executor:
        forward = GpuForward(
            model.spec,
            model.weights_for(can_multiply),
            kv_cache,
            max_num_batched_tokens=options.max_num_batched_tokens,
            max_num_seqs=options.max_num_seqs,
            max_model_len=options.max_model_len,
            recorder=(CudaGraphs() if DEVICE == "cuda" else recorder) if options.cuda_graphs else None,
        )
        return Executor(forward, "gpu")

    monkeypatch.setattr("biphase.runner.choose_executor", choose)
    return recorder


def load(name: str, folder: Path) -> LoadedModel:
    return load_model(resolve_model(str(save_tiny(name, folder, num_hidden_layers=2))), "float32", DEVICE)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe"])
def test_tokens_equal_plain_torch_s(
    name: str, tmp_path: Path, gpu_recorder: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name, tmp_path)
    params = SamplingParams(max_tokens=3)
    produced = Stepper(model, max_num_seqs=3, max_num_batched_tokens=8).generate(requests_of(PROMPTS, params))
    monkeypatch.undo()
    expected = Stepper(model).generate(requests_of(PROMPTS, params))
    assert produced == expected
    if DEVICE == "cpu":
        assert gpu_recorder.num_recorded == (0 if name == "qwen3_moe" else 3)
        assert gpu_recorder.num_replayed > 0 or name == "qwen3_moe"


def test_mixed_steps_sampling_and_prompt_logprobs(
    tmp_path: Path, gpu_recorder: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load("llama", tmp_path)

    def run() -> tuple[list[list[int]], list[float]]:
        stepper = Stepper(model, block_size=4, max_num_seqs=3, max_num_batched_tokens=12)
        requests = requests_of(PROMPTS, SamplingParams(max_tokens=3, temperature=1.0, seed=3, top_p=0.9))
        requests[0].sampling = SamplingParams(max_tokens=3, prompt_logprobs=1)
        tokens = stepper.generate(requests, chunk=5)
        logprobs = [
            logprob
            for out in stepper.outputs
            for entry in out.prompt_logprobs.get(requests[0].request_id, [])
            for logprob in entry.logprobs
        ]
        return tokens, logprobs

    tokens, logprobs = run()
    monkeypatch.undo()
    expected_tokens, expected_logprobs = run()
    assert tokens == expected_tokens
    assert logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    assert len(logprobs) == 4


@pytest.mark.parametrize("name", ["llama", "qwen3_moe"])
def test_overlapping_steps_feed_their_tokens_on(
    name: str, tmp_path: Path, gpu_recorder: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(name, tmp_path)
    sampling = [SamplingParams(max_tokens=5), SamplingParams(max_tokens=3), SamplingParams(max_tokens=4)]
    if name == "llama":
        sampling[1] = SamplingParams(max_tokens=6, temperature=1.0, seed=3, min_p=0.01)
    # Their blocks are smaller than their outputs; the last prompt comes in two chunks while the others decode.
    requests = [Request(RequestId(f"r{n}"), PROMPTS[n], params) for n, params in enumerate(sampling)]
    output, num_fed = generate(model, requests, overlap=True)
    assert num_fed >= 4
    assert DEVICE == "cuda" or gpu_recorder.num_replayed > 0 or name == "qwen3_moe"
    monkeypatch.undo()
    requests = [Request(RequestId(f"r{n}"), PROMPTS[n], params) for n, params in enumerate(sampling)]
    assert generate(model, requests, overlap=False) == (output, 0)


def generate(model: LoadedModel, requests: list[Request], overlap: bool) -> tuple[dict[str, list[int]], int]:
    """Tokens of each, and how many were fed from one step to the next."""
    limits: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 12, "max_model_len": 32}
    cache = poisoned_cache(model.spec, 24, 4, torch.float32).to(DEVICE)
    runner = ModelRunner(model, cache, block_size=4, num_threads=1, **limits)
    pool = BlockPool(24)
    engine = Engine(
        runner, KVCacheManager(pool, block_size=4, namespace=b"test"), SchedulerConfig(**limits, overlap=overlap)
    )
    num_fed = 0
    forward = runner._forward

    def count(batch: ForwardBatch) -> torch.Tensor:
        nonlocal num_fed
        num_fed += 0 if batch.fed is None else len(batch.fed.at)
        return forward(batch)

    runner._forward = count
    output: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:

        def sink(event: EngineEvent, name: str = request.request_id) -> None:
            if isinstance(event, Tokens):
                output[name] += event.token_ids

        engine.add_request(request, sink)
    while engine.step():
        engine._scheduler.check_integrity()
    assert pool.num_used == 0
    return output, num_fed


def test_keys_and_values_in_fp8(tmp_path: Path, gpu_recorder: Replays, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load("qwen3", tmp_path)
    params = SamplingParams(max_tokens=3)
    options: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 8, "kv_dtype": FP8}
    produced = Stepper(model, **options).generate(requests_of(PROMPTS, params))
    monkeypatch.undo()
    expected = Stepper(model, **options).generate(requests_of(PROMPTS, params))
    assert produced == expected


@pytest.mark.parametrize("kind", ["fp8 tensor", "fp8 blocks", "compressed int8", "awq", "gptq ordered", "gptq 8 bits"])
def test_packed_checkpoints_are_multiplied_as_they_are(
    kind: str, tmp_path: Path, gpu_recorder: Replays, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, plain = save_packed(kind, tmp_path, num_hidden_layers=1)
    model = load_model(resolve_model(str(packed)), "float32", DEVICE, keep_packed=True)
    kept = model.weights_for(can_multiply)
    assert all(
        isinstance(kept[f"layers.0.{name}"], PackedMatrix) for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    params = SamplingParams(max_tokens=2)
    produced = Stepper(model, max_num_seqs=3, max_num_batched_tokens=8).generate(requests_of(PROMPTS[:2], params))
    monkeypatch.undo()
    dense = load_model(resolve_model(str(plain)), "float32", DEVICE)
    assert produced == Stepper(dense).generate(requests_of(PROMPTS[:2], params))


def test_recording_writes_no_slot(tmp_path: Path, gpu_recorder: Replays) -> None:
    stepper = Stepper(load("llama", tmp_path), max_num_seqs=2)
    assert bool(stepper.kv_cache.isnan().all())


def test_joined_weights_lie_in_memory_once(tmp_path: Path) -> None:
    model = load("llama", tmp_path)
    weights = model.weights_for(can_multiply)
    before = {name: weight.clone() for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    cache = torch.zeros(4, 2, 2, 2, 16, 16, device=DEVICE)
    GpuForward(model.spec, weights, cache, max_num_batched_tokens=8, max_num_seqs=2, max_model_len=32)
    after = {name: weight for name, weight in weights.items() if isinstance(weight, torch.Tensor)}
    assert before.keys() == after.keys() == weights.keys()
    assert all(torch.equal(before[name], weight) for name, weight in after.items())
    storages = {weight.untyped_storage().data_ptr() for weight in after.values()}
    # Of 9 tensors in each layer q, k, v are one now, and gate and up.
    assert len(storages) == 3 + 2 * 6


def test_eager_is_chosen_loudly_without_triton(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "biphase.model.gpu_forward", None)
    model = load("llama", tmp_path)
    options = ExecutorOptions(16, 8, 2, 32, 1, 0, native=True, cuda_graphs=True)
    executor = executors.choose_executor(model, torch.zeros(4, 3, 2, 2, 16, 16, device="meta"), options)
    assert executor.name == "eager"
    assert not executor.takes_host_batches
    assert "native_kernels_unavailable" in caplog.text
