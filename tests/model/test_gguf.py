"""GGUF weights: decoding bit for bit, the rotary order undone, and greedy tokens equal to transformers'."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize

from biphase.model.dequantise import dequantise
from biphase.model.families import spec_of, supported_families
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.request import SamplingParams
from kernels.reference import rotary_frequencies
from tests.e2e.parity_answers import MAX_TOKENS, parity_prompts, stored_answers
from tests.stepping import Stepper, requests_of
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model(resolve_model(), "float32")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "Q6_K"])
def test_decoding_equals_the_gguf_package(kind: str) -> None:
    encoding = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((40, 512), dtype=np.float32)
    if kind == "Q6_K":
        raw = np.random.default_rng(1).integers(0, 60, (40, 420), dtype=np.uint8)  # no encoder in the package
    else:
        raw = quantize(values, encoding).view(np.uint8)
    out = torch.empty(40, 512)
    dequantise(torch.from_numpy(raw), kind, 512, out)
    assert np.array_equal(out.numpy(), dequantize(raw, encoding), equal_nan=True)


def test_bundled_weights_equal_the_gguf_package(smollm2: LoadedModel) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(smollm2.source.path).tensors}
    for canonical, stored in (
        ("embed", "token_embd.weight"),
        ("layers.3.v", "blk.3.attn_v.weight"),
        ("layers.29.down", "blk.29.ffn_down.weight"),
    ):
        expected = dequantize(tensors[stored].data, tensors[stored].tensor_type)
        assert np.array_equal(smollm2.weights[canonical].numpy(), expected)


def test_norms_are_float32_and_matrices_in_the_dtype() -> None:
    model = load_model(resolve_model(), "bfloat16")
    assert model.weights["layers.0.attn_norm"].dtype == torch.float32
    assert model.weights["layers.0.q"].dtype == torch.bfloat16
    assert model.num_weight_bytes == pytest.approx(269e6, rel=0.01)


@pytest.mark.slow
def test_greedy_tokens_of_the_bundled_model_equal_transformers(smollm2: LoadedModel) -> None:
    """By its stored answers; tests/e2e/test_parity.py asks transformers again."""
    prompts = parity_prompts()
    answers = stored_answers(prompts)
    chosen = [n for n, prompt in enumerate(prompts) if len(prompt) <= 64]
    produced = Stepper(smollm2).generate(
        requests_of([prompts[n] for n in chosen], SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
    )
    assert produced == [answers[n] for n in chosen]


# family -> what a GGUF file calls it, and what it cannot record: the tiny model must have the values taken for granted.
CONVERTED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_bias": ("llama", {}),
    "mistral": ("llama", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3moe", {}),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", {"query_pre_attn_scalar": 16, "sliding_window_pattern": 6}),
}


def write_gguf(original: LoadedModel, arch: str, path: Path) -> None:
    """Converts as llama.cpp does: names from the gguf package, q and k of "llama" interleaved, Gemma's norms + 1."""
    spec = original.spec
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    if window := next((w for w in spec.sliding_windows if w), None):
        writer.add_sliding_window(window)
    if spec.attention_softcap:
        writer.add_attn_logit_softcapping(spec.attention_softcap)
        writer.add_final_logit_softcapping(spec.final_softcap)
    if spec.moe:
        writer.add_expert_count(spec.moe.num_experts)
        writer.add_expert_used_count(spec.moe.num_experts_per_token)
        writer.add_expert_feed_forward_length(spec.moe.expert_intermediate_size)
    names = gguf.get_tensor_name_map(next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == arch), spec.num_layers)
    family = supported_families()[spec.architecture]
    stacked: dict[str, list[torch.Tensor]] = {}
    for name, weight in original.weights.items():
        stored = family.name_of(name)
        stem, suffix = stored.rsplit(".", 1)
        if ".experts." in stem:  # stacked into one tensor
            stem = re.sub(r"experts\.\d+\.", "experts.", stem)
            stacked.setdefault(f"{names.get_name(stem)}.{suffix}", []).append(weight)
            continue
        heads = {"q": spec.num_heads, "q_bias": spec.num_heads, "k": spec.num_kv_heads, "k_bias": spec.num_kv_heads}
        part = name.rsplit(".", 1)[-1]
        if arch == "llama" and part in heads:
            shape = weight.shape
            weight = weight.reshape(heads[part], 2, spec.head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        if arch.startswith("gemma") and part.endswith("norm"):
            weight = weight + 1
        writer.add_tensor(f"{names.get_name(stem)}.{suffix}", weight.contiguous().numpy())
    for stored, experts in stacked.items():
        writer.add_tensor(stored, torch.stack(experts).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CONVERTED)
def test_a_converted_checkpoint_is_the_same_model(name: str, tmp_path: Path) -> None:
    arch, changes = CONVERTED[name]
    original = load_model(resolve_model(str(save_tiny(name, tmp_path / "tiny", **changes))), "float32")
    write_gguf(original, arch, tmp_path / "tiny.gguf")
    converted = load_model(resolve_model(str(tmp_path / "tiny.gguf")), "float32")
    assert converted.weights.keys() == original.weights.keys()
    added = 1 if arch.startswith("gemma") else 0
    for weight_name, weight in original.weights.items():
        expected = weight + added if weight_name.endswith("norm") else weight
        assert torch.equal(converted.weights[weight_name], expected), weight_name
    same: dict[str, Any] = {
        "architecture": original.spec.architecture,
        "eos_token_ids": original.spec.eos_token_ids,
        "bos_token_id": original.spec.bos_token_id,
        "norm_weight_offset": original.spec.norm_weight_offset,
        "norm_eps": original.spec.norm_eps,  # stored in float32
    }
    assert replace(converted.spec, **same) == original.spec
    prompts = [[5, 9, 200, 41], [3 + i % 190 for i in range(60)]]
    params = SamplingParams(max_tokens=12)
    assert Stepper(converted).generate(requests_of(prompts, params)) == Stepper(original).generate(
        requests_of(prompts, params)
    )


def test_rope_factors_of_a_gguf_equal_the_scaling_they_were_made_from(tmp_path: Path) -> None:
    original = load_model(resolve_model(str(save_tiny("llama3_rope", tmp_path / "tiny"))), "float32")
    rope = original.spec.rope
    plain, _ = rotary_frequencies(rope.theta, rope.rotary_dim)
    scaled, _ = rotary_frequencies(rope.theta, rope.rotary_dim, rope.scaling, dict(rope.params))
    writer = gguf.GGUFWriter(tmp_path / "factors.gguf", "llama")
    for key, value in (("block_count", 1), ("context_length", 512), ("embedding_length", 64)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_head_count(4)
    writer.add_feed_forward_length(64)
    writer.add_rope_freq_base(rope.theta)
    writer.add_tensor("token_embd.weight", np.zeros((8, 64), dtype=np.float32))
    writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = spec_of(resolve_model(str(tmp_path / "factors.gguf"))).rope
    assert found.scaling == "factors"
    frequencies, factor = rotary_frequencies(found.theta, found.rotary_dim, found.scaling, dict(found.params))
    torch.testing.assert_close(frequencies, scaled, rtol=1e-6, atol=0)
    assert factor == 1.0
