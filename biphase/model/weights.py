"""Reads a checkpoint's tensors, by canonical name, out of memory-mapped files.

Owns mapping the files, checking names and shapes before anything is read, and conversion to the wanted dtype. A
tensor already in that dtype stays a view of the mapping: its pages are shared by all workers of a machine. Knows the
containers' encodings, not their headers (`safetensors_file`, `gguf_file`).
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import torch

from biphase.errors import ModelLoadError
from biphase.model.dequantise import dequantise
from biphase.model.families.decoder import Family
from biphase.model.gguf_config import INTERLEAVED_ROPE, gguf_name
from biphase.model.packed import PackedPlace, packed_place
from biphase.model.packing import Packing
from biphase.model.quantised import PACKED_ENCODINGS, QuantisedMatrix, Weight, to_channels
from biphase.model.shapes import weight_shapes
from biphase.model.source import ModelSource
from biphase.model.spec import ModelSpec
from biphase.model.tensor_entry import TensorEntry

_PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class _Place:
    """A canonical weight in the checkpoint: a tensor, or one slice of it where experts are stacked."""

    entry: TensorEntry
    index: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape if self.index is None else self.entry.shape[1:]


def load_weights(
    source: ModelSource,
    spec: ModelSpec,
    family: Family,
    dtype: torch.dtype,
    device: torch.device,
    quantization: str = "none",
    keep_blocks: bool = False,
    packing: Packing | None = None,
    keep_packed: bool = False,
) -> dict[str, Weight]:
    """All weights of `spec`, by canonical name; norm weights in float32, the rest in `dtype`.

    Args:
        quantization: "gguf" leaves matrices in the blocks of their file where the CPU program multiplies from those;
            "int8" rounds them to int8, one scale for each output. Not a router, nor an embedding that only looks up.
        keep_blocks: leave them in blocks with "none" too, for an executor that decodes them as it goes.
        packing: how a quantised safetensors checkpoint packs its matrices.
        keep_packed: leave those as they are, but for routers and what is looked up in; else they are decoded to
            `dtype`, or from there rounded to int8.

    Raises:
        ModelLoadError: a file is truncated, a tensor is missing or of another shape or encoding than needed.
    """
    places = _find(source, spec, family, packing)
    maps: dict[Path, mmap.mmap] = {}
    interleaved = source.kind == "gguf" and source.gguf().metadata["general.architecture"] in INTERLEAVED_ROPE
    weights: dict[str, Weight] = {}
    for name, place in places.items():
        part = name.rsplit(".", 1)[-1]
        multiplies = len(place.shape) == 2 and part != "router" and (part != "embed" or spec.tie_word_embeddings)
        if isinstance(place, PackedPlace):
            packed = place.read(lambda entry: _bytes_of(entry, maps))
            if keep_packed and part not in ("router", "embed"):
                weights[name] = packed.to(device)
                continue
            weight = packed.dequantise(dtype).to(device)
            weights[name] = to_channels(weight) if multiplies and quantization == "int8" else weight
            continue
        num_heads = 0
        if interleaved and part in ("q", "q_bias"):
            num_heads = spec.num_heads
        elif interleaved and part in ("k", "k_bias"):
            num_heads = spec.num_kv_heads
        wanted = torch.float32 if part.endswith("norm") else dtype
        in_blocks = quantization == "gguf" or (keep_blocks and quantization == "none")
        if multiplies and in_blocks and place.entry.encoding in PACKED_ENCODINGS:
            weights[name] = QuantisedMatrix(place.entry.encoding, _rows(place, maps, num_heads), place.shape[1])
            continue
        weight = _read(place, maps, num_heads, wanted).to(device)
        weights[name] = to_channels(weight) if multiplies and quantization == "int8" else weight
    return weights


def _find(
    source: ModelSource, spec: ModelSpec, family: Family, packing: Packing | None
) -> dict[str, _Place | PackedPlace]:
    entries = source.tensors()
    places: dict[str, _Place | PackedPlace] = {}
    missing: list[str] = []
    for name, shape in weight_shapes(spec).items():
        stored, index = gguf_name(name) if source.kind == "gguf" else (family.name_of(name), None)
        packed = None if packing is None else packed_place(stored, shape, packing, entries)
        if packed is not None:
            places[name] = packed
            continue
        entry = entries.get(stored)
        if entry is None:
            missing.append(stored)
            continue
        place = _Place(entry, index)
        if place.shape != shape:
            raise ModelLoadError(
                f"{entry.path}: tensor {stored} has shape {list(entry.shape)}; the config calls for {list(shape)}."
            )
        places[name] = place
    if missing:
        rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelLoadError(f"{source.path} lacks the tensor {missing[0]}{rest}, which {spec.architecture} needs.")
    return places


def _rows(place: _Place, maps: dict[Path, mmap.mmap], num_heads: int) -> torch.Tensor:
    """The tensor's bytes as the file has them, uint8 [num_rows, bytes per row], heads' rows in half-split order."""
    entry, shape = place.entry, place.shape
    num_rows = shape[0] if len(shape) == 2 else 1
    raw = _bytes_of(entry, maps)
    if place.index is not None:
        raw = raw.view(entry.shape[0], -1)[place.index]
    raw = raw.view(num_rows, -1)
    if num_heads:
        raw = _undo_interleave(raw.view(num_heads, -1) if num_rows == 1 else raw, num_heads, entry)
    return raw


def _read(place: _Place, maps: dict[Path, mmap.mmap], num_heads: int, dtype: torch.dtype) -> torch.Tensor:
    entry, shape = place.entry, place.shape
    num_rows, num_columns = (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])
    raw = _rows(place, maps, num_heads)
    if entry.encoding in _PLAIN:
        plain = raw.reshape(-1).view(_PLAIN[entry.encoding]).view(shape)
        # Vectors are copied, so that a mapping whose matrices were all converted can go.
        return plain.to(dtype, copy=len(shape) == 1)
    out = torch.empty(num_rows, num_columns, dtype=dtype)
    try:
        dequantise(raw, entry.encoding, num_columns, out)
    except (KeyError, NotImplementedError) as error:
        raise ModelLoadError(
            f"{entry.path}: tensor {entry.name} is encoded as {entry.encoding}, which cannot be read."
        ) from error
    return out.view(shape)


def _undo_interleave(raw: torch.Tensor, num_heads: int, entry: TensorEntry) -> torch.Tensor:
    """Puts the rows of each head back from (x0, y0, x1, y1, ...) to (x0, x1, ..., y0, y1, ...).

    Rows are moved as bytes, so it works on packed blocks as well. A bias comes as one row per head.
    """
    if len(entry.shape) == 1:
        width = {"F32": 4, "F16": 2, "BF16": 2, "F64": 8}[entry.encoding]
        raw = raw.view(-1, width)
    return raw.view(num_heads, -1, 2, raw.shape[1]).transpose(1, 2).reshape(raw.shape)


def _bytes_of(entry: TensorEntry, maps: dict[Path, mmap.mmap]) -> torch.Tensor:
    mapping = maps.get(entry.path)
    if mapping is None:
        try:
            with entry.path.open("rb") as file:
                # Copy-on-write and never written: torch wants writable memory, the pages stay those of the file.
                mapping = maps[entry.path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise ModelLoadError(f"cannot map {entry.path}: {error.strerror or error}") from error
    return torch.frombuffer(mapping, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset)
