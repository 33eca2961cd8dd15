"""Gemma 2: norms before and after each half layer, softcaps, a sliding window in every other layer."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec, sliding_windows
from biphase.model.spec import ModelSpec

GEMMA_LAYER_NAMES = {
    "post_attn_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def gemma_spec(config: Config, **changes: object) -> ModelSpec:
    """What Gemma 2 and 3 have in common."""
    head_dim = config.positive("head_dim", 256)
    scalar = config.real("query_pre_attn_scalar", _scalar_of_gguf(config, head_dim) if config.from_gguf else 256)
    bias = config.flag("attention_bias")
    fields: dict[str, object] = {
        "head_dim": head_dim,
        "attention_scale": scalar**-0.5,
        "activation": "gelu_tanh",
        # llama.cpp's converter has added the one already.
        "norm_weight_offset": 0.0 if config.from_gguf else 1.0,
        "embedding_scale": config.positive("hidden_size") ** 0.5,
        "post_norms": True,
        "qkv_bias": bias,
        "o_bias": bias,
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=True),
    }
    return decoder_spec(config, **(fields | changes))


def _scalar_of_gguf(config: Config, head_dim: int) -> float:
    # GGUF does not record it. As llama.cpp has it: the two 27B models, known by their depth, differ from the rest.
    is_27b = config.positive("num_hidden_layers") in (46, 62)
    return config.positive("hidden_size") / config.positive("num_attention_heads") if is_27b else head_dim


def _spec(config: Config) -> ModelSpec:
    windows = sliding_windows(config, config.integer("sliding_window", 4096), lambda layer: layer % 2 == 0)
    return gemma_spec(
        config,
        rope=config.rope(config.positive("head_dim", 256)),
        sliding_windows=windows,
        attention_softcap=config.real("attn_logit_softcapping", 0.0),
        final_softcap=config.real("final_logit_softcapping", 0.0),
    )


FAMILIES = (Family("Gemma2ForCausalLM", _spec, GEMMA_LAYER_NAMES),)
