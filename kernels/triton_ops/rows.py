"""Ops that walk over rows: RMS norm, with and without the residual sum before it, and gated activations."""
# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton_ops.cache_layer import padded

_COLUMNS = 1024


@triton.jit
def norm_kernel(
    x, residual, weight, out, total_out, eps, offset,
    stride_x, stride_x_inner, stride_residual, inner,
    DIM: tl.constexpr, DIM_PAD: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Row i of the output is row (i // inner, i % inner) of x."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, DIM_PAD)
    used = at < DIM
    value = tl.load(x + row // inner * stride_x + row % inner * stride_x_inner + at, mask=used, other=0.0)
    if ADD:
        other = tl.load(residual + row * stride_residual + at, mask=used, other=0.0)
        # Rounded before the norm, as the next layer will see it.
        value = (value.to(tl.float32) + other.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(total_out + row * DIM + at, value, mask=used)
    wide = value.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 0) / DIM + eps)
    scale = tl.load(weight + at, mask=used, other=0.0).to(tl.float32) + offset
    tl.store(out + row * DIM + at, (wide * factor * scale).to(out.dtype.element_ty), mask=used)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """RMS norm over the last dimension, computed in float32; see `reference.rms_norm`.

    Args:
        x: [num_rows, dim] or [num_tokens, num_heads, dim], last dimension contiguous.
        weight: [dim], float32 as a rule.
    """
    assert x.dim() in (2, 3) and x.stride(-1) == 1 and weight.is_contiguous()
    inner = 1 if x.dim() == 2 else x.shape[1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    dim = x.shape[-1]
    if x.numel():
        norm_kernel[(x.shape[0] * inner,)](
            x, x, weight, out, out, eps, weight_offset, x.stride(0), x.stride(-2), 0, inner,
            DIM=dim, DIM_PAD=padded(dim), ADD=False, num_warps=_warps(dim),
        )  # fmt: skip
    return out


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass; see `reference.fused_add_rms_norm`.

    Args:
        x, residual: [num_rows, dim] of one dtype, last dimension contiguous; rows may be apart.
    """
    assert x.dim() == 2 and x.stride(1) == residual.stride(1) == 1 and weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(out)
    dim = x.shape[1]
    if x.numel():
        norm_kernel[(x.shape[0],)](
            x, residual, weight, out, total, eps, weight_offset, x.stride(0), 0, residual.stride(0), 1,
            DIM=dim, DIM_PAD=padded(dim), ADD=True, num_warps=_warps(dim),
        )  # fmt: skip
    return out, total


def _warps(dim: int) -> int:
    return min(max(padded(dim) // 512, 1), 16)


@triton.jit
def tanh(x):
    """Of float32, without overflow."""
    e = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0.0, -size, size)


@triton.jit
def gated_kernel(gate, up, out, columns, stride_gate, stride_up, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    used = at < columns
    x = tl.load(gate + row * stride_gate + at, mask=used, other=0.0).to(tl.float32)
    y = tl.load(up + row * stride_up + at, mask=used, other=0.0).to(tl.float32)
    if GELU:
        activated = 0.5 * x * (1.0 + tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))
    else:
        e = tl.exp(-tl.abs(x))
        activated = x * tl.where(x < 0.0, e, 1.0) / (1.0 + e)
    tl.store(out + row * columns + at, (activated * y).to(out.dtype.element_ty), mask=used)


def _gated(gate: Tensor, up: Tensor, gelu: bool) -> Tensor:
    assert gate.shape == up.shape and gate.dim() == 2 and gate.stride(1) == up.stride(1) == 1
    num_rows, columns = gate.shape
    out = torch.empty(num_rows, columns, dtype=gate.dtype, device=gate.device)
    if out.numel():
        gated_kernel[(num_rows, -(-columns // _COLUMNS))](
            gate, up, out, columns, gate.stride(0), up.stride(0), GELU=gelu, COLUMNS=_COLUMNS
        )
    return out


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up. Both [num_rows, columns], last dimension contiguous: halves of one matrix will do."""
    return _gated(gate, up, False)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by its tanh approximation. Shapes as `silu_mul`."""
    return _gated(gate, up, True)
