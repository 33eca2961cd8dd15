"""Llama 1 to 3, and the many models that take its shape (SmolLM2 among them)."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec
from biphase.model.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    bias = config.flag("attention_bias")
    return decoder_spec(config, qkv_bias=bias, o_bias=bias)


FAMILIES = (Family("LlamaForCausalLM", _spec),)
