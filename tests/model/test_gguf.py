"""GGUF weights: decoding bit for bit, the rotary order undone, and greedy tokens equal to transformers'."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoTokenizer, GgufConfig

from biphase.model.dequantise import dequantise
from biphase.model.gguf_config import gguf_name
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.request import SamplingParams
from tests.stepping import Stepper, requests_of
from tests.tiny_models import AutoModel, save_tiny

PROMPTS = (
    "The capital of France is",
    "Once upon a time, in a land far away, there lived a",
    "def fibonacci(n):\n",
    "x",
)
NUM_TOKENS = 16


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
    path = smollm2.source.path
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    reference = AutoModel.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
    ).eval()
    prompts = [tokenizer(text)["input_ids"] for text in PROMPTS]
    produced = Stepper(smollm2).generate(requests_of(prompts, SamplingParams(max_tokens=NUM_TOKENS)))
    for prompt, tokens in zip(prompts, produced, strict=True):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=NUM_TOKENS,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=2,
            )
        assert tokens == out[0, len(prompt) :].tolist()


def test_llama_written_as_gguf_gives_the_same_weights(tmp_path: Path) -> None:
    """A safetensors checkpoint, converted the way llama.cpp does it, reads back equal."""
    folder = save_tiny("llama_bias", tmp_path / "tiny")
    original = load_model(resolve_model(str(folder)), "float32")
    spec = original.spec
    writer = gguf.GGUFWriter(tmp_path / "tiny.gguf", "llama")
    writer.add_block_count(spec.num_layers)
    writer.add_context_length(spec.max_position_embeddings)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    writer.add_rope_freq_base(spec.rope.theta)
    for name, weight in original.weights.items():
        part = name.rsplit(".", 1)[-1]
        heads = {"q": spec.num_heads, "q_bias": spec.num_heads, "k": spec.num_kv_heads, "k_bias": spec.num_kv_heads}
        if part in heads:  # what llama.cpp's converter does
            shape = weight.shape
            weight = weight.reshape(heads[part], 2, spec.head_dim // 2, *shape[1:]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(gguf_name(name)[0], weight.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    converted = load_model(resolve_model(str(tmp_path / "tiny.gguf")), "float32")
    assert converted.weights.keys() == original.weights.keys()
    for name, weight in original.weights.items():
        assert torch.equal(converted.weights[name], weight), name
