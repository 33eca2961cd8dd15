"""Attention of sequences with one query token over the paged cache, their keys split over the device.

Owns decode. One program takes one share of a sequence's keys for all heads that share a KV head; a second, small
kernel joins the shares (Flash-Decoding, https://pytorch.org/blog/flash-decoding/). How many shares there are follows
from shapes alone, never from lengths, so that a launch can be recorded in a CUDA graph.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_fp8 import FP8 as FP8_DTYPE
from kernels.triton_ops.cache_layer import cache_layer, padded
from kernels.triton_ops.prefill import attend

_TILE = 64
# Programs that a multiprocessor should have, and shares of one sequence at most.
_PROGRAMS_PER_SM = 6
_MAX_SPLITS = 64


@triton.jit
def decode_kernel(
    q, cache, exponents, out, partial, partial_lse, tables, query_start_loc, seq_lens, scale, softcap,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_kv, stride_head, stride_slot, stride_table,
    NUM_HEADS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start_loc + seq).to(tl.int64)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + seq)
    first_key = 0
    if WINDOW:
        first_key = tl.maximum(seq_len - WINDOW, 0)
    first_tile = first_key // TILE
    num_tiles = (seq_len + TILE - 1) // TILE - first_tile
    share = (num_tiles + SPLITS - 1) // SPLITS
    start = (first_tile + split * share) * TILE
    end = tl.minimum(start + share * TILE, seq_len)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    head = kv_head * GROUP + row
    used = (row < GROUP)[:, None] & (dim < DIM)[None, :]
    queries = tl.load(q + token * stride_q_token + (head * stride_q_head)[:, None] + dim[None, :], mask=used, other=0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    keys = cache + kv_head.to(tl.int64) * stride_head
    key_exponents = exponents + kv_head.to(tl.int64) * stride_head
    table = tables + seq.to(tl.int64) * stride_table
    # The window's first tile and the sequence's last one are partly hidden; masking all costs nothing that shows, since
    # the keys' bytes set the pace.
    m, total, acc = attend(
        queries, m, total, acc, start, end, first_key, seq_len, tl.full((ROWS,), 0, tl.int32) + seq_len - 1,
        keys, keys + stride_kv, key_exponents, key_exponents + stride_kv, table, scale, softcap,
        stride_block, stride_slot,
        True, 0, SOFTCAP, FP8, BLOCK_SIZE, DIM, DIM_PAD, TILE,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)
    result = acc / divisor[:, None]
    if SPLITS == 1:
        to = out + token * stride_out_token + (head * stride_out_head)[:, None] + dim[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=used)
    else:
        place = (seq.to(tl.int64) * NUM_HEADS + head) * SPLITS + split
        # An empty share has m = -inf and so no weight; what it would say is not read.
        tl.store(partial_lse + place, m + tl.log2(divisor), mask=row < GROUP)
        if start < end:
            tl.store(partial + place[:, None] * DIM + dim[None, :], result, mask=used)


@triton.jit
def join_kernel(
    partial, partial_lse, out, query_start_loc, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, SPLITS: tl.constexpr, SPLITS_PAD: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.load(query_start_loc + seq).to(tl.int64)
    if tl.load(query_start_loc + seq + 1) - token != 1:
        return
    split = tl.arange(0, SPLITS_PAD)
    dim = tl.arange(0, DIM_PAD)
    place = (seq.to(tl.int64) * NUM_HEADS + head) * SPLITS + split
    lse = tl.load(partial_lse + place, mask=split < SPLITS, other=float("-inf"))
    held = lse > float("-inf")
    largest = tl.max(lse, 0)
    weight = tl.where(held, tl.exp2(lse - tl.where(largest == float("-inf"), 0.0, largest)), 0.0)
    parts = tl.load(partial + place[:, None] * DIM + dim[None, :], mask=held[:, None] & (dim < DIM)[None, :], other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(parts * weight[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out + token * stride_out_token + head * stride_out_head + dim,
        result.to(out.dtype.element_ty), mask=dim < DIM,
    )  # fmt: skip


def decode_splits(num_seqs: int, num_kv_heads: int, max_keys: int, num_sms: int) -> int:
    """Shares for each sequence: enough programs for the device, at least two tiles for each at full length."""
    wanted = -(-num_sms * _PROGRAMS_PER_SM // (num_seqs * num_kv_heads))
    return max(1, min(wanted, max_keys // (2 * _TILE), _MAX_SPLITS))


def paged_decode_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
    *,
    out: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Attention of the sequences that have exactly one query token. See `reference.paged_attention`.

    Args:
        q: [num_tokens, num_heads, head_dim], last dimension contiguous; num_heads is a multiple of num_kv_heads.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        query_start_loc: int32 [num_seqs + 1]; seq_lens: int32 [num_seqs]. A sequence of length 0 gives zeros.
        block_tables: int32 [num_seqs, max_blocks], last dimension contiguous; entries past a sequence are not read.
        window: a token sees this many tokens at most, itself included; None: all before it.
        out: where results go; a new tensor if None. Rows of other sequences stay as they are.
        num_splits: shares that each sequence's keys are cut into; None: as many as the device can use. The result
            depends on it by rounding.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    num_seqs, max_blocks = block_tables.shape
    assert num_heads % num_kv_heads == 0 and q.stride(2) == 1 and block_tables.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    if num_splits is None:
        max_keys = min(max_blocks * block_size, window or max_blocks * block_size)
        num_splits = decode_splits(num_seqs, num_kv_heads, max_keys, _num_sms(q.device))
    own, exponents, strides = cache_layer(kv_cache, layer)
    partial = torch.empty(
        (num_seqs, num_heads, num_splits, dim) if num_splits > 1 else (1,), dtype=torch.float32, device=q.device
    )
    lse = torch.empty(partial.shape[:3], dtype=torch.float32, device=q.device)
    group = num_heads // num_kv_heads
    # float32 tiles are twice as wide.
    tile = _TILE if padded(dim) * q.element_size() <= 512 else _TILE // 2
    decode_kernel[(num_seqs, num_kv_heads, num_splits)](
        q, own, exponents, out, partial, lse, block_tables, query_start_loc, seq_lens, scale, softcap,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *strides, block_tables.stride(0),
        NUM_HEADS=num_heads, WINDOW=window or 0, SOFTCAP=softcap > 0.0, FP8=kv_cache.dtype == FP8_DTYPE,
        GROUP=group, SPLITS=num_splits,
        BLOCK_SIZE=block_size, DIM=dim, DIM_PAD=padded(dim, 16), ROWS=padded(group, 16), TILE=tile,
        num_warps=4, num_stages=3 if padded(dim) * q.element_size() <= 256 else 2,
    )  # fmt: skip
    if num_splits > 1:
        join_kernel[(num_seqs, num_heads)](
            partial, lse, out, query_start_loc, out.stride(0), out.stride(1),
            NUM_HEADS=num_heads, SPLITS=num_splits, SPLITS_PAD=padded(num_splits), DIM=dim, DIM_PAD=padded(dim, 16),
        )  # fmt: skip
    return out


def _num_sms(device: torch.device) -> int:
    # Under the interpreter there is no device: enough to split something.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
