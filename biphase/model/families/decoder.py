"""What the families share: a pre-norm decoder in the shape of Llama, and its Hugging Face tensor names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from biphase.errors import ModelLoadError
from biphase.model.config import Config
from biphase.model.spec import ModelSpec

_TOP_NAMES = {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "lm_head": "lm_head.weight"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
}
_EXPERT_NAMES = {
    "gate": "mlp.experts.{expert}.gate_proj.weight",
    "up": "mlp.experts.{expert}.up_proj.weight",
    "down": "mlp.experts.{expert}.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: its config in, its spec and tensor names out."""

    architecture: str
    spec: Callable[[Config], ModelSpec]
    # Canonical layer weight -> the checkpoint's name after "model.layers.{i}.", where it differs from Llama's.
    layer_names: dict[str, str] = field(default_factory=dict)
    # The same for an expert's matrices, all three or none; "{expert}" stands for its number.
    expert_names: dict[str, str] = field(default_factory=lambda: _EXPERT_NAMES)

    def name_of(self, canonical: str) -> str:
        """The Hugging Face name of a canonical weight."""
        if canonical in _TOP_NAMES:
            return _TOP_NAMES[canonical]
        _, layer, part = canonical.split(".", 2)
        if part.startswith("experts."):
            _, expert, matrix = part.split(".")
            return f"model.layers.{layer}.{self.expert_names[matrix].format(expert=expert)}"
        return f"model.layers.{layer}.{self.layer_names.get(part) or _LAYER_NAMES[part]}"


def decoder_spec(config: Config, **changes: Any) -> ModelSpec:
    """A spec from the keys that nearly all decoder configs share; `changes` are ModelSpec fields that differ.

    Raises:
        ModelLoadError: a key is missing, of the wrong kind, or asks for what no executor does.
    """
    hidden_size, num_heads = config.positive("hidden_size"), config.positive("num_attention_heads")
    num_kv_heads = config.positive("num_key_value_heads", num_heads)
    head_dim = config.positive("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(f"config.json: {num_heads} heads cannot share {num_kv_heads} key/value heads evenly.")
    if config.flag("mlp_bias"):
        raise ModelLoadError("config.json: mlp_bias is not supported.")
    num_layers = config.positive("num_hidden_layers")
    fields: dict[str, Any] = {
        "architecture": config.architecture,
        "vocab_size": config.positive("vocab_size"),
        "hidden_size": hidden_size,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": config.positive("intermediate_size"),
        "max_position_embeddings": config.positive("max_position_embeddings"),
        "norm_eps": config.real("rms_norm_eps", 1e-6),
        "activation": activation(config),
        "attention_scale": head_dim**-0.5,
        "sliding_windows": (None,) * num_layers,
        "tie_word_embeddings": config.flag("tie_word_embeddings"),
        "eos_token_ids": config.token_ids("eos_token_id"),
        "bos_token_id": next(iter(config.token_ids("bos_token_id")), None),
    } | changes
    moe = fields.get("moe")
    if moe is not None and moe.num_experts_per_token > moe.num_experts:
        raise ModelLoadError(
            f"config.json: {moe.num_experts_per_token} experts a token, but only {moe.num_experts} exist."
        )
    if "rope" not in fields:
        fields["rope"] = config.rope(rotary_dim=head_dim)
    return ModelSpec(**fields)


def activation(config: Config) -> str:
    name = config.text("hidden_activation", config.text("hidden_act", "silu"))
    known = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh"}
    if name not in known:
        raise ModelLoadError(f"config.json: activation {name!r} is not supported; supported are {', '.join(known)}.")
    return known[name]


def sliding_windows(config: Config, window: int, is_sliding: Callable[[int], bool]) -> tuple[int | None, ...]:
    """The window of each layer: by the config's `layer_types` where it has them, else by `is_sliding(layer)`.

    `window` 0 means that there is none anywhere.
    """
    num_layers = config.positive("num_hidden_layers")
    types = config.get("layer_types")
    if isinstance(types, list):
        unknown = sorted({str(kind) for kind in types} - {"full_attention", "sliding_attention"})
        if unknown or len(types) != num_layers:
            what = unknown[0] if unknown else f"{len(types)} entries for {num_layers} layers"
            raise ModelLoadError(f"config.json: layer_types has {what}, which is not supported.")
        sliding = [kind == "sliding_attention" for kind in types]
    else:
        sliding = [is_sliding(layer) for layer in range(num_layers)]
    return tuple(window if here and window else None for here in sliding)
