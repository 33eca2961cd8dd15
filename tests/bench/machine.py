"""What this machine can do at most, measured: the floors that other figures stand beside."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_READ_BYTES = 256 << 20
_ROWS, _DEPTH, _COLUMNS = 512, 1024, 4096


@dataclass(frozen=True)
class Machine:
    """`read_bytes_per_second` and `matmul_flop_per_second` (bfloat16) are torch's best on all cores of this process."""

    processor: str
    num_cores: int
    read_bytes_per_second: float
    matmul_flop_per_second: float

    def floor_seconds(self, num_bytes: float, flop: float) -> float:
        """What moving so many bytes, or computing so much, takes at least."""
        return max(num_bytes / self.read_bytes_per_second, flop / self.matmul_flop_per_second)


def best_and_median(call: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Seconds of one call, from as many as fit into `seconds`, five at least."""
    call()
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def measure(seconds: float = 0.5) -> Machine:
    """Takes about twice `seconds`. Leaves torch on one thread."""
    num_cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_cores)
    source = torch.zeros(_READ_BYTES // 4, dtype=torch.float32)
    read, _ = best_and_median(lambda: source.sum(), seconds)
    left, right = torch.randn(_ROWS, _DEPTH).bfloat16(), torch.randn(_COLUMNS, _DEPTH).bfloat16()
    matmul, _ = best_and_median(lambda: torch.nn.functional.linear(left, right), seconds)
    torch.set_num_threads(1)
    return Machine(_processor(), num_cores, _READ_BYTES / read, 2 * _ROWS * _DEPTH * _COLUMNS / matmul)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    fields = dict(line.split("\t: ", 1) for line in reversed(lines) if "\t: " in line)
    name = next((fields[key] for key in fields if key.strip() == "model name"), "unknown")
    where = {key.strip(): value for key, value in fields.items()}
    return f"{name}, family {where.get('cpu family', '?')} model {where.get('model', '?')}"
