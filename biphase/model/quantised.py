"""Matrices that stay in GGUF's blocks: kept packed in memory by the executors that multiply from blocks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from biphase.model.dequantise import dequantise


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
