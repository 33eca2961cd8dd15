"""Small random checkpoints of every family, saved by transformers, and its greedy answers to compare with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

# Any: its methods carry no annotations.
AutoModel: Any = transformers.AutoModelForCausalLM

SHAPE: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

# name -> (configuration class, what differs from SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "tie_word_embeddings": True}),
    "llama3_rope": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500_000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "llama_linear": ("LlamaConfig", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "llama_yarn": (
        "LlamaConfig",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("MistralConfig", {"sliding_window": 24}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True, "hidden_size": 96}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1, "hidden_size": 96},
    ),
    "qwen3": ("Qwen3Config", {}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "norm_topk_prob": True},
    ),
    "gemma2": (
        "Gemma2Config",
        {
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 3.0,
            "tie_word_embeddings": False,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "sliding_window": 24,
            "sliding_window_pattern": 3,
            "query_pre_attn_scalar": 20,
            "tie_word_embeddings": False,
        },
    ),
}


def save_tiny(name: str, folder: Path, *, max_shard_size: str = "5GB", **more: Any) -> Path:
    """Makes the family's checkpoint in `folder`, float32, with weights large enough that layers matter.

    `more` are configuration values that differ from the family's entry.
    """
    class_name, changes = FAMILIES[name]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(**(SHAPE | changes | more))
    model = AutoModel.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            elif parameter_name.endswith("bias"):
                parameter.normal_(std=0.5)
            else:
                parameter.normal_(std=0.2)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def expected_tokens(folder: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """What transformers generates greedily from each prompt, not stopping at any token."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    return [_generate(model, prompt, num_tokens) for prompt in prompts]


def _generate(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]
