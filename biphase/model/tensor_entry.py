"""Where one tensor of a checkpoint lies, whatever the container. Stdlib only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`shape` is outermost first; `encoding` is F32, BF16, F16, or a GGUF block type such as Q4_1."""

    name: str
    path: Path
    shape: tuple[int, ...]
    encoding: str
    offset: int
    num_bytes: int
