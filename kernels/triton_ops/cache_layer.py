"""One layer of the KV cache as the kernels take it: a base address and strides. Owns no memory."""

from __future__ import annotations

from torch import Tensor


def cache_layer(kv_cache: Tensor, layer: int) -> tuple[Tensor, tuple[int, int, int, int]]:
    """The layer's part of the cache, and its strides in elements: block, K to V, KV head, slot.

    Args:
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].

    Raises:
        ValueError: elements of a head do not lie side by side.
    """
    if kv_cache.stride(5) != 1:
        raise ValueError("the KV cache's last dimension must be contiguous")
    own = kv_cache[:, layer]  # [num_blocks, 2, num_kv_heads, block_size, head_dim]
    return own, (own.stride(0), own.stride(1), own.stride(2), own.stride(3))


def padded(size: int, least: int = 1) -> int:
    """The next power of two: extents of Triton's tiles are powers of two, what exceeds `size` is masked."""
    return max(least, 1 << (size - 1).bit_length())
