"""The ops that GPU execution runs on: Triton kernels where there are some, torch where a library does best.

Owns the choice, op by op. What an op means is said in `kernels.reference`. Importing this needs triton; tensors must
lie on a CUDA device, or on CPU under Triton's interpreter (tests). Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biphase.model.packed import AwqMatrix, GptqMatrix, PackedMatrix, ScaledMatrix
from kernels.reference import embedding, moe_of, rotary_table, softcap
from kernels.reference import linear as dense_linear
from kernels.triton_ops.decode import paged_decode_attention
from kernels.triton_ops.prefill import paged_prefill_attention
from kernels.triton_ops.quantised import awq_linear, fp8_linear, gptq_linear, int8_linear
from kernels.triton_ops.rows import fused_add_rms_norm, gelu_tanh_mul, rms_norm, silu_mul
from kernels.triton_ops.store import rope_store

__all__ = [
    "GATED_ACTIVATIONS",
    "Multiplied",
    "can_multiply",
    "embedding",
    "fused_add_rms_norm",
    "linear",
    "moe",
    "paged_attention",
    "rms_norm",
    "rope_store",
    "rotary_table",
    "softcap",
]

GATED_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


# A matrix that is multiplied with; several stand for one that has the rows of all.
Multiplied = Tensor | PackedMatrix | tuple[PackedMatrix, ...]


def can_multiply(weight: PackedMatrix) -> bool:
    """Whether a kernel multiplies from this matrix as it is; one that no kernel takes is decoded at load."""
    num_rows, num_columns = weight.shape
    if isinstance(weight, ScaledMatrix):
        return weight.block is None or weight.block[1] % 16 == 0
    per_word = 32 // weight.bits if isinstance(weight, GptqMatrix) else 8
    num_groups = weight.scales.shape[0]
    size = num_columns // num_groups
    in_groups = num_groups == 1 or (size * num_groups == num_columns and size >= 16 and size & (size - 1) == 0)
    return in_groups and num_rows % per_word == 0 and num_columns % per_word == 0


def linear(x: Tensor, weight: Multiplied, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, [num_rows, out_features] in x's dtype; packed weights are decoded on the way.

    Args:
        x: [num_rows, in_features], last dimension contiguous.
    """
    if isinstance(weight, Tensor):
        return dense_linear(x, weight, bias)
    if isinstance(weight, tuple):
        joint = torch.cat([linear(x, part) for part in weight], dim=-1)
        return joint if bias is None else joint + bias
    if isinstance(weight, ScaledMatrix):
        multiply = int8_linear if weight.values.dtype == torch.int8 else fp8_linear
        return multiply(x, weight.values, weight.scales, bias, block=weight.block)
    if isinstance(weight, AwqMatrix):
        return awq_linear(x, weight.qweight, weight.qzeros, weight.scales, bias)
    return gptq_linear(
        x,
        weight.qweight,
        weight.qzeros,
        weight.scales,
        bias,
        g_idx=weight.g_idx,
        zero_offset=weight.zero_offset,
        bits=weight.bits,
    )


def moe(
    x: Tensor,
    router: Tensor,
    gates: Sequence[Multiplied],
    ups: Sequence[Multiplied],
    downs: Sequence[Multiplied],
    top_k: int,
    norm_topk_prob: bool,
    activation: str = "silu",
) -> Tensor:
    """Mixture of gated MLPs; arguments as `reference.moe`, but that experts' matrices may be packed."""

    def expert(index: int, rows: Tensor) -> Tensor:
        gated = GATED_ACTIVATIONS[activation](linear(rows, gates[index]), linear(rows, ups[index]))
        return linear(gated, downs[index])

    return moe_of(x, router, expert, top_k, norm_topk_prob)


def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    layer: int,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    block_tables: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float = 0.0,
) -> Tensor:
    """Causal attention of a ragged batch; arguments as `reference.paged_attention`.

    Sequences with one query token have their keys split over the device, the others run as prompts. A batch with as
    many tokens as sequences is taken for decodes only: no sequence may then be without a query.
    """
    out = paged_decode_attention(q, kv_cache, layer, query_start_loc, seq_lens, block_tables, scale, window, softcap)
    if q.shape[0] == seq_lens.shape[0]:
        return out
    return paged_prefill_attention(
        q, kv_cache, layer, query_start_loc, seq_lens, block_tables, scale, window, softcap, out=out, min_queries=2
    )
