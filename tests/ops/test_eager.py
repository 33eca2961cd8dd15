"""Planned attention agrees with its definition over ragged, poisoned, shuffled batches."""

from __future__ import annotations

import pytest
import torch

from biphase.ops import eager
from kernels import reference

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (3e-2, 3e-2)}


@pytest.mark.parametrize("dtype", list(TOLERANCES))
@pytest.mark.parametrize(("window", "cap"), [(None, 0.0), (5, 0.0), (None, 4.0), (7, 4.0)])
def test_planned_attention_equals_the_reference(
    dtype: torch.dtype, window: int | None, cap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eager, "_GROUP_TOKENS", 64)  # several groups of decodes
    block_size, num_kv_heads, group, head_dim, num_blocks = 4, 2, 3, 16, 80
    generator = torch.Generator().manual_seed(0)
    seq_lens = [1, 40, 3, 17, 17, 39, 2, 12, 30]
    query_lens = [1, 1, 1, 5, 1, 1, 2, 12, 9]
    kv_cache = torch.full((num_blocks, 2, 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=dtype)
    order = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(seq_lens), 12), -7, dtype=torch.int32)
    for i, length in enumerate(seq_lens):
        own = [order.pop() for _ in range(-(-length // block_size))]
        tables[i, : len(own)] = torch.tensor(own)
        slots = torch.tensor([own[t // block_size] * block_size + t % block_size for t in range(length)])
        k, v = (torch.randn(length, num_kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
        reference.store_kv(k, v, kv_cache, 1, slots)
    before = kv_cache.clone()
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    q = torch.randn(int(starts[-1]), num_kv_heads * group, head_dim, generator=generator).to(dtype)
    attention = eager.PagedAttention(starts, lengths, tables, block_size, torch.device("cpu"))
    out = attention(q, kv_cache, 1, 0.3, window, cap)
    expected = reference.paged_attention(q, kv_cache, 1, starts, lengths, tables, 0.3, window, cap)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(out, expected, rtol=rtol, atol=atol)
    assert torch.equal(kv_cache.nan_to_num(9.0), before.nan_to_num(9.0))
