"""Gemma 3, text only: five windowed layers to one full, each kind with its own rotary base; norms on q and k."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, sliding_windows
from biphase.model.families.gemma2 import GEMMA_LAYER_NAMES, gemma_spec
from biphase.model.spec import ModelSpec, RopeSpec


def _spec(config: Config) -> ModelSpec:
    head_dim = config.positive("head_dim", 256)
    pattern = config.positive("sliding_window_pattern", 6)
    windows = sliding_windows(config, config.integer("sliding_window", 4096), lambda layer: (layer + 1) % pattern != 0)
    if config.get("rope_parameters"):
        local = config.rope(head_dim, "sliding_attention")
    else:
        local = RopeSpec(config.real("rope_local_base_freq", 10_000.0), head_dim)
    return gemma_spec(
        config,
        rope=config.rope(head_dim, theta=1_000_000.0),
        local_rope=local,
        qk_norm=True,
        sliding_windows=windows,
        attention_softcap=config.real("attn_logit_softcapping", 0.0),
        final_softcap=config.real("final_logit_softcapping", 0.0),
    )


FAMILIES = (Family("Gemma3ForCausalLM", _spec, GEMMA_LAYER_NAMES),)
