"""Times packed weights against plain ones on the bundled model, and says what rounding costs, all in one run.

    python -m tests.bench.bench_quantised [--threads 2] [--seconds 1] [--mode NAME ...] [--no-accuracy]

Prints JSON: for each mode milliseconds of a step, best and median; and, on a text that the float32 model wrote, how far
from its distribution the mode's is: cross entropy in nats, Kullback-Leibler divergence, and how often the likeliest
token is the same.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import torch
from torch import Tensor

from biphase.cache.memory import BlockMemory
from biphase.cache.tensors import kv_block_bytes, kv_tensor
from biphase.model.eager import EagerForward
from biphase.model.forward import Forward, ForwardBatch
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.ops.cpu_program import CpuProgram
from tests.bench.machine import best_and_median

BLOCK_SIZE = 16
NUM_BLOCKS = 1100
MAX_TOKENS = 512
# name -> (--quantization, multiply as integers)
MODES = {"bf16": ("none", False), "gguf, decoded": ("gguf", False), "gguf": ("gguf", True), "int8": ("int8", True)}


@dataclass(frozen=True)
class Case:
    """Sequences of one step: each runs `queries` tokens after `context` others."""

    sequences: int
    queries: int
    context: int


CASES = {
    "decode 1": Case(1, 1, 160),
    "decode 8": Case(8, 1, 160),
    "decode 32": Case(32, 1, 160),
    "prefill 512": Case(1, 512, 0),
}


def batch_of(token_ids: Tensor, case: Case, all_logits: bool = False) -> ForwardBatch:
    length = case.context + case.queries
    per_sequence = -(-length // BLOCK_SIZE)
    order = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(0))
    tables = order[: case.sequences * per_sequence].view(case.sequences, per_sequence).int()
    positions = torch.arange(case.context, length).repeat(case.sequences)
    rows = torch.arange(case.sequences).repeat_interleave(case.queries)
    starts = torch.arange(case.sequences + 1, dtype=torch.int32) * case.queries
    num_tokens = case.sequences * case.queries
    return ForwardBatch(
        token_ids=token_ids[:num_tokens].int(),
        positions=positions.int(),
        slot_mapping=tables[rows, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE,
        query_start_loc=starts,
        seq_lens=torch.full((case.sequences,), length, dtype=torch.int32),
        block_tables=tables,
        logits_indices=torch.arange(num_tokens, dtype=torch.int32) if all_logits else starts[1:] - 1,
    )


def cache_of(model: LoadedModel, dtype: torch.dtype) -> Tensor:
    """In memory like a worker's, and written to: pages that never were are all one page of zeros."""
    spec = model.spec
    shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
    memory = BlockMemory(NUM_BLOCKS, kv_block_bytes(*shape, dtype), populate=True)
    return kv_tensor(memory, *shape, dtype).normal_(generator=torch.Generator().manual_seed(0))


def program_of(model: LoadedModel, integer_dot: bool, num_threads: int) -> CpuProgram:
    return CpuProgram(
        model.spec,
        model.weights,
        cache_of(model, model.dtype),
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=64,
        max_model_len=8192,
        dtype=model.dtype,
        num_threads=num_threads,
        integer_dot=integer_dot,
    )


def written_text(forward: Forward, num_tokens: int) -> Tensor:
    """Token ids that the model itself draws, one after another."""
    generator = torch.Generator().manual_seed(0)
    tokens = [1]
    for position in range(num_tokens - 1):
        batch = batch_of(torch.tensor(tokens[-1:]), Case(1, 1, position))
        # One table for all steps: the case of the whole text.
        whole = batch_of(torch.zeros(num_tokens, dtype=torch.int64), Case(1, num_tokens, 0))
        batch = ForwardBatch(
            batch.token_ids,
            batch.positions,
            whole.slot_mapping[position : position + 1],
            batch.query_start_loc,
            batch.seq_lens,
            whole.block_tables,
            batch.logits_indices,
        )
        tokens.append(int(forward(batch)[0].softmax(-1).multinomial(1, generator=generator)))
    return torch.tensor(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement")
    parser.add_argument("--mode", action="append", choices=list(MODES))
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--text", type=int, default=192, help="tokens to judge accuracy on")
    parser.add_argument("--no-accuracy", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = resolve_model("")
    modes = options.mode or list(MODES)
    programs: dict[str, CpuProgram] = {}
    report: dict[str, dict[str, object]] = {}
    for mode in modes:
        quantization, integer_dot = MODES[mode]
        model = load_model(source, "bfloat16", quantization=quantization)
        programs[mode] = program_of(model, integer_dot, options.threads)
        report[mode] = {"weight MB": round(model.num_weight_bytes / 1e6, 1)}
    random = torch.randint(1000, (MAX_TOKENS,), generator=torch.Generator().manual_seed(1))
    for name in options.case or CASES:
        batch = batch_of(random, CASES[name])
        for mode, program in programs.items():
            best, median = best_and_median(lambda program=program, batch=batch: program(batch), options.seconds)  # type: ignore[misc]
            report[mode][name] = {"ms best": round(best * 1e3, 2), "ms median": round(median * 1e3, 2)}
    if not options.no_accuracy:
        exact = load_model(source, "float32")
        eager = EagerForward(exact.spec, exact.dense_weights(), cache_of(exact, torch.float32), max_model_len=2048)
        text = written_text(program_of(exact, False, options.threads), options.text)
        batch = batch_of(text, Case(1, len(text), 0), all_logits=True)
        expected = eager(batch)[:-1].log_softmax(-1)
        following = text[1:].unsqueeze(1)
        for mode, program in programs.items():
            found = program(batch)[:-1].log_softmax(-1)
            nats = float(-found.gather(1, following).mean()), float(-expected.gather(1, following).mean())
            report[mode]["accuracy"] = {
                "nats per token": round(nats[0], 4),
                "in float32": round(nats[1], 4),
                "KL from float32": round(float((expected.exp() * (expected - found)).sum(-1).mean()), 5),
                "same likeliest token": round(float((found.argmax(-1) == expected.argmax(-1)).float().mean()), 4),
            }
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
