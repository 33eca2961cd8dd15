"""Paged prefill and decode attention against the reference, over what goes wrong in paging."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels import reference
from kernels.reference_fp8 import FP8
from kernels.triton_ops.decode import decode_splits, paged_decode_attention
from kernels.triton_ops.prefill import paged_prefill_attention
from tests.kernels.triton_cases import DOT_DTYPES, Paged, near, spread

# (heads, KV heads), head_dim, block_size: grouped, one to one, an odd group over all; an odd head_dim; odd blocks.
SHAPES = [((4, 2), 16, 16), ((2, 2), 32, 1), ((7, 1), 16, 4), ((6, 2), 24, 16), ((2, 1), 64, 32), ((4, 2), 16, 5)]
MASKS = [(None, 0.0), (9, 0.0), (1, 0.0), (None, 3.0), (70, 3.0)]


def paged(
    shape: tuple[tuple[int, int], int, int],
    dtype: torch.dtype,
    lens: list[int],
    queries: list[int],
    kv_dtype: torch.dtype | None = None,
) -> Paged:
    (num_heads, num_kv_heads), head_dim, block_size = shape
    return Paged(
        lens,
        queries,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("shape", "mask"), [*((s, MASKS[0]) for s in SHAPES), *((SHAPES[0], m) for m in MASKS[1:])])
def test_prefill(dtype: torch.dtype, shape: Any, mask: tuple[int | None, float]) -> None:
    batch = paged(shape, dtype, [1, 130, 20, 70, 5], [1, 40, 0, 70, 3])
    out = paged_prefill_attention(*batch.arguments(), 0.3, *mask)
    near(out, reference.paged_attention(*batch.arguments(), 0.3, *mask), dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("shape", "mask"), [*((s, MASKS[0]) for s in SHAPES), *((SHAPES[0], m) for m in MASKS[1:])])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode(dtype: torch.dtype, shape: Any, mask: tuple[int | None, float], num_splits: int) -> None:
    batch = paged(shape, dtype, [1, 130, 64, 200, 17], [1, 1, 1, 1, 1])
    out = paged_decode_attention(*batch.arguments(), 0.3, *mask, num_splits=num_splits)
    near(out, reference.paged_attention(*batch.arguments(), 0.3, *mask), dtype)


def test_each_leaves_the_other_s_sequences_alone_so_that_together_they_do_a_mixed_batch() -> None:
    batch = paged(SHAPES[0], torch.float32, [9, 140, 33, 2, 50], [1, 7, 1, 0, 30])
    out = torch.full_like(batch.q, 7.0)
    paged_decode_attention(*batch.arguments(), 0.3, out=out, num_splits=3)
    decodes = torch.tensor([0, 8])
    rest = [row for row in range(batch.q.shape[0]) if row not in decodes.tolist()]
    assert bool((out[rest] == 7.0).all())
    paged_prefill_attention(*batch.arguments(), 0.3, out=out, min_queries=2)
    near(out, reference.paged_attention(*batch.arguments(), 0.3), torch.float32)


def test_padding_of_a_recorded_batch_gives_zeros_and_reads_nothing() -> None:
    batch = paged(SHAPES[0], torch.float32, [40, 3], [1, 1])
    batch.seq_lens[1] = 0
    batch.block_tables[1] = 2**30
    for num_splits in (1, 4):
        out = paged_decode_attention(*batch.arguments(), 0.3, num_splits=num_splits)
        assert bool((out[1] == 0).all())


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("shape", "mask"), [(SHAPES[0], MASKS[0]), (SHAPES[3], MASKS[1]), (SHAPES[5], MASKS[3])])
def test_a_cache_in_fp8(dtype: torch.dtype, shape: Any, mask: tuple[int | None, float]) -> None:
    batch = paged(shape, dtype, [1, 130, 20, 70, 5], [1, 40, 0, 70, 3], FP8)
    out = paged_prefill_attention(*batch.arguments(), 0.3, *mask)
    near(out, reference.paged_attention(*batch.arguments(), 0.3, *mask), dtype)
    batch = paged(shape, dtype, [1, 130, 20], [1, 1, 1], FP8)
    for num_splits in (1, 3):
        out = paged_decode_attention(*batch.arguments(), 0.3, *mask, num_splits=num_splits)
        near(out, reference.paged_attention(*batch.arguments(), 0.3, *mask), dtype)


@pytest.mark.parametrize("length", [1, 12, 100])
def test_one_sequence(length: int) -> None:
    whole = paged(SHAPES[0], torch.float32, [length], [length])
    out = paged_prefill_attention(*whole.arguments(), 0.3)
    near(out, reference.paged_attention(*whole.arguments(), 0.3), torch.float32)
    last = paged(SHAPES[0], torch.float32, [length], [1])
    out = paged_decode_attention(*last.arguments(), 0.3)
    near(out, reference.paged_attention(*last.arguments(), 0.3), torch.float32)


def test_non_contiguous_queries_and_tables() -> None:
    for queries, attention in (([5, 60], paged_prefill_attention), ([1, 1], paged_decode_attention)):
        batch = paged(SHAPES[0], torch.float32, [40, 80], queries)
        expected = attention(*batch.arguments(), 0.3)
        tables = torch.full((2, batch.block_tables.shape[1] + 5), -1, dtype=torch.int32, device=batch.q.device)
        tables[:, :-5] = batch.block_tables
        q, cache, layer, starts, lens, _ = batch.arguments()
        assert torch.equal(attention(spread(q), cache, layer, starts, lens, tables[:, :-5], 0.3), expected)


def test_attention_changes_none_of_its_inputs() -> None:
    batch = paged(SHAPES[0], torch.float32, [40, 80], [1, 7])
    before = [x.clone() for x in batch.arguments() if isinstance(x, torch.Tensor)]
    paged_prefill_attention(*batch.arguments(), 0.3)
    paged_decode_attention(*batch.arguments(), 0.3)
    after = [x for x in batch.arguments() if isinstance(x, torch.Tensor)]
    for a, b in zip(before, after, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_splits_fill_the_device_and_no_more() -> None:
    assert decode_splits(1, 8, 131072, 132) == 64  # bounded
    assert decode_splits(1, 8, 2048, 132) == 16  # two tiles at least
    assert decode_splits(32, 8, 131072, 132) == 4
    assert decode_splits(512, 8, 131072, 132) == 1
    assert decode_splits(1, 1, 16, 132) == 1
