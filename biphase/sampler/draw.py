"""Random draws that are a pure function of (seed, position): the same request repeats itself wherever it runs.

Owns the counter-based generator. Holds no state: preempted, moved and re-batched requests draw what they would have
drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # The finaliser of SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> Tensor:
    """One number in [0, 1) for each (seed, position): float64 [num_rows].

    Args:
        seeds: any integers; taken modulo 2**64.
        positions: index in the whole sequence of the token to draw.
    """
    seed = np.array([value & 0xFFFFFFFFFFFFFFFF for value in seeds], dtype=np.uint64)
    position = np.array(positions, dtype=np.uint64)
    # Mixed twice, so that neighbouring seeds do not give shifted copies of one stream.
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed + _GOLDEN) + (position + np.uint64(1)) * _GOLDEN)
    return torch.from_numpy((bits >> np.uint64(11)).astype(np.float64) * 2.0**-53)
