"""Qwen3: Llama with a norm on each query and key head."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec
from biphase.model.families.qwen2 import upper_windows
from biphase.model.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    head_dim = config.positive("head_dim", 128)
    return decoder_spec(
        config,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        rope=config.rope(head_dim),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        sliding_windows=upper_windows(config),
    )


FAMILIES = (Family("Qwen3ForCausalLM", _spec),)
