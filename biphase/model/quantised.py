"""Matrices that stay packed in memory, for executors that multiply from packed weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from biphase.model.dequantise import dequantise
from biphase.model.packed import PackedMatrix

# GGUF's block types that stay packed.
PACKED_ENCODINGS = frozenset({"Q4_0", "Q4_1", "Q8_0"})
_CHUNK_ROWS = 4096


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A weight matrix [num_rows, num_columns] as its file has it.

    `encoding` is GGUF's name of the block type. `blocks` is uint8 [num_rows, bytes per row], usually a view of the
    mapped file.
    """

    encoding: str
    blocks: Tensor
    num_columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.blocks.shape[0], self.num_columns

    @property
    def num_bytes(self) -> int:
        return self.blocks.numel()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[num_rows, num_columns], each value decoded in float32 and rounded to `dtype`."""
        out = torch.empty(self.shape, dtype=dtype)
        dequantise(self.blocks, self.encoding, self.num_columns, out)
        return out


@dataclass(frozen=True, slots=True)
class ChannelMatrix:
    """A weight matrix in int8 with a scale for each output: values [num_rows, num_columns] * scales [num_rows]."""

    values: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.numel() + 4 * self.scales.numel()

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[num_rows, num_columns] in `dtype`."""
        return (self.values.float() * self.scales.unsqueeze(1)).to(dtype)


def to_channels(matrix: Tensor) -> ChannelMatrix:
    """Rounds each row to 255 steps; its largest magnitude becomes 127, and a row of zeros has scale 0."""
    values = torch.empty(matrix.shape, dtype=torch.int8)
    scales = torch.empty(matrix.shape[0], dtype=torch.float32)
    # A bounded number of rows at a time: the float32 copy of a whole vocabulary would be large.
    for start in range(0, matrix.shape[0], _CHUNK_ROWS):
        wide = matrix[start : start + _CHUNK_ROWS].float()
        largest = wide.abs().amax(1)
        steps = torch.where(largest > 0, 127.0 / largest, torch.zeros_like(largest))
        scales[start : start + _CHUNK_ROWS] = largest / 127.0
        values[start : start + _CHUNK_ROWS] = (wide * steps.unsqueeze(1)).round_().to(torch.int8)
    return ChannelMatrix(values, scales)


Weight = Tensor | QuantisedMatrix | ChannelMatrix | PackedMatrix


def dense(weight: Weight, dtype: torch.dtype) -> Tensor:
    """The weight as a tensor; a packed one is decoded to `dtype`."""
    return weight if isinstance(weight, Tensor) else weight.dequantise(dtype)
