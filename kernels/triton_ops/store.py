"""Writes K and V into their slots, alone or with the norm and rotary embedding that come before it.

Owns the ops between a layer's QKV projection and its attention. The fused one is what the executor runs: one launch
where the separate ops are three to five.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.reference_fp8 import FP8 as FP8_DTYPE
from kernels.triton_ops.cache_layer import cache_layer, fp8_codes, fp8_exponents, padded

# Heads that one program handles.
_HEADS = 8


@triton.jit
def _largest(x):
    """The largest magnitude of each row, NaN where there is one: float32 [rows] of [rows, dim]."""
    # Of positive floats the bits are in the order of the values, and NaN's are the largest.
    bits = tl.max(tl.abs(x).to(tl.int32, bitcast=True), 1)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def store_kernel(
    k, v, cache, exponents, slots,
    stride_k_token, stride_k_head, stride_v_token, stride_v_head,
    stride_block, stride_kv, stride_head, stride_slot,
    NUM_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr, DIM_PAD: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    head = tl.arange(0, HEADS_PAD)[:, None]
    dim = tl.arange(0, DIM_PAD)[None, :]
    used = (head < NUM_HEADS) & (dim < DIM)
    run = slot // BLOCK_SIZE * stride_block + head * stride_head
    to = cache + run + slot % BLOCK_SIZE * stride_slot + dim
    key = tl.load(k + token * stride_k_token + head * stride_k_head + dim, mask=used, other=0.0)
    value = tl.load(v + token * stride_v_token + head * stride_v_head + dim, mask=used, other=0.0)
    if FP8:
        key = key.to(tl.float32)
        value = value.to(tl.float32)
        exponent_to = exponents + run + slot % BLOCK_SIZE
        key_exponent = fp8_exponents(_largest(key))[:, None]
        value_exponent = fp8_exponents(_largest(value))[:, None]
        tl.store(exponent_to, key_exponent.to(tl.uint8), mask=head < NUM_HEADS)
        tl.store(exponent_to + stride_kv, value_exponent.to(tl.uint8), mask=head < NUM_HEADS)
        tl.store(to, fp8_codes(key, key_exponent), mask=used)
        tl.store(to + stride_kv, fp8_codes(value, value_exponent), mask=used)
    else:
        tl.store(to, key.to(cache.dtype.element_ty), mask=used)
        tl.store(to + stride_kv, value.to(cache.dtype.element_ty), mask=used)


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Writes k and v into their slots of `layer`; see `reference.store_kv`.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim], last dimension contiguous.
        slot_mapping: int [num_tokens], block_id * block_size + offset; a negative slot is skipped.
    """
    assert k.stride(2) == 1 and v.stride(2) == 1, "the last dimension of k and v must be contiguous"
    num_tokens, num_heads, dim = k.shape
    own, exponents, strides = cache_layer(kv_cache, layer)
    if num_tokens:
        store_kernel[(num_tokens,)](
            k, v, own, exponents, slot_mapping, k.stride(0), k.stride(1), v.stride(0), v.stride(1), *strides,
            NUM_HEADS=num_heads, BLOCK_SIZE=kv_cache.shape[4], DIM=dim,
            HEADS_PAD=padded(num_heads), DIM_PAD=padded(dim), FP8=kv_cache.dtype == FP8_DTYPE,
        )  # fmt: skip


@triton.jit
def _normed(first, second, rest, weight, first_at, rest_at, half_used, rest_used, eps, offset, HALF, DIM):
    """RMS norm of heads that are given as two halves and a rest, each float32 [heads, part]."""
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(rest * rest, 1)
    factor = tl.rsqrt(squares / DIM + eps)[:, None]
    first *= factor * (tl.load(weight + first_at, mask=half_used, other=0.0) + offset)
    second *= factor * (tl.load(weight + first_at + HALF, mask=half_used, other=0.0) + offset)
    rest *= factor * (tl.load(weight + rest_at, mask=rest_used, other=0.0) + offset)
    return first, second, rest


@triton.jit
def rope_store_kernel(
    qkv, q_out, cache, exponents, slots, positions, cos, sin, q_norm, k_norm,
    eps, offset, stride_qkv, stride_q, stride_block, stride_kv, stride_head, stride_slot,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr,
    HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, HEADS: tl.constexpr, NORM: tl.constexpr,
    FP8: tl.constexpr,
):  # fmt: skip
    """One token, `HEADS` heads of one kind: first come the programs of q, then of k, then of v."""
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    q_tiles: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    k_tiles: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    is_q = tile < q_tiles
    is_v = tile >= q_tiles + k_tiles
    kind_tile = tl.where(is_q, tile, tl.where(is_v, tile - q_tiles - k_tiles, tile - q_tiles))
    head = kind_tile * HEADS + tl.arange(0, HEADS)[:, None]
    head_used = head < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS)
    before = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))

    first_at = tl.arange(0, HALF_PAD)[None, :]
    rest_at = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
    half_used = first_at < HALF
    rest_used = rest_at < DIM
    row = qkv + token * stride_qkv + (before + head) * DIM
    first = tl.load(row + first_at, mask=head_used & half_used, other=0.0)
    second = tl.load(row + first_at + HALF, mask=head_used & half_used, other=0.0)
    rest = tl.load(row + rest_at, mask=head_used & rest_used, other=0.0)
    kind = first.dtype
    if not is_v:
        if NORM:
            weight = q_norm if is_q else k_norm
            a, b, c = _normed(
                first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32),
                weight, first_at, rest_at, half_used, rest_used, eps, offset, HALF, DIM,
            )  # fmt: skip
            # Rounded between norm and rotation, as the separate ops do.
            first, second, rest = a.to(kind), b.to(kind), c.to(kind)
        position = tl.load(positions + token).to(tl.int64) * HALF
        turn = tl.load(cos + position + first_at, mask=half_used, other=1.0)
        side = tl.load(sin + position + first_at, mask=half_used, other=0.0)
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        first = (a * turn - b * side).to(kind)
        second = (b * turn + a * side).to(kind)
    if is_q:
        to = q_out + token * stride_q + head * DIM
        tl.store(to + first_at, first, mask=head_used & half_used)
        tl.store(to + first_at + HALF, second, mask=head_used & half_used)
        tl.store(to + rest_at, rest, mask=head_used & rest_used)
        return
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    run = slot // BLOCK_SIZE * stride_block + head * stride_head + tl.where(is_v, 1, 0) * stride_kv
    to_kv = cache + run + slot % BLOCK_SIZE * stride_slot
    if FP8:
        a = first.to(tl.float32)
        b = second.to(tl.float32)
        c = rest.to(tl.float32)
        exponent = fp8_exponents(_largest(a))
        exponent = tl.maximum(exponent, fp8_exponents(_largest(b)))
        exponent = tl.maximum(exponent, fp8_exponents(_largest(c)))[:, None]
        tl.store(exponents + run + slot % BLOCK_SIZE, exponent.to(tl.uint8), mask=head_used)
        tl.store(to_kv + first_at, fp8_codes(a, exponent), mask=head_used & half_used)
        tl.store(to_kv + first_at + HALF, fp8_codes(b, exponent), mask=head_used & half_used)
        tl.store(to_kv + rest_at, fp8_codes(c, exponent), mask=head_used & rest_used)
    else:
        stored = cache.dtype.element_ty
        tl.store(to_kv + first_at, first.to(stored), mask=head_used & half_used)
        tl.store(to_kv + first_at + HALF, second.to(stored), mask=head_used & half_used)
        tl.store(to_kv + rest_at, rest.to(stored), mask=head_used & rest_used)


def rope_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    kv_cache: Tensor,
    layer: int,
    slot_mapping: Tensor,
    num_heads: int,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
    weight_offset: float = 0.0,
) -> Tensor:
    """Norms (where the model has them) and rotates q and k, stores k and v. Equals rms_norm, rotary, store_kv.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q, k and v of all heads; rows may be apart.
        cos, sin: float32 [num_positions, rotary_dim / 2], contiguous; see `reference.rotary_table`.
        slot_mapping: int [num_tokens]; a negative slot is skipped.
        q_norm, k_norm: float32 [head_dim], both or none.

    Returns:
        q, [num_tokens, num_heads, head_dim].
    """
    num_tokens = qkv.shape[0]
    num_kv_heads, block_size, dim = kv_cache.shape[3:]
    half = cos.shape[1]
    assert qkv.shape[1] == (num_heads + 2 * num_kv_heads) * dim and qkv.stride(1) == 1
    assert (q_norm is None) == (k_norm is None) and cos.is_contiguous() and sin.is_contiguous()
    q = torch.empty(num_tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    own, exponents, strides = cache_layer(kv_cache, layer)
    heads = min(_HEADS, padded(num_kv_heads))
    tiles = -(-num_heads // heads) + 2 * -(-num_kv_heads // heads)
    if num_tokens:
        rope_store_kernel[(num_tokens, tiles)](
            qkv, q, own, exponents, slot_mapping, positions, cos, sin, q_norm, k_norm,
            eps, weight_offset, qkv.stride(0), q.stride(0), *strides,
            NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, BLOCK_SIZE=block_size, DIM=dim,
            HALF=half, HALF_PAD=padded(half), REST_PAD=padded(max(dim - 2 * half, 1)), HEADS=heads,
            NORM=q_norm is not None, FP8=kv_cache.dtype == FP8_DTYPE, num_warps=2,
        )  # fmt: skip
    return q


@triton.jit
def rotary_kernel(
    x, out, positions, cos, sin, stride_x_token, stride_x_head, stride_out_token, stride_out_head,
    NUM_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    head_used = head < NUM_HEADS
    first_at = tl.arange(0, HALF_PAD)[None, :]
    half_used = first_at < HALF
    position = tl.load(positions + token).to(tl.int64) * HALF
    turn = tl.load(cos + position + first_at, mask=half_used, other=1.0)
    side = tl.load(sin + position + first_at, mask=half_used, other=0.0)
    row = x + token * stride_x_token + head * stride_x_head
    to = out + token * stride_out_token + head * stride_out_head
    used = head_used & half_used
    a = tl.load(row + first_at, mask=used, other=0.0).to(tl.float32)
    b = tl.load(row + first_at + HALF, mask=used, other=0.0).to(tl.float32)
    tl.store(to + first_at, (a * turn - b * side).to(out.dtype.element_ty), mask=used)
    tl.store(to + first_at + HALF, (b * turn + a * side).to(out.dtype.element_ty), mask=used)
    if 2 * HALF < DIM:
        rest_at = 2 * HALF + tl.arange(0, REST_PAD)[None, :]
        used = head_used & (rest_at < DIM)
        tl.store(to + rest_at, tl.load(row + rest_at, mask=used), mask=used)


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [num_tokens, num_heads, head_dim] by its tokens' positions; see `reference.rotary`.

    Args:
        x: last dimension contiguous.
        positions: int [num_tokens]; cos, sin: float32 [num_positions, rotary_dim / 2], contiguous.
    """
    assert x.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    num_tokens, num_heads, dim = x.shape
    half = cos.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    heads = min(_HEADS, padded(num_heads))
    if num_tokens:
        rotary_kernel[(num_tokens, -(-num_heads // heads))](
            x, out, positions, cos, sin, x.stride(0), x.stride(1), out.stride(0), out.stride(1),
            NUM_HEADS=num_heads, DIM=dim, HALF=half,
            HEADS=heads, HALF_PAD=padded(half), REST_PAD=padded(max(dim - 2 * half, 1)), num_warps=2,
        )  # fmt: skip
    return out
