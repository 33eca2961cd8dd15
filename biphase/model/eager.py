"""Runs a ModelSpec in plain torch over `biphase.ops.eager`: the fallback executor, and the yardstick of the others."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from biphase.model.forward import ForwardBatch
from biphase.model.spec import ModelSpec, RopeSpec
from biphase.ops import eager as ops


@dataclass(slots=True)
class _Layer:
    """One layer's weights, by the canonical names."""

    weights: dict[str, Tensor]
    window: int | None
    rope: tuple[Tensor, Tensor]
    gates: list[Tensor] = field(default_factory=list)
    ups: list[Tensor] = field(default_factory=list)
    downs: list[Tensor] = field(default_factory=list)


class EagerForward:
    """A `Forward`. Weights stay where they are; nothing is copied."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], kv_cache: Tensor, *, max_model_len: int) -> None:
        """
        Args:
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
            max_model_len: rotary tables reach this far.
        """
        self._spec = spec
        self._kv_cache = kv_cache
        self._embed, self._final_norm = weights["embed"], weights["final_norm"]
        self._lm_head = self._embed if spec.tie_word_embeddings else weights["lm_head"]
        device = self._embed.device
        full = _table(spec.rope, max_model_len, device)
        local = full if spec.local_rope is None else _table(spec.local_rope, max_model_len, device)
        self._layers: list[_Layer] = []
        windows = spec.sliding_windows or (None,) * spec.num_layers
        for i, window in enumerate(windows):
            prefix = f"layers.{i}."
            own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
            layer = _Layer(own, window, full if window is None else local)
            if spec.moe is not None:
                experts = range(spec.moe.num_experts)
                layer.gates = [own[f"experts.{e}.gate"] for e in experts]
                layer.ups = [own[f"experts.{e}.up"] for e in experts]
                layer.downs = [own[f"experts.{e}.down"] for e in experts]
            self._layers.append(layer)

    @torch.inference_mode()
    def __call__(self, batch: ForwardBatch) -> Tensor:
        spec = self._spec
        x = ops.embedding(batch.token_ids, self._embed, spec.embedding_scale)
        attention = ops.PagedAttention(
            batch.query_start_loc, batch.seq_lens, batch.block_tables, self._kv_cache.shape[4], x.device
        )
        residual = x
        x = self._norm(x, self._layers[0].weights["attn_norm"])
        for i, layer in enumerate(self._layers):
            x = self._attend(x, i, layer, batch, attention)
            if spec.post_norms:
                x = self._norm(x, layer.weights["post_attn_norm"])
            x, residual = self._add_norm(x, residual, layer.weights["mlp_norm"])
            x = self._mlp(x, layer)
            if spec.post_norms:
                x = self._norm(x, layer.weights["post_mlp_norm"])
            last = i + 1 == spec.num_layers
            if last:
                # Only the rows whose logits are wanted go on.
                rows = batch.logits_indices.long()
                x, residual = x[rows], residual[rows]
            following = self._final_norm if last else self._layers[i + 1].weights["attn_norm"]
            x, residual = self._add_norm(x, residual, following)
        logits = ops.linear(x, self._lm_head).float()
        return ops.softcap(logits, spec.final_softcap)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._spec.norm_eps, self._spec.norm_weight_offset)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.fused_add_rms_norm(x, residual, weight, self._spec.norm_eps, self._spec.norm_weight_offset)

    def _attend(
        self, x: Tensor, index: int, layer: _Layer, batch: ForwardBatch, attention: ops.PagedAttention
    ) -> Tensor:
        spec, weights = self._spec, layer.weights
        q = ops.linear(x, weights["q"], weights.get("q_bias")).view(-1, spec.num_heads, spec.head_dim)
        k = ops.linear(x, weights["k"], weights.get("k_bias")).view(-1, spec.num_kv_heads, spec.head_dim)
        v = ops.linear(x, weights["v"], weights.get("v_bias")).view(-1, spec.num_kv_heads, spec.head_dim)
        if spec.qk_norm:
            q, k = self._norm(q, weights["q_norm"]), self._norm(k, weights["k_norm"])
        q, k = (ops.rotary(part, batch.positions, *layer.rope) for part in (q, k))
        ops.store_kv(k, v, self._kv_cache, index, batch.slot_mapping)
        heads = attention(q, self._kv_cache, index, spec.attention_scale, layer.window, spec.attention_softcap)
        return ops.linear(heads.reshape(x.shape[0], -1), weights["o"], weights.get("o_bias"))

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        spec, weights = self._spec, layer.weights
        if spec.moe is not None:
            return ops.moe(
                x,
                weights["router"],
                layer.gates,
                layer.ups,
                layer.downs,
                spec.moe.num_experts_per_token,
                spec.moe.norm_topk_prob,
                spec.activation,
            )
        act = ops.GATED_ACTIVATIONS[spec.activation]
        return ops.linear(act(ops.linear(x, weights["gate"]), ops.linear(x, weights["up"])), weights["down"])


def _table(rope: RopeSpec, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = ops.rotary_table(rope.theta, rope.rotary_dim, num_positions, rope.scaling, dict(rope.params))
    return cos.to(device), sin.to(device)
