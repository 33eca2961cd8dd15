"""Every op in plain torch: the definition of correct for the fast kernels, and what runs where none of them does.

Owns clarity, not speed. No function changes its arguments but `store_kv`, which writes the KV cache. Sums and
softmaxes are taken in float32 whatever the inputs' dtype; results have the inputs' dtype. What lies in unused slots of
the KV cache, NaN included, never reaches a result.

The KV cache is [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]: index 2 holds K at 0 and V at 1. One of
float8_e4m3fn has an exponent for each row, as `reference_fp8` says; all others hold plain numbers.
A batch is ragged: sequence i owns rows [query_start_loc[i], query_start_loc[i + 1]) and they are the last of its
seq_lens[i] tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference_fp8 import FP8, dequantise_rows, exponents_of, quantise_rows


def embedding(token_ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """Rows of `weight` [vocab_size, hidden_size] for `token_ids` int [num_tokens], times `scale`."""
    rows = weight[token_ids.long()]
    return rows if scale == 1.0 else rows * scale


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`; x [..., in_features], weight [out_features, in_features]."""
    return F.linear(x, weight, bias)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension, computed in float32."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * (weight.float() + weight_offset)).to(x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns (rms_norm(x + residual), x + residual): the sum is the next residual."""
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset), total


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up."""
    return (F.silu(gate.float()) * up.float()).to(gate.dtype)


def gelu_tanh_mul(gate: Tensor, up: Tensor) -> Tensor:
    """gelu(gate) * up, gelu by its tanh approximation."""
    return (F.gelu(gate.float(), approximate="tanh") * up.float()).to(gate.dtype)


GATED_ACTIVATIONS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}


def rotary_frequencies(
    theta: float, rotary_dim: int, scaling: str = "none", params: Mapping[str, float] | None = None
) -> tuple[Tensor, float]:
    """Inverse frequencies float32 [rotary_dim / 2], and the factor that cos and sin are multiplied by.

    Scalings: "none"; "linear" (positions divided by factor); "llama3" (Llama 3.1: long waves divided by factor, a
    smooth passage to short ones); "yarn" (https://arxiv.org/abs/2309.00071); "factors" (params "0000", "0001", ...
    divide the frequencies one by one, as GGUF files ship llama3's).

    Raises:
        ValueError: an unknown scaling.
    """
    given = dict(params or {})
    powers = torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim
    plain = 1.0 / (theta**powers)
    if scaling == "none":
        return plain, 1.0
    if scaling == "linear":
        return plain / given["factor"], 1.0
    if scaling == "factors":
        return plain / torch.tensor([given[name] for name in sorted(given)], dtype=torch.float32), 1.0
    if scaling == "llama3":
        return _llama3(plain, given), 1.0
    if scaling == "yarn":
        return _yarn(theta, rotary_dim, plain, given)
    raise ValueError(f"unknown rope scaling {scaling!r}")


def _llama3(plain: Tensor, given: dict[str, float]) -> Tensor:
    factor, original = given["factor"], given["original_max_position_embeddings"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    wavelength = 2 * math.pi / plain
    smooth = (original / wavelength - low) / (high - low)
    between = (1 - smooth) * plain / factor + smooth * plain
    scaled = torch.where(wavelength > original / low, plain / factor, plain)
    is_between = (wavelength >= original / high) & (wavelength <= original / low)
    return torch.where(is_between, between, scaled)


def _yarn(theta: float, rotary_dim: int, plain: Tensor, given: dict[str, float]) -> tuple[Tensor, float]:
    factor, original = given["factor"], given["original_max_position_embeddings"]

    def dim_of(rotations: float) -> float:
        return rotary_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    low, high = dim_of(given.get("beta_fast") or 32.0), dim_of(given.get("beta_slow") or 1.0)
    if given.get("truncate", 1.0):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (max(high - low, 0.001))
    interpolated = ramp.clamp(0, 1)
    frequencies = plain / factor * interpolated + plain * (1 - interpolated)
    attention = given.get("attention_factor")
    if attention is None:
        scale, scale_all = given.get("mscale"), given.get("mscale_all_dim")
        attention = magnitude(scale) / magnitude(scale_all) if scale and scale_all else magnitude(1.0)
    return frequencies, attention


def rotary_table(
    theta: float,
    rotary_dim: int,
    num_positions: int,
    scaling: str = "none",
    params: Mapping[str, float] | None = None,
) -> tuple[Tensor, Tensor]:
    """(cos, sin), each float32 [num_positions, rotary_dim / 2]. See `rotary_frequencies`."""
    frequencies, factor = rotary_frequencies(theta, rotary_dim, scaling, params)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), frequencies)
    return angles.cos() * factor, angles.sin() * factor


def rotary(x: Tensor, positions: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [num_tokens, num_heads, head_dim] by its tokens' positions; element j pairs with j + rotary_dim / 2.

    Dimensions past rotary_dim (twice the table's width) stay as they are.
    """
    half = cos.shape[1]
    c, s = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)  # [num_tokens, 1, half]
    first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
    turned = torch.cat((first * c - second * s, second * c + first * s), dim=-1).to(x.dtype)
    return torch.cat((turned, rest), dim=-1) if rest.shape[-1] else turned


def store_kv(k: Tensor, v: Tensor, kv_cache: Tensor, layer: int, slot_mapping: Tensor) -> None:
    """Writes k and v [num_tokens, num_kv_heads, head_dim] into their slots of `layer`. The one op that mutates.

    Args:
        slot_mapping: int [num_tokens], block_id * block_size + offset; a negative slot is skipped.
    """
    block_size = kv_cache.shape[4]
    used = slot_mapping >= 0
    slots = slot_mapping[used].long()
    blocks, offsets = slots // block_size, slots % block_size
    for part, rows in enumerate((k[used], v[used])):
        if kv_cache.dtype == FP8:
            codes, exponents = quantise_rows(rows)
            # As bytes: torch does not scatter float8.
            kv_cache.view(torch.uint8)[:, layer, part][blocks, :, offsets] = codes.view(torch.uint8)
            exponents_of(kv_cache)[:, layer, part][blocks, :, offsets] = exponents
        else:
            kv_cache[:, layer, part][blocks, :, offsets] = rows.to(kv_cache.dtype)


def gather_kv(kv_cache: Tensor, layer: int, block_ids: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
    """K and V of the first `num_tokens` tokens of one block table, each [num_kv_heads, num_tokens, head_dim].

    In the cache's dtype; in float32 where that is float8.
    """
    block_size = kv_cache.shape[4]
    used = block_ids[: -(-num_tokens // block_size)].long()
    if kv_cache.dtype == FP8:
        codes = kv_cache.view(torch.uint8)[used, layer].view(FP8)
        blocks = dequantise_rows(codes, exponents_of(kv_cache)[used, layer])
    else:
        blocks = kv_cache[used, layer]
    both = blocks.transpose(0, 1).transpose(1, 2)  # [2, num_kv_heads, blocks, block_size, head_dim]
    both = both.reshape(2, both.shape[1], -1, both.shape[4])[:, :, :num_tokens]
    return both[0], both[1]


def attention_mask(num_queries: int, num_keys: int, window: int | None = None) -> Tensor:
    """True where query i, the (num_keys - num_queries + i)-th token, may see key j. Bool [num_queries, num_keys]."""
    query_at = torch.arange(num_keys - num_queries, num_keys).unsqueeze(1)
    key_at = torch.arange(num_keys).unsqueeze(0)
    seen = key_at <= query_at
    return seen if window is None else seen & (query_at - key_at < window)


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
    """Causal attention of a ragged batch over the paged cache; K and V of the batch must be stored already.

    Args:
        q: [num_tokens, num_heads, head_dim]; num_heads is a multiple of num_kv_heads (grouped heads).
        query_start_loc: int [num_seqs + 1]; seq_lens: int [num_seqs]; block_tables: int [num_seqs, max_blocks].
        window: a token sees this many tokens at most, itself included; None: all before it.
        softcap: scores become softcap * tanh(scores / softcap); 0 leaves them.

    Returns:
        [num_tokens, num_heads, head_dim] in q's dtype.
    """
    out = torch.zeros_like(q)
    starts = query_start_loc.tolist()
    group = q.shape[1] // kv_cache.shape[3]
    for i, seq_len in enumerate(seq_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        num_queries = starts[i + 1] - starts[i]
        if num_queries == 0:
            continue
        k, v = gather_kv(kv_cache, layer, block_tables[i], seq_len)
        k, v = (part.float().repeat_interleave(group, dim=0) for part in (k, v))  # [num_heads, seq_len, head_dim]
        scores = q[rows].transpose(0, 1).float() @ k.transpose(1, 2) * scale  # [num_heads, num_queries, seq_len]
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        mask = attention_mask(num_queries, seq_len, window).to(q.device)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        out[rows] = (weights @ v).transpose(0, 1).to(q.dtype)
    return out


def route(router_logits: Tensor, top_k: int, norm_topk_prob: bool) -> tuple[Tensor, Tensor]:
    """Chosen experts int64 and their weights float32, each [num_tokens, top_k], from logits [num_tokens, experts]."""
    weights, experts = router_logits.float().softmax(-1).topk(top_k, dim=-1)
    if norm_topk_prob:
        weights = weights / weights.sum(-1, keepdim=True)
    return experts, weights


def moe(
    x: Tensor,
    router: Tensor,
    gates: Sequence[Tensor],
    ups: Sequence[Tensor],
    downs: Sequence[Tensor],
    top_k: int,
    norm_topk_prob: bool,
    activation: str = "silu",
) -> Tensor:
    """Mixture of gated MLPs: each token goes through its `top_k` experts, weighted by the router's softmax.

    Args:
        x: [num_tokens, hidden_size]; router: [num_experts, hidden_size].
        gates, ups: per expert [intermediate, hidden_size]; downs: per expert [hidden_size, intermediate].
    """
    act = GATED_ACTIVATIONS[activation]

    def expert(index: int, rows: Tensor) -> Tensor:
        return linear(act(linear(rows, gates[index]), linear(rows, ups[index])), downs[index])

    return moe_of(x, router, expert, top_k, norm_topk_prob)


def moe_of(
    x: Tensor, router: Tensor, expert: Callable[[int, Tensor], Tensor], top_k: int, norm_topk_prob: bool
) -> Tensor:
    """`moe` with experts given as a function: expert(index, rows [num_rows, hidden_size]), which keeps the shape."""
    experts, weights = route(linear(x, router), top_k, norm_topk_prob)
    weights = weights.to(x.dtype)
    out = torch.zeros_like(x)
    for index in sorted(set(experts.flatten().tolist())):
        token, choice = torch.where(experts == index)
        out.index_add_(0, token, expert(index, x[token]) * weights[token, choice].unsqueeze(1))
    return out


def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap); 0 leaves x as it is."""
    return x if cap == 0.0 else cap * torch.tanh(x / cap)
