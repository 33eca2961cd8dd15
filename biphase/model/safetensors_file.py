"""Reads the headers of the safetensors files of one folder: where each tensor lies. Stdlib only.

Owns the container format (8-byte length, JSON, raw data) and the shard index, and checks both against the files'
sizes, so that a missing or truncated shard is refused before any weight is read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from biphase.errors import ModelLoadError
from biphase.model.tensor_entry import TensorEntry

INDEX_NAME = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ModelLoadError: cannot be read, or holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds a JSON {type(value).__name__}; an object is needed.")
    return value


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files that make up the checkpoint in `folder`, sorted by name.

    Raises:
        ModelLoadError: there are none, or the index names one that is missing.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelLoadError(f"{index} has no weight_map that says which shard holds which tensor.")
        names = sorted({str(name) for name in weight_map.values()})
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            rest = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelLoadError(f"{folder} lacks the shard {missing[0]}{rest}, which {INDEX_NAME} names.")
        return tuple(folder / name for name in names)
    single = folder / "model.safetensors"
    files = (single,) if single.is_file() else tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        others = any(any(folder.glob(pattern)) for pattern in ("*.bin", "*.pth", "*.pt"))
        hint = " (PyTorch pickles are not read: convert them to safetensors)" if others else ""
        raise ModelLoadError(f"{folder} holds no *.safetensors weights{hint}.")
    return files


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The tensors in one file.

    Raises:
        ModelLoadError: cannot be read, is no safetensors file, or is shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise ModelLoadError(f"{path} is truncated or no safetensors file: its header does not fit in it.")
            header = json.loads(file.read(length))
        entries: dict[str, TensorEntry] = {}
        end = 0
        for name, fields in header.items():
            if name == "__metadata__":
                continue
            first, last = fields["data_offsets"]
            shape = tuple(int(dim) for dim in fields["shape"])
            entries[name] = TensorEntry(name, path, shape, str(fields["dtype"]), 8 + length + first, last - first)
            end = max(end, last)
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelLoadError(f"{path} has a damaged safetensors header: {error!r}") from error
    if 8 + length + end > size:
        raise ModelLoadError(f"{path} is truncated: its header promises {8 + length + end} bytes, the file has {size}.")
    return entries


def read_headers(folder: Path) -> dict[str, TensorEntry]:
    """The tensors of all shards in `folder`, by the checkpoint's names.

    Raises:
        ModelLoadError: as `weight_files` and `read_header`.
    """
    entries: dict[str, TensorEntry] = {}
    for path in weight_files(folder):
        entries.update(read_header(path))
    return entries
