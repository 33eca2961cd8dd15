"""Mixtral: Mistral whose every MLP is a mixture of experts."""

from __future__ import annotations

from biphase.model.config import Config
from biphase.model.families.decoder import Family, decoder_spec, sliding_windows
from biphase.model.spec import ModelSpec, MoESpec


def _spec(config: Config) -> ModelSpec:
    moe = MoESpec(
        num_experts=config.positive("num_local_experts"),
        num_experts_per_token=config.positive("num_experts_per_tok"),
        expert_intermediate_size=config.positive("intermediate_size"),
        norm_topk_prob=True,
    )
    windows = sliding_windows(config, config.integer("sliding_window", 0), lambda layer: True)
    return decoder_spec(config, moe=moe, sliding_windows=windows)


FAMILIES = (
    Family(
        "MixtralForCausalLM",
        _spec,
        {"router": "block_sparse_moe.gate.weight"},
        {
            "gate": "block_sparse_moe.experts.{expert}.w1.weight",
            "up": "block_sparse_moe.experts.{expert}.w3.weight",
            "down": "block_sparse_moe.experts.{expert}.w2.weight",
        },
    ),
)
