"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; the upper layers may use a sliding window."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec, sliding_windows
from biphase.model.spec import ModelSpec


def upper_windows(config: Config) -> tuple[int | None, ...]:
    """Windows from layer `max_window_layers` on, if the config turns them on at all."""
    window = config.integer("sliding_window", 0) if config.flag("use_sliding_window") else 0
    first = config.integer("max_window_layers", 0)
    return sliding_windows(config, window, lambda layer: layer >= first)


def _spec(config: Config) -> ModelSpec:
    return decoder_spec(config, qkv_bias=True, sliding_windows=upper_windows(config))


FAMILIES = (Family("Qwen2ForCausalLM", _spec),)
