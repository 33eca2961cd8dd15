"""KV blocks as torch tensors: the one place in this room that knows torch.

Owns the shape of a block's bytes. Owns no memory: the tensor is a view, and what is written through it is what a peer
reads.
"""

from __future__ import annotations

import torch

from biphase.cache.memory import BlockMemory


def kv_block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return num_layers * 2 * num_kv_heads * block_size * head_dim * dtype.itemsize


def kv_tensor(
    memory: BlockMemory, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """A CPU tensor over the block memory, without a copy.

    Returns:
        [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], keys at index 0 of the third axis, values at 1.

    Raises:
        ValueError: the memory's blocks are not of that size.
    """
    expected = kv_block_bytes(num_layers, num_kv_heads, block_size, head_dim, dtype)
    if memory.block_bytes != expected:
        raise ValueError(f"a block has {memory.block_bytes} bytes, this shape in {dtype} needs {expected}")
    flat = torch.frombuffer(memory.view, dtype=dtype)
    return flat.view(memory.num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
