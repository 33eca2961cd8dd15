"""What a KV cache in fp8 costs and gives on the bundled model, in one run: decode steps, bytes, accuracy by scale.

    python -m tests.bench.bench_fp8_kv [--threads 2] [--seconds 1] [--text 512] [--no-accuracy] [--no-speed]

Prints JSON. Speed: milliseconds of a decode step of the compiled program (bfloat16) with the cache in bfloat16 and in
fp8, turn by turn, and the ratio of the medians. Accuracy: keys and values rounded in several ways, everything else in
float32, against float32: Kullback-Leibler divergence in nats and how often the likeliest token is the same, over a text
that begins with the licence.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from biphase.cache.tensors import FP8, kv_block_bytes, kv_view
from biphase.model.eager import EagerForward
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.ops import eager as ops
from biphase.ops.cpu_program import CpuProgram
from biphase.tokenizer.loader import load_tokenizer
from kernels.reference import store_kv
from kernels.reference_fp8 import dequantise_rows, quantise_rows
from tests.bench.bench_quantised import BLOCK_SIZE, Case, batch_of

NUM_BLOCKS = 600
CASES = {"1 x 4,096": Case(1, 1, 4096), "8 x 1,024": Case(8, 1, 1024)}


def cache_of(model: LoadedModel, dtype: torch.dtype, num_blocks: int = NUM_BLOCKS) -> Tensor:
    spec = model.spec
    shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim, dtype)
    return kv_view(torch.zeros(num_blocks, kv_block_bytes(*shape), dtype=torch.uint8), *shape)


def program_of(model: LoadedModel, kv_dtype: torch.dtype, num_threads: int) -> CpuProgram:
    return CpuProgram(
        model.spec,
        model.weights,
        cache_of(model, kv_dtype),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=64,
        max_num_seqs=64,
        max_model_len=8192,
        dtype=model.dtype,
        num_threads=num_threads,
    )


def speed(num_threads: int, seconds: float) -> dict[str, object]:
    model = load_model(resolve_model(""), "bfloat16", keep_blocks=True)
    programs = {"bf16": program_of(model, torch.bfloat16, num_threads), "fp8": program_of(model, FP8, num_threads)}
    random = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(1))
    report: dict[str, object] = {}
    for name, case in CASES.items():
        batch = batch_of(random, case)
        taken: dict[str, list[float]] = {kind: [] for kind in programs}
        end = time.perf_counter() + 2 * seconds
        while time.perf_counter() < end or len(taken["fp8"]) < 6:
            for kind, program in programs.items():
                start = time.perf_counter()
                program(batch)
                taken[kind].append(time.perf_counter() - start)
        medians = {kind: statistics.median(values[1:]) * 1e3 for kind, values in taken.items()}
        report[name] = {
            **{f"{kind} ms": round(ms, 2) for kind, ms in medians.items()},
            "fp8 / bf16": round(medians["fp8"] / medians["bf16"], 3),
        }
    return report


def by_scale(x: Tensor, scale: Tensor | float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(FP8).float() * scale


def by_row_of_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x / scale).round() * scale


# name -> what keys or values [num_tokens, num_kv_heads, head_dim] become
ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "bfloat16": lambda x: x.bfloat16().float(),
    "fp8, no scale": lambda x: by_scale(x, 1.0),
    "fp8, a scale for each layer's K and V": lambda x: by_scale(x, x.abs().max() / 448),
    "fp8, a power of two for each token and head (ours)": lambda x: dequantise_rows(*quantise_rows(x)),
    "fp8, a float for each token and head": lambda x: by_scale(x, x.abs().amax(-1, keepdim=True) / 448),
    "int8, a float for each token and head": by_row_of_int8,
}


def accuracy(num_tokens: int, gain: float) -> dict[str, object]:
    """`gain` multiplies keys before they are rounded and divides scores: what a model with larger keys would meet."""
    model = load_model(resolve_model(""), "float32")
    tokens = load_tokenizer(model.source).tokenizer.encode(Path("LICENSE").read_text())[:num_tokens]
    cache = cache_of(model, torch.float32, -(-num_tokens // BLOCK_SIZE))
    forward = EagerForward(model.spec, model.dense_weights(), cache, max_model_len=num_tokens + 1)
    at = torch.arange(num_tokens)
    batch = batch_of(torch.tensor(tokens), Case(1, 1, 0))
    batch = type(batch)(
        torch.tensor(tokens, dtype=torch.int32),
        at.int(),
        at,
        torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32),
        torch.arange(-(-num_tokens // BLOCK_SIZE), dtype=torch.int32).unsqueeze(0),
        at.int(),
    )

    def run(rounding: Callable[[Tensor], Tensor]) -> Tensor:
        def store(k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slots: Tensor) -> None:
            store_kv(rounding(k * gain) / gain, rounding(v), kv_cache, layer, slots)

        ops.store_kv = store
        try:
            return forward(batch).log_softmax(-1)
        finally:
            ops.store_kv = store_kv

    exact = run(lambda x: x)
    report: dict[str, object] = {}
    for name, rounding in ROUNDINGS.items():
        found = run(rounding)
        report[name] = {
            "KL": round(float((exact.exp() * (exact - found)).sum(-1).mean()), 5),
            "same likeliest token": round(float((exact.argmax(-1) == found.argmax(-1)).float().mean()), 4),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--text", type=int, default=512, help="tokens to judge accuracy on")
    parser.add_argument("--no-accuracy", action="store_true")
    parser.add_argument("--no-speed", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec = load_model(resolve_model(""), "bfloat16", keep_blocks=True).spec
    shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    report: dict[str, object] = {
        "bytes of a block": {"bf16": kv_block_bytes(*shape, torch.bfloat16), "fp8": kv_block_bytes(*shape, FP8)}
    }
    if not options.no_speed:
        report["decode step"] = speed(options.threads, options.seconds)
    if not options.no_accuracy:
        report["accuracy"] = accuracy(options.text, 1.0)
        report["accuracy, keys 64 times as large"] = accuracy(options.text, 64.0)
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
