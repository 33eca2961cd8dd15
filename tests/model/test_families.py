"""Every family token for token against transformers, in float32, on small random checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from biphase.model.families import spec_of, supported_families
from biphase.model.loader import load_model
from biphase.model.source import resolve_model
from biphase.request import SamplingParams
from tests.stepping import Stepper, requests_of
from tests.tiny_models import FAMILIES, expected_tokens, save_tiny

NUM_TOKENS = 24


def _prompts() -> list[list[int]]:
    draw = random.Random(7)
    return [[draw.randrange(3, 211) for _ in range(length)] for length in (1, 5, 33, 90, 17)]


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    prompts = _prompts()
    model = load_model(resolve_model(str(folder)), "float32")
    expected = expected_tokens(folder, prompts, NUM_TOKENS)
    for native in (False, True):  # where the compiled program is missing, or does not know the family: eager twice
        stepper = Stepper(model, max_num_batched_tokens=40, native=native)
        produced = stepper.generate(requests_of(prompts, SamplingParams(max_tokens=NUM_TOKENS)))
        assert produced == expected, stepper.runner.executor
    # A model that repeats one token would hide errors of position.
    assert max(len(set(tokens)) for tokens in expected) >= 4


def test_every_family_is_covered() -> None:
    covered = {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
    }
    assert set(supported_families()) == covered


def test_sharded_checkpoint_gives_the_same_weights(tmp_path: Path) -> None:
    single = save_tiny("qwen2", tmp_path / "single")
    sharded = save_tiny("qwen2", tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 1
    a, b = (load_model(resolve_model(str(folder)), "float32") for folder in (single, sharded))
    assert a.weights.keys() == b.weights.keys()
    assert all(bool((a.weights[name] == b.weights[name]).all()) for name in a.weights)


def test_end_tokens_of_generation_config_come_first(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 2]}')
    assert spec_of(resolve_model(str(folder))).eos_token_ids == (7, 2)
