"""Matrix products with packed weights: int8 and fp8 with scales of rows or blocks; AWQ's and GPTQ's groups.

Owns reading the packed bytes once and unpacking them on the way into the tensor cores; activations stay in 16 bits.
What a packed weight means is defined by `kernels.reference_quantised`. Sums over shares of k are added in a fixed
order: the same shapes give the same bits.
"""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.cache_layer import padded

INT8, FP8, AWQ, GPTQ = 0, 1, 2, 3
_COLUMNS, _K = 64, 64


@triton.jit
def matmul_kernel(
    x, weight, scales, zeros, g_idx, bias, out, m, n, k, k_share,
    stride_x, stride_out_split, stride_out,
    FORMAT: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr, PER_WORD: tl.constexpr,
    HAS_G_IDX: tl.constexpr, ZERO_OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """out[split, rows, columns] = x[rows, share of k] @ weight[columns, share of k].T, with scales applied."""
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(2)
    row_used = row < m
    column_used = column < n
    wide_column = column.to(tl.int64)
    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    kind = x.dtype.element_ty
    for start in range(split * k_share, tl.minimum((split + 1) * k_share, k), K):
        at = start + tl.arange(0, K)
        k_used = at < k
        rows = tl.load(
            x + row.to(tl.int64)[:, None] * stride_x + at[None, :], mask=row_used[:, None] & k_used[None, :], other=0.0
        )
        if FORMAT == 0 or FORMAT == 1:
            # [n, k], a column's bytes side by side.
            raw = tl.load(
                weight + wide_column[None, :] * k + at[:, None], mask=k_used[:, None] & column_used[None, :], other=0
            )
            if FORMAT == 0:
                tile = raw.to(kind)
            else:
                # e4m3 bits moved into float16's places are the value / 256, subnormals included; the 256 is in the
                # scale. So it runs on chips without fp8.
                bits = raw.to(tl.int16)
                bits = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
                tile = bits.to(tl.float16, bitcast=True).to(kind)
        else:
            # Words are read once and spread over the values that each holds.
            bits: tl.constexpr = 32 // PER_WORD
            highest: tl.constexpr = (1 << bits) - 1
            words: tl.constexpr = COLUMNS // PER_WORD
            word = tl.program_id(0) * words + tl.arange(0, words)
            word_used = word < n // PER_WORD
            if FORMAT == 2:
                # [k, n / 8]; columns 0 to 7 lie in nibbles 0, 4, 1, 5, 2, 6, 3, 7.
                zero_shift = (column % 2 * 4 + column % 8 // 2) * 4
                raw = tl.load(
                    weight + at.to(tl.int64)[:, None] * (n // 8) + word[None, :],
                    mask=k_used[:, None] & word_used[None, :], other=0,
                )  # fmt: skip
                raw = tl.reshape(tl.broadcast_to(raw[:, :, None], (K, COLUMNS // 8, 8)), (K, COLUMNS))
                values = (raw >> zero_shift[None, :]) & 15
            else:
                # [k / PER_WORD, n]; values of k in one word, the first lowest.
                zero_shift = column % PER_WORD * bits
                k_word = start // PER_WORD + tl.arange(0, K // PER_WORD)
                raw = tl.load(
                    weight + k_word.to(tl.int64)[:, None] * n + wide_column[None, :],
                    mask=(k_word < k // PER_WORD)[:, None] & column_used[None, :], other=0,
                )  # fmt: skip
                raw = tl.reshape(tl.broadcast_to(raw[:, None, :], (K // PER_WORD, PER_WORD, COLUMNS)), (K, COLUMNS))
                values = (raw >> (at % PER_WORD * bits)[:, None]) & highest
            if HAS_G_IDX:
                place = tl.load(g_idx + at, mask=k_used, other=0)[:, None]
                zero = tl.load(
                    zeros + place * (n // PER_WORD) + word[None, :], mask=k_used[:, None] & word_used[None, :], other=0
                )
                zero = tl.reshape(tl.broadcast_to(zero[:, :, None], (K, words, PER_WORD)), (K, COLUMNS))
                scale = tl.load(
                    scales + place * n + column[None, :], mask=k_used[:, None] & column_used[None, :], other=0.0
                )
            else:
                # A tile of k lies in one group.
                place = start // GROUP
                zero = tl.load(zeros + place * (n // PER_WORD) + word, mask=word_used, other=0)
                zero = tl.reshape(tl.broadcast_to(zero[:, None], (words, PER_WORD)), (COLUMNS,))[None, :]
                scale = tl.load(scales + place * n + column, mask=column_used, other=0.0)[None, :]
            zero = ((zero >> zero_shift[None, :]) & highest) + ZERO_OFFSET
            tile = ((values - zero).to(tl.float32) * scale.to(tl.float32)).to(kind)
        if BLOCK_ROWS:
            # A tile of k lies in one block of columns.
            place = column // BLOCK_ROWS * ((k + GROUP - 1) // GROUP) + start // GROUP
            factor = tl.load(scales + place, mask=column_used, other=0.0)
            if FORMAT == 1:
                factor *= 256.0
            acc += tl.dot(rows, tile, input_precision="ieee") * factor[None, :]
        else:
            acc = tl.dot(rows, tile, acc, input_precision="ieee")
    if (FORMAT == 0 or FORMAT == 1) and BLOCK_ROWS == 0:
        factor = tl.load(scales + column, mask=column_used, other=0.0)
        if FORMAT == 1:
            factor *= 256.0
        acc *= factor[None, :]
    if HAS_BIAS:  # noqa: SIM102 (only the outer one is known when compiling)
        if split == 0:
            acc += tl.load(bias + column, mask=column_used, other=0.0).to(tl.float32)[None, :]
    to = out + split * stride_out_split + row.to(tl.int64)[:, None] * stride_out + column[None, :]
    tl.store(to, acc.to(out.dtype.element_ty), mask=row_used[:, None] & column_used[None, :])


def _matmul(
    x: Tensor, weight: Tensor, scales: Tensor, zeros: Tensor | None, g_idx: Tensor | None, bias: Tensor | None,
    n: int, form: int, group: int, zero_offset: int, num_splits: int | None, block_rows: int = 0, per_word: int = 8,
) -> Tensor:  # fmt: skip
    assert x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous() and scales.is_contiguous()
    m, k = x.shape
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m == 0:
        return out
    rows = padded(min(m, 64), 16)
    warps = 4
    columns = _COLUMNS
    # A tile of k must not cross a group, and a word holds several values of it.
    tile_k = min(_K, group & -group) if group else _K
    tiles = -(-n // columns) * -(-m // rows)
    splits = num_splits or max(1, min(_num_sms(x.device) * 2 // tiles, k // (4 * tile_k), 16))
    k_share = -(-k // (splits * tile_k)) * tile_k
    splits = -(-k // k_share)
    target = out if splits == 1 else torch.empty(splits, m, n, dtype=torch.float32, device=x.device)
    matmul_kernel[(-(-n // columns), -(-m // rows), splits)](
        x, weight, scales, zeros, g_idx, bias, target, m, n, k, k_share,
        x.stride(0), target.stride(0) if splits > 1 else 0, target.stride(-2),
        FORMAT=form, GROUP=group or k, BLOCK_ROWS=block_rows, PER_WORD=per_word,
        HAS_G_IDX=g_idx is not None, ZERO_OFFSET=zero_offset, HAS_BIAS=bias is not None,
        ROWS=rows, COLUMNS=columns, K=tile_k, num_warps=warps, num_stages=3,
    )  # fmt: skip
    return out if splits == 1 else target.sum(0).to(x.dtype)


def int8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int] | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """x @ (weight * scale).T + bias, [num_rows, out_features] in x's dtype.

    Args:
        x: [num_rows, in_features], last dimension contiguous.
        weight: int8 [out_features, in_features], contiguous.
        scale: float32 [out_features]; or, with `block`, one for each block of [rows, columns], see
            `reference_quantised.dequantise_blocks`. Its columns are a multiple of 16.
        bias: [out_features].
        num_splits: shares that k is cut into; None: as many as the device can use.
    """
    assert weight.dtype == torch.int8
    return _scaled(x, weight, scale, bias, INT8, block, num_splits)


def fp8_linear(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    *,
    block: tuple[int, int] | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """x @ (weight * scale).T + bias with float8_e4m3fn weights; arguments as `int8_linear`.

    The two NaN codes of e4m3 are not told from numbers; checkpoints have none.
    """
    assert weight.dtype == torch.float8_e4m3fn
    return _scaled(x, weight.view(torch.uint8), scale, bias, FP8, block, num_splits)


def _scaled(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    form: int,
    block: tuple[int, int] | None,
    num_splits: int | None,
) -> Tensor:
    rows, columns = block or (0, 0)
    if columns % 16:
        raise ValueError(f"blocks of {columns} columns: a multiple of 16 is needed")
    return _matmul(x, weight, scale, None, None, bias, weight.shape[0], form, columns, 0, num_splits, rows)


def awq_linear(
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    num_splits: int | None = None,
) -> Tensor:
    """x @ dequantised weight + bias, [num_rows, out_features]. Layout: `reference_quantised.dequantise_awq`.

    Args:
        x: [num_rows, in_features], last dimension contiguous.
        qweight: int32 [in_features, out_features / 8]; qzeros: int32 [groups, out_features / 8];
        scales: [groups, out_features]. All contiguous; a group has a power of two of inputs, 16 at least.
    """
    group = _group_size(x.shape[1], scales.shape[0])
    return _matmul(x, qweight, scales, qzeros, None, bias, scales.shape[1], AWQ, group, 0, num_splits)


def gptq_linear(
    x: Tensor,
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    *,
    g_idx: Tensor | None = None,
    zero_offset: int = 1,
    bits: int = 4,
    num_splits: int | None = None,
) -> Tensor:
    """x @ dequantised weight + bias, [num_rows, out_features]. Layout: `reference_quantised.dequantise_gptq`.

    Args:
        x: [num_rows, in_features], last dimension contiguous.
        qweight: int32 [in_features * bits / 32, out_features]; qzeros: int32 [groups, out_features * bits / 32];
        scales: [groups, out_features]. All contiguous; a group has a power of two of inputs, 16 at least.
        g_idx: int32 [in_features], the group of each input where they were ordered by activation; None: in order.
        zero_offset: added to stored zeros: 1 in the usual format, 0 in "gptq_v2".
        bits: 4 or 8.
    """
    group = _group_size(x.shape[1], scales.shape[0])
    return _matmul(
        x, qweight, scales, qzeros, g_idx, bias, scales.shape[1], GPTQ, group, zero_offset, num_splits,
        per_word=32 // bits,
    )  # fmt: skip


def _group_size(k: int, num_groups: int) -> int:
    size = k // num_groups
    if num_groups > 1 and (size * num_groups != k or size < 16 or size & (size - 1)):
        raise ValueError(f"{num_groups} groups over {k} inputs: a group must have a power of two of them, 16 at least")
    # One group for all: tiles never cross it.
    return size if num_groups > 1 else 0


def _num_sms(device: torch.device) -> int:
    # Under the interpreter there is no device: enough to split something.
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
