"""What a KV cache in fp8 holds, in plain torch: the definition of correct for the kernels that write and read it.

A row is one head's key or value of one token. It lies as float8 e4m3 codes and one exponent for all of them, a byte
as in OCP's MX formats (https://arxiv.org/abs/2310.10537): value = code * 2 ** (exponent - 127); 255 makes the whole row
NaN. The exponent is the least with which the row's largest magnitude stays within e4m3's 448; magnitudes past 57,344
are cut to it. A power of two rounds nothing: what is read back is exact in bfloat16, float16 and float32.

Within a block, a (layer, K or V, head) run is its tokens' codes, [block_size, head_dim] bytes, then their exponents,
[block_size] bytes. The cache is handed around as the tensor of codes, float8_e4m3fn [num_blocks, num_layers, 2,
num_kv_heads, block_size, head_dim], strided over the exponents, which `exponents_of` finds behind them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
EXPONENT_BIAS = 127
# Exponents of the smallest and the largest scale.
LEAST_EXPONENT, MOST_EXPONENT = EXPONENT_BIAS - 100, EXPONENT_BIAS + 7
NAN_EXPONENT = 255


def run_bytes(block_size: int, head_dim: int) -> int:
    """Bytes of one head's K or V in one layer of a block."""
    return block_size * (head_dim + 1)


def is_codes_view(cache: Tensor) -> bool:
    """Whether a cache is float8 and its strides leave room for the exponents, as described above."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = cache.shape
    run = run_bytes(block_size, head_dim)
    strides = (num_layers * 2 * num_kv_heads * run, 2 * num_kv_heads * run, num_kv_heads * run, run, head_dim, 1)
    return cache.dtype == FP8 and cache.stride() == strides


def runs_of(cache: Tensor) -> Tensor:
    """The bytes of a cache: uint8 [num_blocks, num_layers, 2, num_kv_heads, block_size * (head_dim + 1)]."""
    assert is_codes_view(cache), "not an fp8 cache with exponents"
    shape = (*cache.shape[:4], run_bytes(*cache.shape[4:]))
    return cache.view(torch.uint8).as_strided(shape, (*cache.stride()[:4], 1), cache.storage_offset())


def exponents_of(cache: Tensor) -> Tensor:
    """The exponents of a cache: uint8 [num_blocks, num_layers, 2, num_kv_heads, block_size], its own memory."""
    block_size, head_dim = cache.shape[4:]
    return runs_of(cache)[..., block_size * head_dim :]


def split_runs(runs: Tensor, block_size: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Codes float8 [..., block_size, head_dim] and exponents uint8 [..., block_size] of runs' bytes."""
    codes, exponents = runs.split([block_size * head_dim, block_size], dim=-1)  # type: ignore[no-untyped-call]
    return codes.unflatten(-1, (block_size, head_dim)).view(FP8), exponents


def quantise_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of the last dimension to (codes, exponents [...]); rounds to nearest, ties to even."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    # The least e with largest <= 1.75 * 2 ** (e + 8), from the float's bits: past a mantissa of 1.75 the sum carries.
    exponents = ((largest.view(torch.int32) + 0x1FFFFF) >> 23) - 8
    exponents = exponents.clamp(LEAST_EXPONENT, MOST_EXPONENT)
    # 2 ** (127 - exponent), exactly.
    steps = ((2 * EXPONENT_BIAS - exponents) << 23).view(torch.float32)
    scaled = (wide * steps.unsqueeze(-1)).clamp(-LARGEST, LARGEST)
    exponents = exponents.masked_fill(~wide.isfinite().all(-1), NAN_EXPONENT)
    return scaled.to(FP8), exponents.to(torch.uint8)


def dequantise_rows(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 [..., head_dim] of codes [..., head_dim] and exponents [...]."""
    scales = (exponents.int() << 23).view(torch.float32)  # 2 ** (exponent - 127)
    return codes.float() * scales.masked_fill(exponents == NAN_EXPONENT, float("nan")).unsqueeze(-1)
