"""What the Triton tests share: the device, the tolerances, and paged batches over shuffled, poisoned blocks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from biphase.cache.tensors import kv_block_bytes, kv_view
from kernels import reference

# The interpreter where there is no GPU (tests/conftest.py). Its dot products of bfloat16 are wrong, so there they are
# checked in float32 and float16 only.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: (1e-5, 2e-5), torch.float16: (4e-3, 4e-3), torch.bfloat16: (2e-2, 2e-2)}
DTYPES = list(TOLERANCES)
DOT_DTYPES = DTYPES if DEVICE == "cuda" else [torch.float32, torch.float16]

gpu_only = pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")


def near(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(actual.float().cpu(), expected.float().cpu(), rtol=rtol, atol=atol)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(DEVICE)


def spread(x: Tensor) -> Tensor:
    """The same values, rows and heads apart, with NaN in between; the last dimension stays contiguous."""
    shape = [size + 1 for size in x.shape[:-1]] + [x.shape[-1] + 3]
    wide = torch.full(shape, float("nan"), dtype=x.dtype, device=x.device)
    part = wide[tuple(slice(0, size) for size in x.shape)]
    part.copy_(x)
    assert x.shape[0] == 1 or not part.is_contiguous()
    return part


def empty_cache(
    num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype, num_layers: int = 3
) -> Tensor:
    """A KV cache, all of it NaN."""
    shape = (num_layers, num_kv_heads, block_size, head_dim, dtype)
    raw = torch.full((num_blocks, kv_block_bytes(*shape)), 255, dtype=torch.uint8, device=DEVICE)
    return kv_view(raw, *shape)


class Paged:
    """A ragged batch whose K and V lie in one layer of a NaN-poisoned cache, at shuffled block ids."""

    layer = 1

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        blocks_of = [-(-n // block_size) for n in seq_lens]
        num_blocks = sum(blocks_of) + 5
        self.kv_cache = empty_cache(num_blocks, num_kv_heads, block_size, head_dim, kv_dtype or dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        # Entries past a sequence point nowhere.
        self.block_tables = torch.full((len(seq_lens), max(blocks_of) + 1), 2**30, dtype=torch.int32, device=DEVICE)
        self.slots: list[Tensor] = []
        for i, n in enumerate(seq_lens):
            own = [order.pop() for _ in range(blocks_of[i])]
            self.block_tables[i, : len(own)] = torch.tensor(own)
            slots = torch.tensor([own[t // block_size] * block_size + t % block_size for t in range(n)], device=DEVICE)
            self.slots.append(slots)
            k = draw(n, num_kv_heads, head_dim, dtype=dtype, seed=10 + i)
            v = draw(n, num_kv_heads, head_dim, dtype=dtype, seed=50 + i)
            reference.store_kv(k, v, self.kv_cache, self.layer, slots)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32, device=DEVICE)
        starts = torch.tensor([0, *query_lens]).cumsum(0)
        self.query_start_loc = starts.to(torch.int32).to(DEVICE)
        self.q = draw(int(starts[-1]), num_heads, head_dim, dtype=dtype, seed=1)

    def arguments(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:
        return self.q, self.kv_cache, self.layer, self.query_start_loc, self.seq_lens, self.block_tables
