"""Mistral: Llama with a sliding window in every layer (none from v0.2 on)."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec, sliding_windows
from biphase.model.spec import ModelSpec


def _spec(config: Config) -> ModelSpec:
    windows = sliding_windows(config, config.integer("sliding_window", 0), lambda layer: True)
    return decoder_spec(config, sliding_windows=windows)


FAMILIES = (Family("MistralForCausalLM", _spec),)
