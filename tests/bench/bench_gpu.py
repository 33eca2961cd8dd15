"""Times the GPU path in the shape of Llama-3.1-8B with random weights, beside what the device itself can do.

    python -m tests.bench.bench_gpu [--layers 32] [--case decode|attention|prefill] [--splits 1 2 4 8]

Where there is no GPU it says so and exits 0. NOT YET RUN ON A GPU: the first run is a debugging session.
Prints JSON. Floors are measured in the same run: device-to-device copy bandwidth (bytes read + bytes written) and the
rate of one bf16 matrix product of 8192 x 4096 x 14336. Times are medians of CUDA events.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from biphase.model.forward import ForwardBatch
from biphase.model.shapes import weight_shapes
from biphase.model.spec import ModelSpec, RopeSpec

BLOCK_SIZE = 16
CONTEXT = 2048
PREFILL = 8192
BATCHES = (1, 32, 128)
# What the project wants (issue "The engine"): times the floor for a decode step, shares of the floor for the others.
DECODE_GOAL, ATTENTION_GOAL, PREFILL_GOAL = 1.25, 0.8, 0.6


def spec_of(num_layers: int) -> ModelSpec:
    llama3 = {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192.0,
    }
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab_size=128256,
        hidden_size=4096,
        num_layers=num_layers,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        rope=RopeSpec(500000.0, 128, "llama3", tuple(sorted(llama3.items()))),
        attention_scale=128**-0.5,
        tie_word_embeddings=False,
    )


def median_seconds(call: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        call()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def batch_of(num_seqs: int, queries: int, context: int, num_blocks: int) -> ForwardBatch:
    """Sequences that each run `queries` tokens after `context` others, at shuffled blocks."""
    length = context + queries
    per_sequence = -(-length // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order[: num_seqs * per_sequence].view(num_seqs, per_sequence).int()
    positions = torch.arange(context, length).repeat(num_seqs)
    rows = torch.arange(num_seqs).repeat_interleave(queries)
    starts = torch.arange(num_seqs + 1, dtype=torch.int32) * queries
    return ForwardBatch(
        token_ids=torch.randint(1000, (num_seqs * queries,), generator=torch.Generator().manual_seed(1)).int(),
        positions=positions.int(),
        slot_mapping=tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start_loc=starts,
        seq_lens=torch.full((num_seqs,), length, dtype=torch.int32),
        block_tables=tables,
        logits_indices=starts[1:] - 1,
    )


def floors(device: torch.device) -> tuple[float, float]:
    """Copy bandwidth in bytes/s and bf16 matmul rate in FLOP/s."""
    source = torch.empty(2 << 30, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * source.nbytes / median_seconds(lambda: target.copy_(source))
    left = torch.randn(PREFILL, 4096, device=device, dtype=torch.bfloat16)
    right = torch.randn(14336, 4096, device=device, dtype=torch.bfloat16)
    rate = 2 * PREFILL * 4096 * 14336 / median_seconds(lambda: torch.nn.functional.linear(left, right))
    return bandwidth, rate


def attention(cache: torch.Tensor, spec: ModelSpec, bandwidth: float, splits: list[int]) -> dict[str, Any]:
    from kernels.triton_ops.decode import decode_splits, paged_decode_attention

    report: dict[str, Any] = {}
    device, dtype = cache.device, cache.dtype
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    for num_seqs in BATCHES:
        batch = batch_of(num_seqs, 1, CONTEXT - 1, cache.shape[0])
        starts, lens, tables = (part.to(device) for part in (batch.query_start_loc, batch.seq_lens, batch.block_tables))
        q = torch.randn(num_seqs, spec.num_heads, spec.head_dim, device=device, dtype=dtype)
        num_bytes = num_seqs * CONTEXT * 2 * spec.num_kv_heads * spec.head_dim * cache.element_size()
        for num_splits in sorted({decode_splits(num_seqs, spec.num_kv_heads, CONTEXT, sms), *splits}):
            call = partial(
                paged_decode_attention,
                query_start_loc=starts,
                seq_lens=lens,
                block_tables=tables,
                scale=spec.attention_scale,
                num_splits=num_splits,
            )

            def run(call: Callable[..., object] = call, q: torch.Tensor = q) -> None:
                # Every layer once: more bytes than the L2 cache holds.
                for layer in range(cache.shape[1]):
                    call(q, cache, layer)

            graph = torch.cuda.CUDAGraph()
            run()
            with torch.cuda.graph(graph):
                run()
            seconds = median_seconds(graph.replay) / cache.shape[1]
            share = num_bytes / seconds / bandwidth
            report[f"batch {num_seqs}, {num_splits} splits"] = {
                "us": seconds * 1e6,
                "GB/s": num_bytes / seconds / 1e9,
                "share of copy": share,
                "goal": ATTENTION_GOAL,
                "met": share >= ATTENTION_GOAL,
            }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--case", action="append", choices=("decode", "attention", "prefill"))
    parser.add_argument("--splits", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_gpu: no GPU here, nothing was measured (the GPU path has not yet run on a GPU)", file=sys.stderr)
        return 0
    from biphase.model.gpu_forward import CudaGraphs, GpuForward

    cases = options.case or ["attention", "decode", "prefill"]
    spec, device = spec_of(options.layers), torch.device("cuda")
    bandwidth, rate = floors(device)
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "copy GB/s": bandwidth / 1e9,
        "matmul TFLOP/s": rate / 1e12,
    }
    num_blocks = max(BATCHES) * CONTEXT // BLOCK_SIZE + 8
    shape = (num_blocks, spec.num_layers, 2, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    cache = torch.randn(shape, device=device, dtype=torch.bfloat16)
    if "attention" in cases:
        report["paged decode attention"] = attention(cache, spec, bandwidth, options.splits)
    if {"decode", "prefill"} & set(cases):
        weights = {
            name: torch.ones(shape, device=device)
            if name.endswith("norm")
            else torch.randn(shape, device=device, dtype=torch.bfloat16) * 0.02
            for name, shape in weight_shapes(spec).items()
        }
        matrices = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and name != "embed")
        forward = GpuForward(
            spec,
            weights,
            cache,
            max_num_batched_tokens=PREFILL,
            max_num_seqs=max(BATCHES),
            max_model_len=PREFILL + CONTEXT,
            recorder=None if options.eager else CudaGraphs(),
        )
    for num_seqs in BATCHES if "decode" in cases else ():
        batch = batch_of(num_seqs, 1, CONTEXT - 1, num_blocks)
        seconds = median_seconds(lambda batch=batch: forward(batch))  # type: ignore[misc]
        num_bytes = 2 * (matrices + num_seqs * CONTEXT * spec.kv_elements_per_token)
        floor = num_bytes / bandwidth
        report[f"decode step, batch {num_seqs}, context {CONTEXT}"] = {
            "ms": seconds * 1e3,
            "floor ms (bytes / copy bandwidth)": floor * 1e3,
            "times the floor": seconds / floor,
            "goal": DECODE_GOAL,
            "met": seconds / floor <= DECODE_GOAL,
            "tokens/s": num_seqs / seconds,
        }
    if "prefill" in cases:
        batch = batch_of(1, PREFILL, 0, num_blocks)
        seconds = median_seconds(lambda: forward(batch), 5)
        head = spec.vocab_size * spec.hidden_size
        pairs = PREFILL * (PREFILL + 1) // 2
        flop = 2 * (matrices - head) * PREFILL + 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers
        report[f"prefill of {PREFILL} tokens"] = {
            "ms": seconds * 1e3,
            "TFLOP/s": flop / seconds / 1e12,
            "share of matmul": flop / seconds / rate,
            "goal": PREFILL_GOAL,
            "met": flop / seconds / rate >= PREFILL_GOAL,
            "tokens/s": PREFILL / seconds,
        }
    print(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
