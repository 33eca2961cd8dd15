"""The ops that eager execution runs on: the plain torch definitions, with attention planned once for all layers.

Owns making the fallback bearable: decodes are batched, prefill chunks go through torch's fused attention. What an op
means is said in `kernels.reference`; results agree with it up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.reference import (
    GATED_ACTIVATIONS,
    attention_mask,
    embedding,
    fused_add_rms_norm,
    gather_kv,
    linear,
    moe,
    rms_norm,
    rotary,
    rotary_table,
    softcap,
    store_kv,
)
from kernels.reference_fp8 import FP8, dequantise_rows, run_bytes, runs_of, split_runs

__all__ = [
    "GATED_ACTIVATIONS",
    "PagedAttention",
    "embedding",
    "fused_add_rms_norm",
    "linear",
    "moe",
    "rms_norm",
    "rotary",
    "rotary_table",
    "softcap",
    "store_kv",
]

# Keys gathered for a group of decodes at most, padding included: bounds the scratch memory.
_GROUP_TOKENS = 64 * 1024


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Sequences with one query token each and of similar length, padded to the longest."""

    rows: Tensor  # int64 [num_seqs], rows of q
    # int64 [num_seqs, num_blocks]; past a shorter sequence, the longest one's first block, which is full.
    block_ids: Tensor
    seq_lens: Tensor  # int64 [num_seqs, 1]
    key_at: Tensor  # int64 [1, num_blocks * block_size]
    last_block: Tensor  # int64 [num_seqs], index in block_ids of the sequence's own last block
    unused: Tensor  # bool [num_seqs, block_size], slots of that block that hold no token


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One sequence with several query tokens."""

    start: int
    end: int
    seq_len: int
    block_ids: Tensor


class PagedAttention:
    """Attention over one batch: built once a step, called once a layer. Arguments as `reference.paged_attention`."""

    def __init__(
        self, query_start_loc: Tensor, seq_lens: Tensor, block_tables: Tensor, block_size: int, device: torch.device
    ) -> None:
        self._masks: dict[tuple[int, int, int | None], Tensor] = {}
        self._device = device
        starts, lengths = query_start_loc.tolist(), seq_lens.tolist()
        self._chunks = [
            _Chunk(start, end, length, block_tables[i, : -(-length // block_size)])
            for i, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False))
            if end - start > 1
        ]
        decodes = [i for i in range(len(lengths)) if starts[i + 1] - starts[i] == 1]
        self._groups = [
            self._group(members, starts, lengths, block_tables, block_size) for members in _by_length(decodes, lengths)
        ]

    def _group(
        self, members: list[int], starts: list[int], lengths: list[int], block_tables: Tensor, block_size: int
    ) -> _DecodeGroup:
        # Members come longest first.
        num_blocks = -(-lengths[members[0]] // block_size)
        table = block_tables[members, :num_blocks].long()
        seq_lens = torch.tensor([lengths[i] for i in members], device=self._device).unsqueeze(1)
        own_blocks = (seq_lens + block_size - 1) // block_size
        padding = torch.arange(num_blocks, device=self._device) >= own_blocks
        return _DecodeGroup(
            torch.tensor([starts[i] for i in members], device=self._device),
            torch.where(padding, table[0, 0], table),
            seq_lens,
            torch.arange(num_blocks * block_size, device=self._device).unsqueeze(0),
            own_blocks.squeeze(1) - 1,
            torch.arange(block_size, device=self._device) >= seq_lens - (own_blocks - 1) * block_size,
        )

    def __call__(
        self, q: Tensor, kv_cache: Tensor, layer: int, scale: float, window: int | None = None, cap: float = 0.0
    ) -> Tensor:
        """[num_tokens, num_heads, head_dim] in q's dtype."""
        out = torch.empty_like(q)
        for group in self._groups:
            out[group.rows] = _decode(q[group.rows], kv_cache, layer, group, scale, window, cap)
        for chunk in self._chunks:
            part = slice(chunk.start, chunk.end)
            out[part] = self._prefill(q[part], kv_cache, layer, chunk, scale, window, cap)
        return out

    def _prefill(
        self, q: Tensor, kv_cache: Tensor, layer: int, chunk: _Chunk, scale: float, window: int | None, cap: float
    ) -> Tensor:
        k, v = gather_kv(kv_cache, layer, chunk.block_ids, chunk.seq_len)
        k, v = k.to(q.dtype), v.to(q.dtype)
        key = (q.shape[0], chunk.seq_len, window)
        mask = self._masks.get(key)
        if mask is None:
            mask = self._masks[key] = attention_mask(*key).to(self._device)
        if cap == 0.0:
            heads = F.scaled_dot_product_attention(
                q.transpose(0, 1).unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                attn_mask=mask,
                scale=scale,
                enable_gqa=True,
            )
            return heads[0].transpose(0, 1)
        num_kv_heads, group = k.shape[0], q.shape[1] // k.shape[0]
        grouped = q.view(q.shape[0], num_kv_heads, group, -1).permute(1, 2, 0, 3)  # [kv_heads, group, queries, dim]
        scores = softcap(torch.einsum("hgqd,hkd->hgqk", grouped, k).float() * scale, cap)
        weights = scores.masked_fill_(~mask, float("-inf")).softmax(-1).to(q.dtype)
        return torch.einsum("hgqk,hkd->qhgd", weights, v).reshape(q.shape)


def _by_length(members: list[int], lengths: list[int]) -> list[list[int]]:
    """Splits sequences into groups of similar length whose padded size is bounded."""
    groups: list[list[int]] = []
    for i in sorted(members, key=lambda i: -lengths[i]):
        longest = lengths[groups[-1][0]] if groups else 0
        if groups and 2 * lengths[i] >= longest and longest * (len(groups[-1]) + 1) <= _GROUP_TOKENS:
            groups[-1].append(i)
        else:
            groups.append([i])
    return groups


def _decode(
    q: Tensor, kv_cache: Tensor, layer: int, group: _DecodeGroup, scale: float, window: int | None, cap: float
) -> Tensor:
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads = kv_cache.shape[3]
    hidden = group.key_at >= group.seq_lens  # [num_seqs, num_keys]
    if window is not None:
        hidden = hidden | (group.key_at < group.seq_lens - window)
    both = _gather(kv_cache, layer, group).to(q.dtype)
    grouped = q.view(num_seqs, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = softcap((grouped @ both[0].transpose(2, 3)).float() * scale, cap)
    weights = scores.masked_fill_(hidden.view(num_seqs, 1, 1, -1), float("-inf")).softmax(-1).to(q.dtype)
    return (weights @ both[1]).view(num_seqs, num_heads, head_dim)


def _gather(kv_cache: Tensor, layer: int, group: _DecodeGroup) -> Tensor:
    """K and V of a group, [2, num_seqs, num_kv_heads, num_keys, head_dim], finite wherever the used slots are."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    num_seqs, num_blocks = group.block_ids.shape
    # One row is one head's K (or V) of one block: taken in the order in which they are wanted, copied once.
    firsts = (group.block_ids * num_layers + layer) * (2 * num_kv_heads)
    inner = torch.arange(2 * num_kv_heads, device=kv_cache.device).view(2, 1, num_kv_heads, 1)
    rows = (firsts.view(1, num_seqs, 1, num_blocks) + inner).flatten()
    if kv_cache.dtype == FP8:
        runs = runs_of(kv_cache).view(-1, run_bytes(block_size, head_dim)).index_select(0, rows)
        both = dequantise_rows(*split_runs(runs, block_size, head_dim))
    else:
        both = kv_cache.view(-1, block_size * head_dim).index_select(0, rows)
    blocks = both.view(2, num_seqs, num_kv_heads, num_blocks, block_size, head_dim)
    # Unused slots may hold NaN, and 0 * NaN is NaN: they are cleared, not only masked.
    sequences = torch.arange(num_seqs, device=kv_cache.device)
    last = blocks[:, sequences, :, group.last_block]  # [num_seqs, 2, num_kv_heads, block_size, head_dim]
    blocks[:, sequences, :, group.last_block] = last.masked_fill_(group.unused.view(num_seqs, 1, 1, -1, 1), 0)
    return blocks.view(2, num_seqs, num_kv_heads, -1, head_dim)
