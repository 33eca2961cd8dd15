"""Times the native CPU program in the shape of SmolLM2-135M with random weights, beside its floors and torch.

    python -m tests.bench.bench_cpu_program [--threads 2] [--case NAME ...] [--profile]

Prints JSON. For each case: best and median seconds of a step, the GB and GFLOP that the step must move, the floor
(bytes over the read bandwidth, or FLOP over the matmul rate, both of this run), and the time of the step's linears
alone in torch.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from biphase.model.forward import ForwardBatch
from biphase.model.shapes import weight_shapes
from biphase.model.spec import ModelSpec, RopeSpec
from biphase.ops.cpu_program import CpuProgram
from kernels.cpu.library import Isa, Kind
from tests.bench.machine import best_and_median

BLOCK_SIZE = 16
SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab_size=49152,
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    max_position_embeddings=8192,
    norm_eps=1e-5,
    rope=RopeSpec(100000.0, 64),
    attention_scale=0.125,
)


@dataclass(frozen=True)
class Case:
    """Sequences of one step: each runs `queries` tokens after `context` others. `goal_ms` is the project's goal."""

    sequences: int
    queries: int
    context: int
    goal_ms: float | None = None
    logits: bool = True


CASES = {
    "decode 1": Case(1, 1, 160, 7.0),
    "decode 4": Case(4, 1, 160),
    "decode 8": Case(8, 1, 160, 11.0),
    "decode 16": Case(16, 1, 160),
    "decode 32": Case(32, 1, 160, 28.0),
    "decode 16 x 1024": Case(16, 1, 1024, 26.0),
    "decode 1 x 4096": Case(1, 1, 4096),
    # The three chunks of a 1,152-token prompt; the goal is 2,800 tokens/s over all of them.
    "prefill 512 after 0": Case(1, 512, 0, 183.0, False),
    "prefill 512 after 512": Case(1, 512, 512, 183.0, False),
    "prefill 128 after 1024": Case(1, 128, 1024, 46.0),
}


def batch_of(case: Case, num_blocks: int) -> ForwardBatch:
    tokens = case.sequences * case.queries
    length = case.context + case.queries
    per_sequence = -(-length // BLOCK_SIZE)
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0))
    tables = order[: case.sequences * per_sequence].view(case.sequences, per_sequence).int()
    positions = torch.arange(case.context, length).repeat(case.sequences)
    rows = torch.arange(case.sequences).repeat_interleave(case.queries)
    slots = tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = torch.arange(case.sequences + 1, dtype=torch.int32) * case.queries
    return ForwardBatch(
        token_ids=torch.randint(SPEC.vocab_size, (tokens,), generator=torch.Generator().manual_seed(1)).int(),
        positions=positions.int(),
        slot_mapping=slots,
        query_start_loc=starts,
        seq_lens=torch.full((case.sequences,), length, dtype=torch.int32),
        block_tables=tables,
        logits_indices=(starts[1:] - 1) if case.logits else torch.empty(0, dtype=torch.int32),
    )


def torch_linears(case: Case, weights: dict[str, torch.Tensor]) -> Callable[[], None]:
    tokens = case.sequences * case.queries
    inputs = {k: torch.randn(tokens, k).to(weights["embed"].dtype) for k in (SPEC.hidden_size, SPEC.intermediate_size)}
    head = torch.randn(case.sequences, SPEC.hidden_size).to(weights["embed"].dtype)
    matrices = [w for name, w in weights.items() if w.dim() == 2 and name != "embed"]

    def run() -> None:
        with torch.inference_mode():
            for w in matrices:
                torch.nn.functional.linear(inputs[w.shape[1]], w)
            if case.logits:
                torch.nn.functional.linear(head, weights["embed"])

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--isa", choices=[isa.name for isa in Isa])
    parser.add_argument("--profile", action="store_true", help="seconds by kind of op instead of clean times")
    parser.add_argument("--no-torch", action="store_true")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    torch.set_num_threads(options.threads)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.ones(shape) if name.endswith("norm") else (torch.randn(shape, generator=generator) * 0.04).to(dtype)
        for name, shape in weight_shapes(SPEC).items()
    }
    shape = (1100, SPEC.num_layers, 2, SPEC.num_kv_heads, BLOCK_SIZE, SPEC.head_dim)
    cache = torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    program = CpuProgram(
        SPEC,
        weights,
        cache,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        max_model_len=8192,
        dtype=dtype,
        num_threads=options.threads,
        isa=Isa[options.isa] if options.isa else None,
    )
    source = torch.zeros(64 << 20, dtype=torch.float32)
    read_seconds, _ = best_and_median(lambda: source.sum(), 0.5)
    left, right = (torch.randn(n, 1024).to(dtype) for n in (512, 4096))
    matmul_seconds, _ = best_and_median(lambda: torch.nn.functional.linear(left, right), 0.5)
    report: dict[str, object] = {
        "isa": program.isa.name,
        "threads": options.threads,
        "read GB/s (torch sum)": source.nbytes / read_seconds / 1e9,
        "matmul GFLOP/s (torch)": 2 * 512 * 1024 * 4096 / matmul_seconds / 1e9,
    }
    bandwidth, rate = source.nbytes / read_seconds, 2 * 512 * 1024 * 4096 / matmul_seconds
    item = dtype.itemsize
    matrix_elements = sum(w.numel() for name, w in weights.items() if w.dim() == 2 and name != "embed")
    for name in options.case or CASES:
        case = CASES[name]
        batch = batch_of(case, cache.shape[0])
        tokens = case.sequences * case.queries
        head = weights["embed"].numel() if case.logits else 0
        kv_bytes = case.sequences * (case.context + case.queries) * SPEC.kv_elements_per_token * item
        num_bytes = (matrix_elements + head) * item + kv_bytes
        pairs = case.sequences * sum(range(case.context + 1, case.context + case.queries + 1))
        attention_flop = 4 * pairs * SPEC.num_heads * SPEC.head_dim * SPEC.num_layers
        flop = 2 * matrix_elements * tokens + 2 * head * case.sequences + attention_flop
        if options.profile:
            program(batch)
            program.profile(True)
            program.op_seconds()
            for _ in range(10):
                program(batch)
            by_kind: dict[str, float] = defaultdict(float)
            for kind, seconds in zip(program.op_kinds, program.op_seconds(), strict=True):
                by_kind[Kind(kind).name] += seconds * 100
            program.profile(False)
            report[name] = {kind: round(ms, 3) for kind, ms in by_kind.items()}
            continue
        best, median = best_and_median(lambda batch=batch: program(batch), options.seconds)  # type: ignore[misc]
        floor = max(num_bytes / bandwidth, flop / rate)
        row = {
            "ms best": best * 1e3,
            "ms median": median * 1e3,
            "goal ms": case.goal_ms,
            "floor ms": floor * 1e3,
            "times the floor": median / floor,
            "tokens/s": tokens / median,
            "GB/s": num_bytes / median / 1e9,
            "GFLOP/s": flop / median / 1e9,
        }
        if not options.no_torch:
            linears, _ = best_and_median(torch_linears(case, weights), options.seconds / 2)
            row |= {"torch linears alone ms": linears * 1e3, "torch linears / our whole step": linears / best}
        report[name] = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
    print(json.dumps(report, indent=1))
    program.close()


if __name__ == "__main__":
    main()
