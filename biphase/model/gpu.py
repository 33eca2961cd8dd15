"""Runs a ModelSpec over `biphase.ops.gpu`: the layers, without what surrounds a step (`gpu_forward`).

Every op of a decode step is a launch whose shapes follow from the batch size alone, so that the whole can be recorded
in a CUDA graph; mixtures of experts are the exception. Not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from biphase.model.forward import ForwardBatch
from biphase.model.spec import ModelSpec, RopeSpec
from biphase.ops import gpu as ops


@dataclass(slots=True)
class _Layer:
    """One layer's weights by the canonical names, q, k, v and gate, up joined."""

    weights: dict[str, Tensor]
    qkv: Tensor
    qkv_bias: Tensor | None
    window: int | None
    rope: tuple[Tensor, Tensor]
    gate_up: Tensor | None = None
    gates: list[Tensor] = field(default_factory=list)
    ups: list[Tensor] = field(default_factory=list)
    downs: list[Tensor] = field(default_factory=list)


class GpuModel:
    """Logits of a batch whose tensors lie on the device."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Tensor], kv_cache: Tensor, *, max_model_len: int) -> None:
        """
        Args:
            weights: canonical names. Matrices that are joined are replaced in it by views of the joint one, so that
                no weight lies on the device twice.
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
        windows = spec.sliding_windows or (None,) * spec.num_layers
        self._layers = [
            _layer(spec, weights, f"layers.{i}.", window, full if window is None else local)
            for i, window in enumerate(windows)
        ]

    @property
    def can_be_recorded(self) -> bool:
        """Whether a decode step asks nothing of the host."""
        return self._spec.moe is None

    def __call__(self, batch: ForwardBatch) -> Tensor:
        """Logits [num_logits, vocab_size] in the model's dtype, before the final softcap."""
        spec = self._spec
        residual = ops.embedding(batch.token_ids, self._embed, spec.embedding_scale)
        x = self._norm(residual, self._layers[0].weights["attn_norm"])
        for i, layer in enumerate(self._layers):
            x = self._attend(x, i, layer, batch)
            if spec.post_norms:
                x = self._norm(x, layer.weights["post_attn_norm"])
            x, residual = self._add_norm(x, residual, layer.weights["mlp_norm"])
            x = self._mlp(x, layer)
            if spec.post_norms:
                x = self._norm(x, layer.weights["post_mlp_norm"])
            last = i + 1 == spec.num_layers
            if last and batch.logits_indices.shape[0] != x.shape[0]:
                # Only the rows whose logits are wanted go on.
                x, residual = x[batch.logits_indices], residual[batch.logits_indices]
            following = self._final_norm if last else self._layers[i + 1].weights["attn_norm"]
            x, residual = self._add_norm(x, residual, following)
        return ops.linear(x, self._lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._spec.norm_eps, self._spec.norm_weight_offset)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.fused_add_rms_norm(x, residual, weight, self._spec.norm_eps, self._spec.norm_weight_offset)

    def _attend(self, x: Tensor, index: int, layer: _Layer, batch: ForwardBatch) -> Tensor:
        spec, weights = self._spec, layer.weights
        q = ops.rope_store(
            ops.linear(x, layer.qkv, layer.qkv_bias),
            batch.positions,
            *layer.rope,
            self._kv_cache,
            index,
            batch.slot_mapping,
            spec.num_heads,
            q_norm=weights.get("q_norm"),
            k_norm=weights.get("k_norm"),
            eps=spec.norm_eps,
            weight_offset=spec.norm_weight_offset,
        )
        heads = ops.paged_attention(
            q,
            self._kv_cache,
            index,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_tables,
            spec.attention_scale,
            layer.window,
            spec.attention_softcap,
        )
        return ops.linear(heads.view(x.shape[0], -1), weights["o"], weights.get("o_bias"))

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
        assert layer.gate_up is not None
        gate, up = ops.linear(x, layer.gate_up).chunk(2, dim=-1)
        return ops.linear(ops.GATED_ACTIVATIONS[spec.activation](gate, up), weights["down"])


def _layer(
    spec: ModelSpec, weights: dict[str, Tensor], prefix: str, window: int | None, rope: tuple[Tensor, Tensor]
) -> _Layer:
    qkv = _join(weights, [f"{prefix}{name}" for name in "qkv"])
    bias = _join(weights, [f"{prefix}{name}_bias" for name in "qkv"]) if spec.qkv_bias else None
    gate_up = None if spec.moe is not None else _join(weights, [f"{prefix}gate", f"{prefix}up"])
    own = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
    layer = _Layer(own, qkv, bias, window, rope, gate_up)
    if spec.moe is not None:
        experts = range(spec.moe.num_experts)
        layer.gates = [own[f"experts.{e}.gate"] for e in experts]
        layer.ups = [own[f"experts.{e}.up"] for e in experts]
        layer.downs = [own[f"experts.{e}.down"] for e in experts]
    return layer


def _join(weights: dict[str, Tensor], names: list[str]) -> Tensor:
    """The named tensors one after another; their entries become views of the result."""
    joint = torch.cat([weights[name] for name in names])
    start = 0
    for name in names:
        end = start + weights[name].shape[0]
        weights[name] = joint[start:end]
        start = end
    return joint


def _table(rope: RopeSpec, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = ops.rotary_table(rope.theta, rope.rotary_dim, num_positions, rope.scaling, dict(rope.params))
    return cos.to(device), sin.to(device)
