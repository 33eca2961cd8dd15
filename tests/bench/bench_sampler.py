"""Times the choice of tokens on one thread: the kernel, its numpy definition and plain torch, beside the floor.

    python -m tests.bench.bench_sampler [--rows 32] [--vocab 49152]

Prints JSON, milliseconds of one row. Its floor is what this run measured for finding the largest logit (numpy, over
all rows: they come from further away), reading the row again from cache, and one exponential of each logit (torch).
Logits are normal, with a deviation of 3 and with one of 0.5, where most of the vocabulary has mass: top_p's worst case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from biphase.ops import cpu_sampling
from biphase.request import SamplingParams
from biphase.sampler import SamplingRow, processors
from kernels import reference_draw
from kernels.cpu.draw import DRAW, draw_tokens
from kernels.cpu.library import Isa, available_isas
from tests.bench.machine import best_and_median

CASES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "min_p 0.05": {"min_p": 0.05},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 50, top_p 0.9": {"top_k": 50, "top_p": 0.9},
}
PROCESSORS: dict[str, dict[str, Any]] = {
    "penalties over 1,000 tokens": {"frequency_penalty": 0.3, "repetition_penalty": 1.1},
    "logit_bias of 300": {"logit_bias": tuple((token * 7, 1.0) for token in range(300))},
    "allowed_token_ids of 1,000": {"allowed_token_ids": tuple(range(0, 8000, 8))},
}


def torch_draw(logits: Tensor, params: SamplingParams, uniform: Tensor) -> Tensor:
    """The usual way: whole matrices, and a sort where something is cut."""
    weights = (logits / params.temperature).softmax(-1)
    weights = weights.masked_fill(weights < params.min_p * weights.amax(-1, keepdim=True), 0.0)
    if params.top_k or params.top_p < 1.0:
        weights, order = weights.sort(stable=True, dim=-1, descending=True)
        if params.top_k:
            weights[:, params.top_k :] = 0.0
        before = weights.cumsum(-1) - weights
        weights = weights.masked_fill(before >= params.top_p * weights.sum(-1, keepdim=True), 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    tokens = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True)
    if params.top_k or params.top_p < 1.0:
        tokens = order.gather(1, tokens.clamp(max=logits.shape[1] - 1))
    return tokens.squeeze(1)


def ms_of(call: Callable[[], object], num_rows: int) -> float:
    """Best milliseconds of one row."""
    return best_and_median(call, 0.25)[0] / num_rows * 1e3


def floor_of(logits: Tensor) -> dict[str, float]:
    row, out = logits[0], torch.empty(logits.shape[1])
    parts = {
        "largest": ms_of(lambda: logits.numpy().max(1), len(logits)),
        "again": ms_of(lambda: row.numpy().max(), 1),
        "exp": ms_of(lambda: torch.exp(row, out=out), 1),
    }
    return {**parts, "sum": sum(parts.values())}


def case(logits: Tensor, uniform: Tensor, settings: dict[str, Any], floor: float) -> dict[str, float]:
    """Milliseconds of a row, and their ratios."""
    params = SamplingParams(temperature=0.8, **settings)
    draws = np.empty(len(logits), dtype=DRAW)
    for field in DRAW.names or ():
        draws[field] = uniform.numpy() if field == "uniform" else getattr(params, field)
    rows = logits.numpy()
    asked = dict(zip(DRAW.names or (), draws[0].tolist(), strict=True))
    found = {"ms": ms_of(lambda: cpu_sampling.draw(logits, [params] * len(logits), uniform), len(logits))}
    for isa in (Isa.GENERIC, Isa.AVX2, Isa.AVX512):
        if isa in available_isas():
            found[isa.name] = ms_of(partial(draw_tokens, rows, draws, isa), len(logits))
    found["numpy ms"] = ms_of(lambda: reference_draw.draw(rows[0], **asked), 1)
    found["torch ms"] = ms_of(lambda: torch_draw(logits, params, uniform), len(logits))
    return {**found, "times the floor": found["ms"] / floor, "torch / kernel": found["torch ms"] / found["ms"]}


def processor(logits: Tensor, settings: dict[str, Any]) -> float:
    rows = [SamplingRow(SamplingParams(**settings), range(1000), logits.shape[1]) for _ in range(len(logits))]
    return ms_of(lambda: processors.apply(logits, rows), len(logits))


def rounded(report: Any) -> Any:
    if isinstance(report, dict):
        return {name: rounded(value) for name, value in report.items()}
    return round(report, 4) if isinstance(report, float) else report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49152)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(options.rows, generator=generator, dtype=torch.float64)
    report: dict[str, Any] = {"rows": options.rows, "vocab_size": options.vocab}
    for deviation in (3.0, 0.5):
        logits = torch.randn(options.rows, options.vocab, generator=generator) * deviation
        floor = floor_of(logits)
        cases = {name: case(logits, uniform, settings, floor["sum"]) for name, settings in CASES.items()}
        report[f"deviation {deviation}"] = {"floor ms": floor, **cases}
    report["processors, ms"] = {name: processor(logits, settings) for name, settings in PROCESSORS.items()}
    print(json.dumps(rounded(report), indent=1))


if __name__ == "__main__":
    main()
