"""Runs a ModelSpec over `biphase.ops.gpu`: the layers, without what surrounds a step (`gpu_forward`).

Every op of a decode step is a launch whose shapes follow from the batch size alone, so that the whole can be recorded
in a CUDA graph; mixtures of experts are the exception. Not yet run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from biphase.model.forward import ForwardBatch
from biphase.model.packed import PackedMatrix
from biphase.model.quantised import Weight
from biphase.model.spec import ModelSpec, RopeSpec
from biphase.ops import gpu as ops


@dataclass(slots=True)
class _Layer:
    """One layer's weights: vectors and the router by their canonical names, the matrices that are multiplied with."""

    tensors: dict[str, Tensor]
    qkv: ops.Multiplied
    o: ops.Multiplied
    qkv_bias: Tensor | None
    window: int | None
    rope: tuple[Tensor, Tensor]
    gate_up: ops.Multiplied | None = None
    down: ops.Multiplied | None = None
    gates: list[ops.Multiplied] = field(default_factory=list)
    ups: list[ops.Multiplied] = field(default_factory=list)
    downs: list[ops.Multiplied] = field(default_factory=list)


class GpuModel:
    """Logits of a batch whose tensors lie on the device."""

    def __init__(self, spec: ModelSpec, weights: dict[str, Weight], kv_cache: Tensor, *, max_model_len: int) -> None:
        """
        Args:
            weights: canonical names. Matrices that are joined are replaced in it by views of the joint one, so that
                no weight lies on the device twice. Packed ones stay as they are where there is a kernel for them
                (`ops.can_multiply`); they must not be a table that is looked up in.
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
            max_model_len: rotary tables reach this far.
        """
        self._spec = spec
        self._kv_cache = kv_cache
        self._embed, self._final_norm = _tensor(weights, "embed"), _tensor(weights, "final_norm")
        self._lm_head = self._embed if spec.tie_word_embeddings else _multiplied(weights, "lm_head")
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
        x = self._norm(residual, self._layers[0].tensors["attn_norm"])
        for i, layer in enumerate(self._layers):
            x = self._attend(x, i, layer, batch)
            if spec.post_norms:
                x = self._norm(x, layer.tensors["post_attn_norm"])
            x, residual = self._add_norm(x, residual, layer.tensors["mlp_norm"])
            x = self._mlp(x, layer)
            if spec.post_norms:
                x = self._norm(x, layer.tensors["post_mlp_norm"])
            last = i + 1 == spec.num_layers
            if last and batch.logits_indices.shape[0] != x.shape[0]:
                # Only the rows whose logits are wanted go on.
                x, residual = x[batch.logits_indices], residual[batch.logits_indices]
            following = self._final_norm if last else self._layers[i + 1].tensors["attn_norm"]
            x, residual = self._add_norm(x, residual, following)
        return ops.linear(x, self._lm_head)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return ops.rms_norm(x, weight, self._spec.norm_eps, self._spec.norm_weight_offset)

    def _add_norm(self, x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return ops.fused_add_rms_norm(x, residual, weight, self._spec.norm_eps, self._spec.norm_weight_offset)

    def _attend(self, x: Tensor, index: int, layer: _Layer, batch: ForwardBatch) -> Tensor:
        spec, tensors = self._spec, layer.tensors
        q = ops.rope_store(
            ops.linear(x, layer.qkv, layer.qkv_bias),
            batch.positions,
            *layer.rope,
            self._kv_cache,
            index,
            batch.slot_mapping,
            spec.num_heads,
            q_norm=tensors.get("q_norm"),
            k_norm=tensors.get("k_norm"),
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
        return ops.linear(heads.view(x.shape[0], -1), layer.o, tensors.get("o_bias"))

    def _mlp(self, x: Tensor, layer: _Layer) -> Tensor:
        spec = self._spec
        if spec.moe is not None:
            return ops.moe(
                x,
                layer.tensors["router"],
                layer.gates,
                layer.ups,
                layer.downs,
                spec.moe.num_experts_per_token,
                spec.moe.norm_topk_prob,
                spec.activation,
            )
        assert layer.gate_up is not None and layer.down is not None
        gate, up = ops.linear(x, layer.gate_up).chunk(2, dim=-1)
        return ops.linear(ops.GATED_ACTIVATIONS[spec.activation](gate, up), layer.down)


def _layer(
    spec: ModelSpec, weights: dict[str, Weight], prefix: str, window: int | None, rope: tuple[Tensor, Tensor]
) -> _Layer:
    qkv = _join(weights, [f"{prefix}{name}" for name in "qkv"])
    bias = _join(weights, [f"{prefix}{name}_bias" for name in "qkv"]) if spec.qkv_bias else None
    assert bias is None or isinstance(bias, Tensor)
    named = ((name.removeprefix(prefix), weight) for name, weight in weights.items() if name.startswith(prefix))
    tensors = {name: weight for name, weight in named if isinstance(weight, Tensor)}
    layer = _Layer(tensors, qkv, _multiplied(weights, f"{prefix}o"), bias, window, rope)
    if spec.moe is None:
        layer.gate_up = _join(weights, [f"{prefix}gate", f"{prefix}up"])
        layer.down = _multiplied(weights, f"{prefix}down")
    else:
        for part, matrices in (("gate", layer.gates), ("up", layer.ups), ("down", layer.downs)):
            matrices += [_multiplied(weights, f"{prefix}experts.{e}.{part}") for e in range(spec.moe.num_experts)]
    return layer


def _tensor(weights: dict[str, Weight], name: str) -> Tensor:
    weight = weights[name]
    assert isinstance(weight, Tensor), f"{name} is packed"
    return weight


def _multiplied(weights: dict[str, Weight], name: str) -> Tensor | PackedMatrix:
    weight = weights[name]
    assert isinstance(weight, Tensor | PackedMatrix)
    return weight


def _join(weights: dict[str, Weight], names: list[str]) -> ops.Multiplied:
    """The named matrices one after another. The entries of tensors become views of the result; what is packed is not
    joined, but multiplied with part by part."""
    parts = [_multiplied(weights, name) for name in names]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    if not tensors:
        return tuple(part for part in parts if not isinstance(part, Tensor))
    assert len(tensors) == len(parts), f"of {', '.join(names)} some are packed and some not"
    joint = torch.cat(tensors)
    start = 0
    for name, part in zip(names, tensors, strict=True):
        weights[name] = joint[start : start + part.shape[0]]
        start += part.shape[0]
    return joint


def _table(rope: RopeSpec, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    cos, sin = ops.rotary_table(rope.theta, rope.rotary_dim, num_positions, rope.scaling, dict(rope.params))
    return cos.to(device), sin.to(device)
