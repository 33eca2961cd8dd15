"""Names and shapes of the canonical weights that a ModelSpec calls for. Stdlib only."""

from __future__ import annotations

from biphase.model.spec import ModelSpec


def weight_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every weight the spec needs, in the order in which a forward pass meets them. See `spec` for the names."""
    hidden, q_size, kv_size = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden)}
    for i in range(spec.num_layers):
        layer: dict[str, tuple[int, ...]] = {
            "attn_norm": (hidden,),
            "q": (q_size, hidden),
            "k": (kv_size, hidden),
            "v": (kv_size, hidden),
        }
        if spec.qkv_bias:
            layer |= {"q_bias": (q_size,), "k_bias": (kv_size,), "v_bias": (kv_size,)}
        if spec.qk_norm:
            layer |= {"q_norm": (spec.head_dim,), "k_norm": (spec.head_dim,)}
        layer["o"] = (hidden, q_size)
        if spec.o_bias:
            layer["o_bias"] = (hidden,)
        if spec.post_norms:
            layer["post_attn_norm"] = (hidden,)
        layer["mlp_norm"] = (hidden,)
        if spec.moe is None:
            layer |= _mlp(hidden, spec.intermediate_size, "")
        else:
            layer["router"] = (spec.moe.num_experts, hidden)
            for expert in range(spec.moe.num_experts):
                layer |= _mlp(hidden, spec.moe.expert_intermediate_size, f"experts.{expert}.")
        if spec.post_norms:
            layer["post_mlp_norm"] = (hidden,)
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes["final_norm"] = (hidden,)
    if not spec.tie_word_embeddings:
        shapes["lm_head"] = (spec.vocab_size, hidden)
    return shapes


def _mlp(hidden: int, intermediate: int, prefix: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}gate": (intermediate, hidden),
        f"{prefix}up": (intermediate, hidden),
        f"{prefix}down": (hidden, intermediate),
    }
