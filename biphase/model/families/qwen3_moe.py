"""Qwen3-MoE: Qwen3 whose every MLP is a mixture of experts."""

from __future__ import annotations

from biphase.errors import ModelLoadError
from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec, sliding_windows
from biphase.model.spec import ModelSpec, MoESpec


def _spec(config: Config) -> ModelSpec:
    if config.get("mlp_only_layers") or config.integer("decoder_sparse_step", 1) != 1:
        raise ModelLoadError("config.json: Qwen3-MoE with dense MLPs in some layers is not supported.")
    bias = config.flag("attention_bias")
    window = config.integer("sliding_window", 0) if config.flag("use_sliding_window") else 0
    num_experts = config.positive("num_experts", config.integer("num_local_experts", 0))
    moe = MoESpec(
        num_experts=num_experts,
        num_experts_per_token=config.positive("num_experts_per_tok"),
        expert_intermediate_size=config.positive("moe_intermediate_size"),
        # llama.cpp always renormalises for this architecture and records nothing.
        norm_topk_prob=config.flag("norm_topk_prob", default=config.from_gguf),
    )
    return decoder_spec(
        config,
        intermediate_size=config.positive("intermediate_size", moe.expert_intermediate_size),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        moe=moe,
        sliding_windows=sliding_windows(config, window, lambda layer: True),
    )


FAMILIES = (Family("Qwen3MoeForCausalLM", _spec),)
