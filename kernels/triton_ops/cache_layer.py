"""One layer of the KV cache as the kernels take it: a base address and strides. Owns no memory.

A cache in fp8 comes as its bytes, and its exponents as a tensor of their own beside them; what they mean is defined in
`kernels.reference_fp8`. Codes are made and read by moving bits, so it runs on chips without fp8 too.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_fp8 import FP8, exponents_of


def cache_layer(kv_cache: Tensor, layer: int) -> tuple[Tensor, Tensor, tuple[int, int, int, int]]:
    """The layer's part of the cache, its exponents, and the strides of both in elements: block, K to V, KV head, slot.

    The exponents have a slot's stride of 1. Of a cache that is not in fp8 they are the cache again, and not looked at.

    Args:
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    Raises:
        ValueError: elements of a head do not lie side by side.
    """
    if kv_cache.stride(5) != 1:
        raise ValueError("the KV cache's last dimension must be contiguous")
    own = kv_cache[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    strides = own.stride(0), own.stride(1), own.stride(2), own.stride(3)
    if kv_cache.dtype != FP8:
        return own, own, strides
    return own.view(torch.uint8), exponents_of(kv_cache)[:, layer], strides


def padded(size: int, least: int = 1) -> int:
    """The next power of two: extents of Triton's tiles are powers of two, what exceeds `size` is masked."""
    return max(least, 1 << (size - 1).bit_length())


@triton.jit
def fp8_exponents(largest):
    """The exponents, int32, of rows whose largest magnitudes are given in float32; 255 where those are no numbers."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.minimum(tl.maximum(((bits + 0x1FFFFF) >> 23) - 8, 27), 134)
    return tl.where(bits >= 0x7F800000, 255, exponent)


@triton.jit
def fp8_codes(x, exponents):
    """Codes, uint8, of float32 values with those exponents, which broadcast."""
    step = ((254 - tl.minimum(exponents, 134)) << 23).to(tl.float32, bitcast=True)
    scaled = tl.minimum(tl.maximum(x * step, -448.0), 448.0)
    bits = scaled.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    size = bits & 0x7FFFFFFF
    # To nearest, ties to even. Below 2^-6 codes are whole multiples of 2^-9: added to 2^23, the rest falls off.
    rounded = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 960
    small = size.to(tl.float32, bitcast=True) * 512.0 + 8388608.0
    rounded = tl.where(size < 0x3C800000, small.to(tl.int32, bitcast=True) - 0x4B000000, rounded)
    return (sign | rounded).to(tl.uint8)


@triton.jit
def fp8_values(codes, exponents):
    """float32 values of codes, with exponents that broadcast."""
    wide = codes.to(tl.int32)
    # In float16's places a code is the value / 256, subnormals included.
    halves = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    scale = ((exponents.to(tl.int32) + 8) << 23).to(tl.float32, bitcast=True)
    return halves.to(tl.float32) * tl.where(exponents.to(tl.int32) == 255, float("nan"), scale)
