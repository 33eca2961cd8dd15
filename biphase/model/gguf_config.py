"""Translates GGUF metadata into the config words of Hugging Face, and canonical tensor names into GGUF's.

Owns what llama.cpp's converter changes on the way into a .gguf file; families then need to know one vocabulary of
config only. Stdlib only.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from typing import Any

from biphase.errors import ModelLoadError
from biphase.model.gguf_file import GGUFFile
from biphase.model.tensor_entry import TensorEntry

# general.architecture -> the architecture that reads it. GGUF files of Mistral say "llama".
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}

# Architectures whose q and k rows the converter reorders from half-split to interleaved rotary pairs.
INTERLEAVED_ROPE = frozenset({"llama"})

# Hugging Face's key -> GGUF's key without the architecture's prefix.
_KEYS = {
    "hidden_size": "embedding_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "sliding_window": "attention.sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}

_TOP_NAMES = {"embed": "token_embd.weight", "final_norm": "output_norm.weight", "lm_head": "output.weight"}
_LAYER_NAMES = {
    "attn_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "o": "attn_output.weight",
    "q_bias": "attn_q.bias",
    "k_bias": "attn_k.bias",
    "v_bias": "attn_v.bias",
    "o_bias": "attn_output.bias",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "post_attn_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
    "router": "ffn_gate_inp.weight",
}
_LAYER = re.compile(r"layers\.(\d+)\.(?:experts\.(\d+)\.)?(\w+)")


def config_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """A config.json-like object for the model in `file`.

    Raises:
        ModelLoadError: the architecture is not supported.
    """
    metadata = file.metadata
    name = str(metadata.get("general.architecture", ""))
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelLoadError(f"{file.path}: GGUF architecture {name!r} is not supported; supported are {known}.")
    config: dict[str, Any] = {"architectures": [ARCHITECTURES[name]], "from_gguf": True}
    for key, suffix in _KEYS.items():
        if (value := metadata.get(f"{name}.{suffix}")) is not None:
            config[key] = value
    if "token_embd.weight" in file.tensors:
        config["vocab_size"] = file.tensors["token_embd.weight"].shape[0]
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    ends = (metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom"))
    config["eos_token_id"] = list(dict.fromkeys(end for end in ends if end is not None))
    config.update(_rope_scaling(name, metadata))
    if (factors := file.tensors.get("rope_freqs.weight")) is not None:
        config["rope_scaling"] = {"rope_type": "factors", "factors": _float32(factors)}
    return config


def _float32(entry: TensorEntry) -> list[float]:
    if entry.encoding != "F32":
        raise ModelLoadError(f"{entry.path}: tensor {entry.name} is encoded as {entry.encoding}; F32 is expected.")
    with entry.path.open("rb") as file:
        file.seek(entry.offset)
        return list(struct.unpack(f"<{entry.num_bytes // 4}f", file.read(entry.num_bytes)))


def _rope_scaling(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    kind = metadata.get(f"{name}.rope.scaling.type", "none")
    if kind not in ("linear", "yarn"):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": metadata.get(f"{name}.rope.scaling.factor", 1.0)}
    original = metadata.get(f"{name}.rope.scaling.original_context_length")
    if original is not None:
        scaling["original_max_position_embeddings"] = original
    return {"rope_scaling": scaling}


def gguf_name(canonical: str) -> tuple[str, int | None]:
    """The GGUF name of a canonical weight, and the expert's index where GGUF stacks all experts in one tensor."""
    if canonical in _TOP_NAMES:
        return _TOP_NAMES[canonical], None
    match = _LAYER.fullmatch(canonical)
    assert match is not None, canonical
    layer, expert, part = match.groups()
    if expert is not None:
        return f"blk.{layer}.ffn_{part}_exps.weight", int(expert)
    return f"blk.{layer}.{_LAYER_NAMES[part]}", None
