"""The real model through the engine: however its steps are cut and whoever gives way, the same tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.cache.memory import BlockMemory
from biphase.cache.tensors import kv_block_bytes, kv_tensor
from biphase.engine import Engine, EngineEvent, EngineStats, SchedulerConfig, Tokens
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.request import Request, RequestId, SamplingParams
from biphase.runner import ModelRunner

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def bundled_model() -> LoadedModel:
    return load_model(resolve_model(""), "float32", "cpu")


def generate(
    model: LoadedModel, num_blocks: int, enable_caching: bool = True, **config: Any
) -> tuple[dict[str, list[int]], EngineStats]:
    spec = model.spec
    shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    memory = BlockMemory(num_blocks, kv_block_bytes(*shape, model.dtype))
    pool = BlockPool(num_blocks, enable_caching)
    manager = KVCacheManager(pool, block_size=BLOCK_SIZE, namespace=b"test")
    settings = SchedulerConfig(max_num_seqs=8, max_model_len=MAX_MODEL_LEN, **config)
    runner = ModelRunner(
        model,
        kv_tensor(memory, *shape, model.dtype),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        num_threads=1,
        native=True,
    )
    engine = Engine(runner, manager, settings)
    output: dict[str, list[int]] = {}
    rng = random.Random(1)
    stem = [rng.randrange(1000, 40_000) for _ in range(40)]
    for n, length in enumerate((5, 40, 90, 120, 17, 60)):
        prompt = (stem if n % 2 else []) + [rng.randrange(1000, 40_000) for _ in range(length)]

        def sink(event: EngineEvent, name: str = f"r{n}") -> None:
            if isinstance(event, Tokens):
                output.setdefault(name, []).extend(event.token_ids)

        sampling = SamplingParams(max_tokens=30, temperature=1.0 if n == 2 else 0.0, seed=7)
        engine.add_request(Request(RequestId(f"r{n}"), prompt, sampling), sink)
    while engine.step():
        engine._scheduler.check_integrity()
    assert pool.num_used == 0
    return output, engine.stats()


@pytest.mark.slow
def test_a_tiny_pool_and_small_chunks_change_no_token(bundled_model: LoadedModel) -> None:
    roomy, stats = generate(bundled_model, 100, max_num_batched_tokens=512)
    assert stats.num_preemptions == 0
    assert all(len(tokens) == 30 for tokens in roomy.values())
    for enable_caching, policy, budget in ((True, "shortest_first", 48), (False, "fcfs", 32)):
        tight, stats = generate(bundled_model, 14, enable_caching, policy=policy, max_num_batched_tokens=budget)
        assert stats.num_preemptions > 0
        assert tight == roomy
