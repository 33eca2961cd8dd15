"""KV blocks as torch tensors: the one place in this room that knows torch.

Owns the shape of a block's bytes. Owns no memory: the tensor is a view, and what is written through it is what a peer
reads. A block in fp8 holds an exponent for each row beside its codes; see docs/adr/0020-fp8-kv-cache.md.
"""

from __future__ import annotations

import torch

from biphase.cache.memory import BlockMemory

FP8 = torch.float8_e4m3fn


def kv_dtype_of(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """What `--kv-cache-dtype` means for a model that computes in `model_dtype`."""
    return FP8 if name.startswith("fp8") else model_dtype


def kv_dtype_name(dtype: torch.dtype) -> str:
    """How layouts and namespaces name the dtype of KV blocks: `bfloat16`, `fp8_e4m3`."""
    return "fp8_e4m3" if dtype == FP8 else str(dtype).removeprefix("torch.")


def _run_bytes(block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one head's keys or values in one layer of a block; in fp8, codes and then an exponent for each token."""
    return block_size * (head_dim + 1 if dtype == FP8 else head_dim * dtype.itemsize)


def kv_block_bytes(num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of one block: keys and values of `block_size` tokens in all layers."""
    return num_layers * 2 * num_kv_heads * _run_bytes(block_size, head_dim, dtype)


def raw_tensor(memory: BlockMemory) -> torch.Tensor:
    """The block memory as uint8 [num_blocks, block_bytes], without a copy."""
    return torch.frombuffer(memory.view, dtype=torch.uint8).view(memory.num_blocks, memory.block_bytes)


def kv_view(
    raw: torch.Tensor, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """Blocks' bytes as keys and values.

    Args:
        raw: uint8 [num_blocks, block_bytes], contiguous, on any device.

    Returns:
        [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], keys at index 0 of the third axis, values at 1;
        the same memory. In fp8 it is strided: exponents lie between the runs of codes.

    Raises:
        ValueError: the blocks are not of that size.
    """
    expected = kv_block_bytes(num_layers, num_kv_heads, block_size, head_dim, dtype)
    if raw.shape[1] != expected:
        raise ValueError(f"a block has {raw.shape[1]} bytes, this shape in {dtype} needs {expected}")
    shape = (raw.shape[0], num_layers, 2, num_kv_heads, block_size, head_dim)
    run = _run_bytes(block_size, head_dim, dtype) // dtype.itemsize
    strides = (expected // dtype.itemsize, 2 * num_kv_heads * run, num_kv_heads * run, run, head_dim, 1)
    return raw.view(dtype).as_strided(shape, strides)


def kv_tensor(
    memory: BlockMemory, num_layers: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> torch.Tensor:
    """A CPU tensor over the block memory, without a copy; see `kv_view`.

    Raises:
        ValueError: the memory's blocks are not of that size.
    """
    return kv_view(raw_tensor(memory), num_layers, num_kv_heads, block_size, head_dim, dtype)
