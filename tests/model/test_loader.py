"""The dtype rule, and that a model of the wanted dtype stays a view of its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from biphase.errors import ConfigError
from biphase.model import loader
from biphase.model.loader import load_model, resolve_dtype
from biphase.model.source import resolve_model
from tests.tiny_models import save_tiny

CPU = torch.device("cpu")


@pytest.mark.parametrize(("multiplies", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
def test_auto_is_bfloat16_only_where_the_cpu_multiplies_it(
    multiplies: bool, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "_cpu_multiplies_bfloat16", lambda: multiplies)
    assert resolve_dtype("auto", CPU) == expected


def test_named_dtypes_are_taken_as_they_are() -> None:
    assert resolve_dtype("float16", CPU) == torch.float16
    with pytest.raises(ConfigError, match="'int3' is not one of auto, bfloat16, float16, float32"):
        resolve_dtype("int3", CPU)


def test_weights_of_the_wanted_dtype_are_mapped_and_others_converted(tmp_path: Path) -> None:
    source = resolve_model(str(save_tiny("llama", tmp_path / "tiny")))
    mapped, converted = load_model(source, "float32"), load_model(source, "bfloat16")

    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[-1].endswith("model.safetensors")]

    def is_mapped(weight: torch.Tensor) -> bool:
        return any(start <= weight.data_ptr() < end for start, end in spans)

    assert all(is_mapped(weight) for weight in mapped.weights.values() if weight.dim() == 2)
    assert not any(is_mapped(weight) for weight in converted.weights.values())
    assert converted.weights["embed"].dtype == torch.bfloat16
    assert mapped.weights_digest == converted.weights_digest
    assert len(mapped.tokenizer_digest) == 64
