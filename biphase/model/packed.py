"""Matrices of quantised safetensors checkpoints, as their files have them: 8-bit numbers with scales, AWQ, GPTQ.

Owns reading a matrix's parts and checking them against each other. On a GPU they stay packed and are decoded as they
are multiplied (`biphase.ops.gpu`); on CPU they are decoded at load.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from biphase.errors import ModelLoadError
from biphase.model.packing import Packing
from biphase.model.tensor_entry import TensorEntry
from biphase.ops.packed import dequantise_awq, dequantise_blocks, dequantise_channels, dequantise_gptq


class _Packed:
    """What the kinds share. Every field that is a tensor is a part of the checkpoint."""

    __slots__ = ()

    def _parts(self) -> dict[str, Tensor]:
        parts = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {name: part for name, part in parts.items() if isinstance(part, Tensor)}

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in self._parts().values())


@dataclass(frozen=True, slots=True)
class ScaledMatrix(_Packed):
    """values float8_e4m3fn or int8 [num_rows, num_columns], times float32 scales: [num_rows], or [blocks of rows,
    blocks of columns] where `block` says how many of each share one."""

    values: Tensor
    scales: Tensor
    block: tuple[int, int] | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """[num_rows, num_columns], decoded in float32 and rounded to `dtype`."""
        if self.block is None:
            return dequantise_channels(self.values, self.scales).to(dtype)
        return dequantise_blocks(self.values, self.scales, self.block).to(dtype)

    def to(self, device: torch.device) -> ScaledMatrix:
        return ScaledMatrix(self.values.to(device), self.scales.to(device), self.block)


@dataclass(frozen=True, slots=True)
class AwqMatrix(_Packed):
    """Four bits in groups, as AWQ's "gemm" version lays them out; see `kernels.reference_quantised.dequantise_awq`."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1], self.qweight.shape[0]

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return dequantise_awq(self.qweight, self.qzeros, self.scales).to(dtype)

    def to(self, device: torch.device) -> AwqMatrix:
        return AwqMatrix(self.qweight.to(device), self.qzeros.to(device), self.scales.to(device))


@dataclass(frozen=True, slots=True)
class GptqMatrix(_Packed):
    """Four or eight bits in groups, as GPTQ lays them out; see `kernels.reference_quantised.dequantise_gptq`.

    `g_idx` is None where groups lie in order.
    """

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor
    g_idx: Tensor | None
    bits: int
    zero_offset: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.scales.shape[1], self.qweight.shape[0] * (32 // self.bits)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        return dequantise_gptq(self.qweight, self.qzeros, self.scales, self.g_idx, self.zero_offset, bits=self.bits).to(
            dtype
        )

    def to(self, device: torch.device) -> GptqMatrix:
        g_idx = None if self.g_idx is None else self.g_idx.to(device)
        moved = self.qweight.to(device), self.qzeros.to(device), self.scales.to(device)
        return GptqMatrix(*moved, g_idx, self.bits, self.zero_offset)


PackedMatrix = ScaledMatrix | AwqMatrix | GptqMatrix

_SCALED = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
_KINDS = {"I32": torch.int32, "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, **_SCALED}


@dataclass(frozen=True, slots=True)
class PackedPlace:
    """A packed matrix in the checkpoint: its parts by their names after the matrix's."""

    packing: Packing
    entries: Mapping[str, TensorEntry]
    shape: tuple[int, ...]

    def read(self, bytes_of: Callable[[TensorEntry], Tensor]) -> PackedMatrix:
        """
        Args:
            bytes_of: an entry's bytes, uint8.

        Raises:
            ModelLoadError: parts do not fit each other.
        """
        parts = {
            name: bytes_of(entry).view(_KINDS[entry.encoding]).view(entry.shape) for name, entry in self.entries.items()
        }
        num_rows, num_columns = self.shape
        if self.packing.kind == "scaled":
            scales = _row_scales(parts[self.packing.scale].float(), self.packing.block, num_rows)
            return ScaledMatrix(parts["weight"], scales, self.packing.block)
        qweight, qzeros, scales = parts["qweight"], parts["qzeros"], parts["scales"]
        if self.packing.kind == "awq":
            return AwqMatrix(qweight, qzeros, scales)
        g_idx = parts.get("g_idx")
        if g_idx is not None:
            if int(g_idx.min()) < 0 or int(g_idx.max()) >= scales.shape[0]:
                raise ModelLoadError(
                    f"{self.entries['g_idx'].path}: {self.entries['g_idx'].name} names unknown groups."
                )
            in_order = torch.arange(num_columns) // -(-num_columns // scales.shape[0])
            g_idx = None if torch.equal(g_idx, in_order.int()) else g_idx
        return GptqMatrix(qweight, qzeros, scales, g_idx, self.packing.bits, self.packing.zero_offset)


def packed_place(
    stored: str, shape: tuple[int, ...], packing: Packing, entries: Mapping[str, TensorEntry]
) -> PackedPlace | None:
    """Where the parts of the matrix `stored` ("...weight") lie; None where it is not packed.

    Raises:
        ModelLoadError: a part is missing or of another shape or encoding than it must have.
    """
    stem, _, last = stored.rpartition(".")
    if last != "weight" or len(shape) != 2:
        return None
    if packing.kind == "scaled":
        entry = entries.get(stored)
        if entry is None or entry.encoding not in _SCALED:
            return None
    elif f"{stem}.qweight" not in entries:
        return None
    found: dict[str, TensorEntry] = {}
    for part, (encodings, shapes) in _parts_of(packing, shape, stem, entries).items():
        entry = entries.get(f"{stem}.{part}")
        if entry is None:
            if part == "g_idx":
                continue
            raise ModelLoadError(f"the checkpoint lacks {stem}.{part}, without which {stored} cannot be decoded.")
        if entry.encoding not in encodings or entry.shape not in shapes:
            raise ModelLoadError(
                f"{entry.path}: tensor {entry.name} is {entry.encoding} {list(entry.shape)}; its packing calls for "
                f"{' or '.join(encodings)} {' or '.join(str(list(s)) for s in shapes)}."
            )
        found[part] = entry
    return PackedPlace(packing, found, shape)


_Part = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]
_REAL = ("F16", "BF16", "F32")


def _parts_of(
    packing: Packing, shape: tuple[int, ...], stem: str, entries: Mapping[str, TensorEntry]
) -> dict[str, _Part]:
    """Part -> the encodings and shapes that it may have."""
    num_rows, num_columns = shape
    if packing.kind == "scaled":
        scales: tuple[tuple[int, ...], ...] = ((), (1,), (num_rows,), (num_rows, 1), (1, 1))
        if packing.block is not None:
            scales = ((-(-num_rows // packing.block[0]), -(-num_columns // packing.block[1])),)
        return {"weight": (tuple(_SCALED), (shape,)), packing.scale: (_REAL, scales)}
    per_word = 32 // packing.bits
    scales_entry = entries.get(f"{stem}.scales")
    # As many groups as there are scales; a group has equally many inputs but for the last.
    groups = scales_entry.shape[0] if scales_entry is not None and scales_entry.shape else 1
    words = (groups, -(-num_rows // per_word))
    common: dict[str, _Part] = {"scales": (_REAL, ((groups, num_rows),)), "qzeros": (("I32",), (words,))}
    if packing.kind == "awq":
        return common | {"qweight": (("I32",), ((num_columns, num_rows // per_word),))}
    return common | {
        "qweight": (("I32",), ((num_columns // per_word, num_rows),)),
        "g_idx": (("I32",), ((num_columns,),)),
    }


def _row_scales(scales: Tensor, block: tuple[int, int] | None, num_rows: int) -> Tensor:
    return scales if block is not None else scales.reshape(-1).expand(num_rows).contiguous()
