"""The ops that GPU execution runs on: Triton kernels where there are some, torch where a library does best.

Owns the choice, op by op. What an op means is said in `kernels.reference`. Importing this needs triton; tensors must
lie on a CUDA device, or on CPU under Triton's interpreter (tests). Not yet run on a GPU.
"""

from __future__ import annotations

from torch import Tensor

from kernels.reference import embedding, linear, moe, rotary_table, softcap
from kernels.triton_ops.decode import paged_decode_attention
from kernels.triton_ops.prefill import paged_prefill_attention
from kernels.triton_ops.rows import fused_add_rms_norm, gelu_tanh_mul, rms_norm, silu_mul
from kernels.triton_ops.store import rope_store

__all__ = [
    "GATED_ACTIVATIONS",
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
