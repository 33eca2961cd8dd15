"""The real model through the engine: however its steps are cut and whoever gives way, the same tokens.

With every dtype that keys and values are kept in; fp8 besides within a stated distance from the exact ones.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.cache.memory import BlockMemory
from biphase.cache.tensors import FP8, kv_block_bytes, kv_tensor
from biphase.engine import Engine, EngineEvent, EngineStats, SchedulerConfig, Tokens
from biphase.model.executors import ExecutorOptions, choose_executor
from biphase.model.forward import ForwardBatch
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.request import Request, RequestId, SamplingParams
from biphase.runner import ModelRunner
from biphase.tokenizer.loader import load_tokenizer
from tests.stepping import Stepper, poisoned_cache, requests_of
from tests.tiny_models import save_tiny

BLOCK_SIZE = 16
MAX_MODEL_LEN = 256


@pytest.fixture(scope="module")
def bundled_model() -> LoadedModel:
    return load_model(resolve_model(""), "float32", "cpu")


def generate(
    model: LoadedModel,
    num_blocks: int,
    enable_caching: bool = True,
    *,
    kv_dtype: torch.dtype | None = None,
    native: bool = True,
    **config: Any,
) -> tuple[dict[str, list[int]], EngineStats]:
    spec = model.spec
    shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, kv_dtype or model.dtype)
    memory = BlockMemory(num_blocks, kv_block_bytes(*shape))
    pool = BlockPool(num_blocks, enable_caching)
    manager = KVCacheManager(pool, block_size=BLOCK_SIZE, namespace=b"test")
    settings = SchedulerConfig(max_num_seqs=8, max_model_len=MAX_MODEL_LEN, **config)
    runner = ModelRunner(
        model,
        kv_tensor(memory, *shape),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=8,
        max_model_len=MAX_MODEL_LEN,
        native=native,
    )
    engine = Engine(runner, manager, settings)
    output: dict[str, list[int]] = {}
    rng = random.Random(1)
    low, high = (1000, 40_000) if spec.vocab_size > 40_000 else (3, spec.vocab_size)
    stem = [rng.randrange(low, high) for _ in range(40)]
    for n, length in enumerate((5, 40, 90, 120, 17, 60)):
        prompt = (stem if n % 2 else []) + [rng.randrange(low, high) for _ in range(length)]

        def sink(event: EngineEvent, name: str = f"r{n}") -> None:
            if isinstance(event, Tokens):
                output.setdefault(name, []).extend(event.token_ids)

        sampling = SamplingParams(max_tokens=30, temperature=1.0 if n == 2 else 0.0, seed=7)
        engine.add_request(Request(RequestId(f"r{n}"), prompt, sampling), sink)
    while engine.step():
        engine._scheduler.check_integrity()
    assert pool.num_used == 0
    return output, engine.stats()


def assert_a_tiny_pool_changes_nothing(model: LoadedModel, *, overlap: bool, **options: Any) -> None:
    """Nor, with `overlap`, that each step is decided while the one before runs."""
    roomy, stats = generate(model, 100, max_num_batched_tokens=512, **options)
    assert stats.num_preemptions == 0
    assert all(len(tokens) == 30 for tokens in roomy.values())
    for enable_caching, policy, budget in ((True, "shortest_first", 48), (False, "fcfs", 32)):
        config: dict[str, Any] = {"policy": policy, "max_num_batched_tokens": budget, "overlap": overlap}
        tight, stats = generate(model, 14, enable_caching, **config, **options)
        assert stats.num_preemptions > 0
        assert tight == roomy


@pytest.mark.slow
@pytest.mark.parametrize(("kv_dtype", "overlap"), [(torch.float32, False), (torch.float32, True), (FP8, False)])
def test_a_tiny_pool_and_small_chunks_change_no_token(
    bundled_model: LoadedModel, kv_dtype: torch.dtype, overlap: bool
) -> None:
    assert_a_tiny_pool_changes_nothing(bundled_model, overlap=overlap, kv_dtype=kv_dtype)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "native", "overlap"),
    # Not 16 bits in plain torch: its sums round by the shape of the batch, and a near tie then falls either way.
    [
        ("bfloat16", None, True, False),
        ("bfloat16", FP8, True, False),
        ("bfloat16", FP8, True, True),
        ("float32", FP8, False, False),
    ],
)
def test_nor_with_any_other_dtype(
    tmp_path: Path, dtype: str, kv_dtype: torch.dtype | None, native: bool, overlap: bool
) -> None:
    model = load_model(resolve_model(str(save_tiny("llama", tmp_path))), dtype)
    assert_a_tiny_pool_changes_nothing(model, overlap=overlap, kv_dtype=kv_dtype, native=native)


# How far logits over keys and values in fp8 may be from those over exact ones, on the bundled model: Kullback-Leibler
# divergence in nats, the mean over a text, and the share of positions whose likeliest token is the same.
FP8_MAX_DIVERGENCE = 0.04
FP8_MIN_AGREEMENT = 0.9


@pytest.mark.slow
def test_fp8_stays_near_the_exact_model(bundled_model: LoadedModel) -> None:
    tokens = load_tokenizer(bundled_model.source).tokenizer.encode(Path("LICENSE").read_text())[:256]
    logits: list[torch.Tensor] = []
    for kv_dtype in (torch.float32, FP8):
        cache = poisoned_cache(bundled_model.spec, 32, BLOCK_SIZE, kv_dtype)
        options = ExecutorOptions(BLOCK_SIZE, 256, 256, 256, 1, 0, native=True, cuda_graphs=False)
        forward = choose_executor(bundled_model, cache, options).forward
        logits.append(forward(whole_prompt(tokens)).clone())
    exact, rounded = (part.log_softmax(-1) for part in logits)
    divergence = float((exact.exp() * (exact - rounded)).sum(-1).mean())
    agreement = float((exact.argmax(-1) == rounded.argmax(-1)).float().mean())
    assert 0.0 < divergence < FP8_MAX_DIVERGENCE
    assert agreement > FP8_MIN_AGREEMENT


@pytest.mark.slow
def test_the_greedy_answer_in_fp8(bundled_model: LoadedModel) -> None:
    tokenizer = load_tokenizer(bundled_model.source).tokenizer
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.encode(question, add_special_tokens=False)
    answers = [
        Stepper(bundled_model, native=True, max_model_len=128, kv_dtype=kv_dtype).generate(
            requests_of([prompt], SamplingParams(max_tokens=8))
        )[0]
        for kv_dtype in (torch.float32, FP8)
    ]
    assert answers[0] == answers[1]
    assert "Paris" in tokenizer.decode(answers[1])


def whole_prompt(tokens: list[int]) -> ForwardBatch:
    """One sequence in one step, in blocks in reverse order; logits of all its tokens."""
    count = len(tokens)
    tables = torch.arange(-(-count // BLOCK_SIZE) - 1, -1, -1, dtype=torch.int32)
    at = torch.arange(count)
    return ForwardBatch(
        token_ids=torch.tensor(tokens, dtype=torch.int32),
        positions=at.int(),
        slot_mapping=tables[at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE,
        query_start_loc=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=tables.unsqueeze(0),
        logits_indices=at.int(),
    )
