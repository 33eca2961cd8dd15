"""The native program over small integers against eager float32 on the decoded weights, and its promise of batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from torch import Tensor

from biphase.model.eager import EagerForward
from biphase.model.quantised import QuantisedMatrix, Weight, dense, to_channels
from biphase.model.spec import ModelSpec
from biphase.ops.cpu_program import CpuProgram
from kernels.cpu.library import Isa
from tests.ops.test_cpu_program import BLOCK_SIZE, ISAS, MAX_TOKENS, SPECS, Driver, random_weights, run_mixed

# Largest difference of a logit, relative to the largest one: activations are rounded to 1/254 of their group's largest
# before each of the 14 matrices in a row.
TOLERANCE = 6e-2
# GGUF's blocks take multiples of 32.
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 32, "num_heads": 4, "num_kv_heads": 2}


def spec_of(name: str) -> ModelSpec:
    found = SPECS[name]
    rope = dataclasses.replace(found.rope, rotary_dim=16)
    return dataclasses.replace(found, **SIZES, rope=rope, attention_scale=32**-0.5)


def packed(weights: Mapping[str, Tensor], spec: ModelSpec, kind: str) -> dict[str, Weight]:
    out: dict[str, Weight] = {}
    for name, weight in weights.items():
        if weight.dim() != 2 or (name == "embed" and not spec.tie_word_embeddings):
            out[name] = weight
        elif kind == "int8":
            out[name] = to_channels(weight)
        else:
            # As files have it: the vocabulary in 8 bits.
            encoding = "Q8_0" if name in ("embed", "lm_head") else kind
            blocks = quantize(weight.float().numpy(), GGMLQuantizationType[encoding])
            out[name] = QuantisedMatrix(encoding, torch.from_numpy(blocks), weight.shape[1])
    return out


def drivers(name: str, kind: str, isa: Isa, dtype: torch.dtype, num_threads: int = 2) -> tuple[Driver, Driver]:
    """The native program with packed weights, and eager float32 with the same weights decoded."""
    spec = spec_of(name)
    native, eager = Driver(spec, torch.float32, None), Driver(spec, torch.float32, None)
    weights = packed(random_weights(spec, dtype), spec, kind)
    native.cache = native.cache.to(dtype)
    native.forward = CpuProgram(
        spec,
        weights,
        native.cache,
        block_size=BLOCK_SIZE,
        max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=8,
        max_model_len=512,
        dtype=dtype,
        num_threads=num_threads,
        isa=isa,
        integer_dot=True,
    )
    decoded = {key: dense(weight, torch.float32).float() for key, weight in weights.items()}
    eager.forward = EagerForward(spec, decoded, eager.cache, max_model_len=512)
    return native, eager


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "int8"])
@pytest.mark.parametrize("name", SPECS)
def test_logits_are_near_eager_s(name: str, kind: str, isa: Isa) -> None:
    native, eager = drivers(name, kind, isa, torch.bfloat16)
    actual, expected = run_mixed(native), run_mixed(eager)
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("kind", ["Q4_1", "int8"])
def test_batch_invariance(kind: str, isa: Isa) -> None:
    """The same bits alone, batched, chunked, token by token, and with another number of threads."""
    driver, _ = drivers("llama", kind, isa, torch.bfloat16)
    expected = driver.step([(driver.sequence(131, 1), 131)])
    chunked, _ = drivers("llama", kind, isa, torch.bfloat16, num_threads=3)
    other, company = chunked.sequence(131, 1), chunked.sequence(90, 9)
    pieces = [chunked.step([(other, 7)]), chunked.step([(company, 50), (other, 64)])[50:]]
    pieces += [chunked.step([(other, 1), (company, 1)])[:1] for _ in range(30)]
    pieces.append(chunked.step([(other, 30), (company, 10)])[:30])
    assert torch.equal(torch.cat(pieces), expected)


def test_float32_models_too() -> None:
    native, eager = drivers("gemma", "int8", ISAS[-1], torch.float32)
    actual, expected = run_mixed(native), run_mixed(eager)
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_matrices_of_mixed_encodings_still_run() -> None:
    """As many files have it: some parts in other blocks, which are decoded."""
    spec = spec_of("llama")
    weights = packed(random_weights(spec, torch.bfloat16), spec, "Q4_0")
    plain = random_weights(spec, torch.bfloat16)
    for layer in range(spec.num_layers):
        weights[f"layers.{layer}.v"] = plain[f"layers.{layer}.v"]
        weights[f"layers.{layer}.down"] = to_channels(plain[f"layers.{layer}.down"])
    native, eager = drivers("llama", "Q4_0", ISAS[-1], torch.bfloat16)
    native.forward = CpuProgram(
        spec, weights, native.cache, block_size=BLOCK_SIZE, max_num_batched_tokens=MAX_TOKENS, max_num_seqs=8,
        max_model_len=512, dtype=torch.bfloat16, integer_dot=True,
    )  # fmt: skip
    decoded = {key: dense(weight, torch.float32).float() for key, weight in weights.items()}
    eager.forward = EagerForward(spec, decoded, eager.cache, max_model_len=512)
    actual, expected = run_mixed(native), run_mixed(eager)
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()
