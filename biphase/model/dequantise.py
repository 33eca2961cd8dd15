"""GGUF's quantised blocks into floating point, in torch, a bounded number of rows at a time.

Owns the formats that CPU models are usually shipped in; others go through the `gguf` package's slower numpy code,
which also defines what is correct here (the tests compare bit for bit).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Elements decoded at once: the float32 scratch stays at 8 MB whatever the tensor's size.
_CHUNK_ELEMENTS = 2 * 1024 * 1024

_BLOCK_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()  # [num_blocks, 1]


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    # A block's first half sits in the low nibbles, its second in the high ones.
    return torch.cat((packed & 15, packed >> 4), dim=1)  # [num_blocks, 32]


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).float().sub_(8).mul_(_half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 4:]).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


_DECODERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}


def dequantise(raw: torch.Tensor, encoding: str, num_columns: int, out: torch.Tensor) -> None:
    """Decodes rows of blocks into `out`.

    Args:
        raw: uint8 [num_rows, bytes per row].
        encoding: GGUF's name of the block type, for example "Q4_1".
        num_columns: elements in a row.
        out: [num_rows, num_columns] in any floating type; written.

    Raises:
        NotImplementedError: no decoder for this encoding.
    """
    rows = max(1, _CHUNK_ELEMENTS // num_columns)
    for start in range(0, raw.shape[0], rows):
        part = raw[start : start + rows]
        out[start : start + rows] = _decode(part, encoding).view(part.shape[0], num_columns)


def _decode(raw: torch.Tensor, encoding: str) -> torch.Tensor:
    if encoding in _DECODERS:
        return _DECODERS[encoding](raw.reshape(-1, _BLOCK_BYTES[encoding]))
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return torch.from_numpy(dequantize(raw.contiguous().numpy(), GGMLQuantizationType[encoding]))
