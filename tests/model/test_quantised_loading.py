"""What --quantization loads: which matrices stay packed, what they stand for, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from biphase.errors import ConfigError
from biphase.model.loader import LoadedModel, load_model
from biphase.model.quantised import ChannelMatrix, QuantisedMatrix, dense
from biphase.model.source import resolve_model
from biphase.request import SamplingParams
from tests.stepping import Stepper, requests_of
from tests.tiny_models import save_tiny

PROMPTS = [[5, 9, 200, 41], [7], [3 + i % 190 for i in range(40)]]


@pytest.fixture(scope="module")
def smollm2_blocks() -> LoadedModel:
    return load_model(resolve_model(""), "bfloat16", quantization="gguf")


def test_blocks_stay_as_in_the_file(smollm2_blocks: LoadedModel) -> None:
    plain = load_model(resolve_model(""), "bfloat16")
    assert smollm2_blocks.weights.keys() == plain.weights.keys()
    encodings = {w.encoding for w in smollm2_blocks.weights.values() if isinstance(w, QuantisedMatrix)}
    assert encodings == {"Q4_1", "Q8_0"}
    for name, weight in plain.dense_weights().items():
        found = smollm2_blocks.weights[name]
        assert isinstance(found, QuantisedMatrix) == (weight.dim() == 2)
        assert torch.equal(dense(found, torch.bfloat16), weight), name
    assert smollm2_blocks.num_weight_bytes < 100e6 < 250e6 < plain.num_weight_bytes


def test_blocks_can_be_kept_without_rounding_anything() -> None:
    plain, kept = (load_model(resolve_model(""), "bfloat16", keep_blocks=keep) for keep in (False, True))
    assert kept.num_weight_bytes < 100e6
    params = SamplingParams(max_tokens=8, logprobs=5)
    prompts = [[1, 504, 3575, 282, 4649, 314], [5 + i for i in range(40)]]
    for native in (True, False):
        steppers = [Stepper(model, native=native, max_model_len=64) for model in (plain, kept)]
        first, second = (stepper.generate(requests_of(prompts, params)) for stepper in steppers)
        assert first == second


def test_greedy_text_stays_sensible(smollm2_blocks: LoadedModel) -> None:
    """Rounded activations may change a token that was nearly tied; most of a text stays."""
    prompt = [1, 504, 3575, 282, 4649, 314]
    params = SamplingParams(max_tokens=12)
    exact = load_model(resolve_model(""), "bfloat16")
    produced, expected = (
        Stepper(model, native=True, max_model_len=64).generate(requests_of([prompt], params))[0]
        for model in (smollm2_blocks, exact)
    )
    assert produced[:4] == expected[:4]


@pytest.mark.parametrize("name", ["llama", "qwen2", "gemma2"])
def test_int8_of_any_checkpoint(name: str, tmp_path: Path) -> None:
    source = resolve_model(str(save_tiny(name, tmp_path)))
    plain, rounded = load_model(source, "float32"), load_model(source, "float32", quantization="int8")
    for key, weight in plain.dense_weights().items():
        found = rounded.weights[key]
        multiplies = weight.dim() == 2 and (key != "embed" or plain.spec.tie_word_embeddings)
        assert isinstance(found, ChannelMatrix) == multiplies, key
        if isinstance(found, ChannelMatrix):
            assert bool(((dense(found, torch.float32) - weight).abs() <= found.scales.unsqueeze(1) * 0.501).all())
    stepper = Stepper(rounded, native=True)
    tokens = stepper.generate(requests_of(PROMPTS, SamplingParams(max_tokens=6)))
    assert [len(t) for t in tokens] == [6, 6, 6]


def test_plain_torch_runs_what_was_packed(tmp_path: Path) -> None:
    model = load_model(resolve_model(str(save_tiny("llama", tmp_path))), "float32", quantization="int8")
    stepper = Stepper(model, native=False)
    assert stepper.runner.executor == "eager"
    assert len(stepper.generate(requests_of(PROMPTS, SamplingParams(max_tokens=3)))) == 3


def test_a_router_is_not_rounded(tmp_path: Path) -> None:
    model = load_model(resolve_model(str(save_tiny("qwen3_moe", tmp_path))), "float32", quantization="int8")
    assert isinstance(model.weights["layers.0.router"], torch.Tensor)
    assert isinstance(model.weights["layers.0.experts.3.down"], ChannelMatrix)


def test_gguf_asks_for_such_a_file(tmp_path: Path) -> None:
    source = resolve_model(str(save_tiny("llama", tmp_path)))
    with pytest.raises(ConfigError, match="has no matrices in blocks of Q4_0, Q4_1 or Q8_0"):
        load_model(source, "float32", quantization="gguf")


def test_other_devices_are_refused(tmp_path: Path) -> None:
    source = resolve_model(str(save_tiny("llama", tmp_path)))
    with pytest.raises(ConfigError, match="is for CPU workers"):
        load_model(source, "float32", "meta", quantization="int8")
