"""fp8, compressed-tensors, AWQ and GPTQ checkpoints against transformers on the weights that they stand for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from biphase.errors import ModelLoadError
from biphase.model.executors import ExecutorOptions, choose_executor
from biphase.model.families import spec_of
from biphase.model.forward import ForwardBatch
from biphase.model.loader import LoadedModel, load_model
from biphase.model.packed import PackedMatrix
from biphase.model.quantised import ChannelMatrix, dense
from biphase.model.source import resolve_model
from tests.model.packed_checkpoints import KINDS, save_packed
from tests.stepping import poisoned_cache
from tests.tiny_models import AutoModel

TOKENS = [5, 9, 200, 41, 7, 7, 110, 3, 64, 18]


def logits(model: LoadedModel, native: bool) -> torch.Tensor:
    options = ExecutorOptions(16, 16, 16, 32, 1, 0, native=native, cuda_graphs=False)
    forward = choose_executor(model, poisoned_cache(model.spec, 2, 16, model.dtype), options).forward
    at = torch.arange(len(TOKENS), dtype=torch.int32)
    ends = torch.tensor([0, len(TOKENS)], dtype=torch.int32)
    tokens, tables = torch.tensor(TOKENS, dtype=torch.int32), torch.tensor([[1]], dtype=torch.int32)
    return forward(ForwardBatch(tokens, at, at.long() + 16, ends, ends[1:], tables, at)).clone()


def transformers_logits(folder: Path) -> torch.Tensor:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_the_dequantised_model(kind: str, tmp_path: Path) -> None:
    packed, plain = save_packed(kind, tmp_path)
    expected = transformers_logits(plain)
    scale = float(expected.abs().max())
    for native in (False, True):
        found = logits(load_model(resolve_model(str(packed)), "float32"), native)
        assert float((found - expected).abs().max()) < 1e-5 * scale
    # What bfloat16 rounds, as with any other checkpoint.
    found = logits(load_model(resolve_model(str(packed)), "bfloat16"), native=True)
    assert float((found - expected).abs().max()) < 0.05 * scale


def test_experts_are_packed_too(tmp_path: Path) -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
    packed, plain = save_packed("fp8 blocks", tmp_path, "qwen3_moe", **experts)
    expected = transformers_logits(plain)
    found = logits(load_model(resolve_model(str(packed)), "float32"), native=False)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_kept_packed_they_stand_for_the_same(kind: str, tmp_path: Path) -> None:
    packed, plain = save_packed(kind, tmp_path)
    kept = load_model(resolve_model(str(packed)), "float32", keep_packed=True)
    wanted = load_model(resolve_model(str(plain)), "float32").weights
    matrices = {name for name, weight in kept.weights.items() if isinstance(weight, PackedMatrix)}
    assert {name.rpartition(".")[2] for name in matrices} == {"q", "k", "v", "o", "gate", "up", "down"}
    for name, weight in kept.weights.items():
        other = wanted[name]
        assert isinstance(other, torch.Tensor)
        assert weight.shape == other.shape
        torch.testing.assert_close(dense(weight, torch.float32), other, rtol=1e-6, atol=1e-7)
    assert kept.num_weight_bytes < 0.6 * sum(w.nbytes for w in wanted.values() if isinstance(w, torch.Tensor))
    half = {name for name in matrices if name.endswith((".q", ".o"))}
    for_some = kept.weights_for(lambda matrix: any(matrix is kept.weights[name] for name in half))
    # Of q, k and v all or none stay packed.
    still = {name for name, weight in for_some.items() if isinstance(weight, PackedMatrix)}
    assert still == {name for name in half if name.endswith(".o")}


def test_int8_rounds_what_was_decoded(tmp_path: Path) -> None:
    packed, plain = save_packed("awq", tmp_path)
    first, second = (
        load_model(resolve_model(str(folder)), "float32", quantization="int8").weights for folder in (packed, plain)
    )
    for name, weight in first.items():
        other = second[name]
        assert isinstance(weight, ChannelMatrix) == isinstance(other, ChannelMatrix)
        if isinstance(weight, ChannelMatrix) and isinstance(other, ChannelMatrix):
            assert torch.equal(weight.values, other.values)


@pytest.mark.parametrize("kind", ["fp8 blocks", "awq"])
def test_routers_and_tables_are_decoded_wherever_they_come_packed(kind: str, tmp_path: Path) -> None:
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "vocab_size": 256}
    ending = ("_proj.weight", "mlp.gate.weight", "embed_tokens.weight")
    packed, plain = save_packed(kind, tmp_path, "qwen3_moe", ending, tie_word_embeddings=False, **experts)
    expected = transformers_logits(plain)
    found = logits(load_model(resolve_model(str(packed)), "float32"), native=False)
    assert float((found - expected).abs().max()) < 1e-5 * float(expected.abs().max())
    rounded = load_model(resolve_model(str(packed)), "float32", quantization="int8").weights
    kept = load_model(resolve_model(str(packed)), "float32", keep_packed=True).weights
    wanted = load_model(resolve_model(str(plain)), "float32").weights
    for name in ("embed", "layers.0.router"):
        other = wanted[name]
        assert isinstance(other, torch.Tensor)
        for weight in (rounded[name], kept[name]):
            assert isinstance(weight, torch.Tensor)
            torch.testing.assert_close(weight, other, rtol=1e-6, atol=1e-7)
    assert isinstance(rounded["layers.0.q"], ChannelMatrix) and isinstance(kept["layers.0.q"], PackedMatrix)


GPTQ = KINDS["gptq"][0]
COMPRESSED = KINDS["compressed fp8 channels"][0]


def with_weights(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return COMPRESSED | {"config_groups": {"group_0": group | {"weights": group["weights"] | changes}}}


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (
            {"quant_method": "bitsandbytes"},
            "quantization method 'bitsandbytes' is not supported; supported are awq, compressed-tensors, fp8, gptq.",
        ),
        ({}, "quantization method 'none' is not supported"),
        ("int4", "quantization_config is no object"),
        ({"quant_method": "awq", "bits": 3}, "method awq with bits 3 is not supported; supported: 4"),
        ({"quant_method": "awq", "version": "gemv"}, "with version 'gemv' is not supported; supported: gemm"),
        (GPTQ | {"bits": 3}, "method gptq with bits 3 is not supported; supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin' is not supported; supported: gptq, gptq_v2"),
        (GPTQ | {"dynamic": {"-:.*": {}}}, "settings per module (dynamic)"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "with fmt 'e5m2' is not supported; supported: e4m3"),
        ({"quant_method": "fp8", "weight_block_size": 128}, "two sizes are needed"),
        (COMPRESSED | {"format": "pack-quantized"}, "with format 'pack-quantized' is not supported"),
        (with_weights(num_bits=4), "with num_bits 4 is not supported; supported: 8"),
        (with_weights(strategy="group"), "with strategy 'group' is not supported; supported: tensor, channel, block"),
        (with_weights(symmetric=False), "zero points"),
    ],
)
def test_other_packings_are_refused_by_name(tmp_path: Path, config: Any, part: str) -> None:
    packed, _ = save_packed("awq", tmp_path)
    path = packed / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    with pytest.raises(ModelLoadError) as refused:
        spec_of(resolve_model(str(packed)))
    assert part in refused.value.message


@pytest.mark.parametrize(
    ("kind", "part", "change", "message"),
    [
        ("awq", "q_proj.scales", None, "the checkpoint lacks model.layers.0.self_attn.q_proj.scales"),
        ("awq", "q_proj.qzeros", lambda t: t[:1], "q_proj.qzeros is I32 [1, 8]; its packing calls for I32 [4, 8]"),
        ("gptq", "q_proj.qweight", lambda t: t.float(), "its packing calls for I32 [16, 64]"),
        ("gptq", "q_proj.g_idx", lambda t: t + 1, "q_proj.g_idx names unknown groups"),
        ("fp8 blocks", "q_proj.weight_scale_inv", lambda t: t[:0], "weight_scale_inv is BF16 [0, 1]"),
    ],
)
def test_damaged_checkpoints_are_refused(tmp_path: Path, kind: str, part: str, change: Any, message: str) -> None:
    packed, _ = save_packed(kind, tmp_path)
    tensors = load_file(packed / "model.safetensors")
    name = f"model.layers.0.self_attn.{part}"
    tensor = tensors.pop(name)
    if change is not None:
        tensors[name] = change(tensor).contiguous()
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError) as refused:
        load_model(resolve_model(str(packed)), "float32")
    assert message in refused.value.message
