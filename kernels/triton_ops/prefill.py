"""Ragged causal attention over the paged cache for sequences with several query tokens.

Owns prompts and their chunks; sequences with one query token can be left to `decode`, which splits their keys over
the whole device. A program holds the queries of all heads that share a KV head, so that each key is read once for
them; it walks over the keys with the online softmax of FlashAttention-2 (https://arxiv.org/abs/2307.08691).
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_fp8 import FP8 as FP8_DTYPE
from kernels.triton_ops.cache_layer import cache_layer, fp8_values, padded
from kernels.triton_ops.rows import tanh

LOG2E = 1.4426950408889634


@triton.jit
def attend(
    q, m, total, acc, key_start, key_end, first_key, last_key, query_at,
    keys, values, key_exponents, value_exponents, table, scale, softcap, stride_block, stride_slot,
    MASKED: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Folds the keys of tiles [key_start, key_end) into the running softmax of `q` [rows, DIM_PAD].

    Without MASKED all keys of the tiles are seen by all rows. Keys before first_key and from last_key on are not read.

    Returns:
        m (running maximum in base 2) and total, float32 [rows]; acc, float32 [rows, DIM_PAD].
    """
    dim = tl.arange(0, DIM_PAD)
    for start in range(key_start, key_end, TILE):
        key_at = start + tl.arange(0, TILE)
        if MASKED:
            # Slots outside hold anything, NaN included.
            held = (key_at >= first_key) & (key_at < last_key)
            block = tl.load(table + key_at // BLOCK_SIZE, mask=held, other=0).to(tl.int64)
            used = held[:, None] & (dim < DIM)[None, :]
        else:
            block = tl.load(table + key_at // BLOCK_SIZE).to(tl.int64)
            used = tl.broadcast_to((dim < DIM)[None, :], (TILE, DIM_PAD))
        place = (block * stride_block + key_at % BLOCK_SIZE * stride_slot)[:, None] + dim[None, :]
        if DIM == DIM_PAD and not MASKED:
            key = tl.load(keys + place)
            value = tl.load(values + place)
        else:
            key = tl.load(keys + place, mask=used, other=0)
            value = tl.load(values + place, mask=used, other=0)
        if FP8:
            row_at = block * stride_block + key_at % BLOCK_SIZE
            if MASKED:
                key_exponent = tl.load(key_exponents + row_at, mask=held, other=127)
                value_exponent = tl.load(value_exponents + row_at, mask=held, other=127)
            else:
                key_exponent = tl.load(key_exponents + row_at)
                value_exponent = tl.load(value_exponents + row_at)
            key = fp8_values(key, key_exponent[:, None])
            value = fp8_values(value, value_exponent[:, None])
        scores = tl.dot(q, tl.trans(key.to(q.dtype)), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * tanh(scores / softcap)
        scores *= 1.4426950408889634
        if MASKED:
            seen = held[None, :] & (key_at[None, :] <= query_at[:, None])
            if WINDOW:
                seen &= query_at[:, None] - key_at[None, :] < WINDOW
            scores = tl.where(seen, scores, float("-inf"))
        new_m = tl.maximum(m, tl.max(scores, 1))
        # A row that has seen no key yet has no maximum; it keeps its zeros.
        shift = tl.where(new_m == float("-inf"), 0.0, new_m)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(m - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), value.to(q.dtype), acc * decay[:, None], input_precision="ieee")
        m = new_m
    return m, total, acc


@triton.jit
def prefill_kernel(
    q, cache, exponents, out, tables, query_start_loc, seq_lens, scale, softcap, num_seqs,
    stride_q_token, stride_q_head, stride_out_token, stride_out_head,
    stride_block, stride_kv, stride_head, stride_slot, stride_table,
    MIN_QUERIES: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, FP8: tl.constexpr, GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, DIM_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    TOKENS: tl.constexpr = ROWS // GROUP
    # Late queries see the most keys: they begin first.
    part = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    # Sequence s has the parts from query_start_loc[s] // TOKENS + s on, more than it needs by one at most.
    low = tl.zeros((), tl.int32)
    high = low + num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TOKENS + middle <= part:
            low = middle
        else:
            high = middle
    begin = tl.load(query_start_loc + low)
    num_queries = tl.load(query_start_loc + low + 1) - begin
    first_query = (part - begin // TOKENS - low) * TOKENS
    if (first_query >= num_queries) | (num_queries < MIN_QUERIES):
        return
    seq_len = tl.load(seq_lens + low)
    first_at = seq_len - num_queries + first_query
    last_key = tl.minimum(first_at + TOKENS, seq_len)

    row = tl.arange(0, ROWS)
    dim = tl.arange(0, DIM_PAD)
    token = first_query + row // GROUP
    head = kv_head * GROUP + row % GROUP
    used = ((row < TOKENS * GROUP) & (token < num_queries))[:, None] & (dim < DIM)[None, :]
    query_at = first_at + row // GROUP
    place = (begin + token).to(tl.int64)
    queries = tl.load(q + (place * stride_q_token + head * stride_q_head)[:, None] + dim[None, :], mask=used, other=0.0)
    m = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    keys = cache + kv_head.to(tl.int64) * stride_head
    values = keys + stride_kv
    key_exponents = exponents + kv_head.to(tl.int64) * stride_head
    value_exponents = key_exponents + stride_kv
    table = tables + low.to(tl.int64) * stride_table
    first_key = 0
    plain_end = 0
    if WINDOW:
        first_key = tl.maximum(first_at - WINDOW + 1, 0)
        plain_end = first_key // TILE * TILE
    else:
        # Tiles that end where the first query may look.
        plain_end = (first_at + 1) // TILE * TILE
        m, total, acc = attend(
            queries, m, total, acc, 0, plain_end, 0, last_key, query_at,
            keys, values, key_exponents, value_exponents, table, scale, softcap, stride_block, stride_slot,
            False, WINDOW, SOFTCAP, FP8, BLOCK_SIZE, DIM, DIM_PAD, TILE,
        )  # fmt: skip
    m, total, acc = attend(
        queries, m, total, acc, plain_end, last_key, first_key, last_key, query_at,
        keys, values, key_exponents, value_exponents, table, scale, softcap, stride_block, stride_slot,
        True, WINDOW, SOFTCAP, FP8, BLOCK_SIZE, DIM, DIM_PAD, TILE,
    )  # fmt: skip
    # Rows beyond the last query saw keys of their own or none.
    result = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    to = out + (place * stride_out_token + head * stride_out_head)[:, None] + dim[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=used)


def prefill_tiles(head_dim: int, group: int, itemsize: int, fp8: bool) -> tuple[int, int, int, int]:
    """(query rows, keys in a tile, warps, stages) for a kernel whose tiles fit shared memory; reasoned, not tuned."""
    wide = padded(head_dim) * itemsize
    rows = padded(group, 128 if wide <= 256 else 64)
    if itemsize > 2:
        rows = padded(group, 32)
    tile = 64 if wide <= 256 else 32
    if fp8 and wide > 128:
        # Codes are made values in registers, in 32 bits on the way: half the tile over twice the warps, or they spill.
        return padded(group, 64 if itemsize <= 2 else 32), 32, 8, 2
    # Wide heads are spread over more warps, or their sums do not fit the registers.
    return rows, tile, 8 if rows >= 128 or wide > 256 else 4, 3 if wide <= 256 else 2


def paged_prefill_attention(
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
    min_queries: int = 1,
) -> Tensor:
    """Causal attention of a ragged batch; K and V of the batch must be stored already. See `reference.paged_attention`.

    Args:
        q: [num_tokens, num_heads, head_dim], last dimension contiguous; num_heads is a multiple of num_kv_heads.
        kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        query_start_loc: int32 [num_seqs + 1]; seq_lens: int32 [num_seqs].
        block_tables: int32 [num_seqs, max_blocks], last dimension contiguous; entries past a sequence are not read.
        window: a token sees this many tokens at most, itself included; None: all before it.
        out: where results go; a new tensor if None. Rows of sequences that are left alone stay as they are.
        min_queries: sequences with fewer query tokens are left alone.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype.
    """
    num_tokens, num_heads, dim = q.shape
    num_kv_heads, block_size = kv_cache.shape[3:5]
    num_seqs = seq_lens.shape[0]
    assert num_heads % num_kv_heads == 0 and q.stride(2) == 1 and block_tables.stride(1) == 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if num_tokens == 0:
        return out
    group = num_heads // num_kv_heads
    own, exponents, strides = cache_layer(kv_cache, layer)
    rows, tile, warps, stages = prefill_tiles(dim, group, q.element_size(), kv_cache.dtype == FP8_DTYPE)
    parts = num_tokens // (rows // group) + num_seqs
    prefill_kernel[(parts, num_kv_heads)](
        q, own, exponents, out, block_tables, query_start_loc, seq_lens, scale, softcap, num_seqs,
        q.stride(0), q.stride(1), out.stride(0), out.stride(1), *strides, block_tables.stride(0),
        MIN_QUERIES=min_queries, WINDOW=window or 0, SOFTCAP=softcap > 0.0, FP8=kv_cache.dtype == FP8_DTYPE,
        GROUP=group, BLOCK_SIZE=block_size, DIM=dim, DIM_PAD=padded(dim, 16), ROWS=rows, TILE=tile,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out
