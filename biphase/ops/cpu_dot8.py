"""Weights that are multiplied as small integers: which kernels take them, and how they are packed for those.

Activations are then quantised to int8 in groups of 32, so results are approximate: an activation is off by half a step,
1/254 of the largest of its group, at most. What that costs in logits is in tests/ops/test_cpu_dot8.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from biphase.model.quantised import ChannelMatrix, QuantisedMatrix, Weight
from kernels.cpu.library import PANEL, Dot8

_BLOCKS = {"Q4_0": Dot8.Q4, "Q4_1": Dot8.Q4, "Q8_0": Dot8.Q8}
# Gate and up columns lie side by side in a panel, this many of each.
_HALF_PANEL = PANEL // 2
_GROUP = 32
_LINE = 64


def dot8_of(parts: Sequence[Weight]) -> Dot8 | None:
    """How these parts of one matrix can be multiplied as integers; None where they cannot, or differ."""
    kinds = {_kind(part) for part in parts}
    return kinds.pop() if len(kinds) == 1 else None


def _kind(part: Weight) -> Dot8 | None:
    if isinstance(part, ChannelMatrix):
        return Dot8.INT8
    return _BLOCKS.get(part.encoding) if isinstance(part, QuantisedMatrix) else None


def quantised_row_bytes(num_columns: int) -> int:
    """Bytes of one quantised row of activations: an odd number of cache lines, so that rows do not share cache sets."""
    groups = -(-num_columns // _GROUP)
    return (-(-groups * (_GROUP + 3 * 4) // _LINE) | 1) * _LINE


def packed_bytes(lib: Any, parts: Sequence[Weight], kind: Dot8, gated: bool) -> int:
    """Bytes that `pack` writes."""
    rows = -(-parts[0].shape[0] // _HALF_PANEL) * PANEL if gated else sum(part.shape[0] for part in parts)
    return -(-rows // PANEL) * int(lib.bp_dot8_panel_bytes(kind, parts[0].shape[1]))


def pack(lib: Any, parts: Sequence[Weight], kind: Dot8, gated: bool, address: int) -> None:
    """Packs matrices with equal k one after another, or gate and up side by side, into zeroed memory."""
    column = 0
    for part in parts:
        n, k = part.shape
        run, step = (_HALF_PANEL, PANEL) if gated else (n, n)
        if isinstance(part, ChannelMatrix):
            source, scales, has_min = part.values.contiguous(), part.scales.contiguous(), 0
        else:
            assert isinstance(part, QuantisedMatrix)
            source, scales, has_min = part.blocks.contiguous(), None, int(part.encoding == "Q4_1")
        lib.bp_pack_dot8(
            source.data_ptr(),
            None if scales is None else scales.data_ptr(),
            kind,
            has_min,
            n,
            k,
            source.shape[1],
            address,
            column,
            run,
            step,
        )
        column += _HALF_PANEL if gated else n
