"""From a ModelSource to a LoadedModel: spec and weights, ready for an executor. Owns the dtype rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from biphase.errors import ConfigError
from biphase.model.config import Config
from biphase.model.families import family_of, spec_of
from biphase.model.source import ModelSource
from biphase.model.spec import ModelSpec
from biphase.model.weights import load_weights

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `weights` are by canonical name (see `spec`): norms in float32, the rest in `dtype`."""

    source: ModelSource
    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    dtype: torch.dtype
    device: torch.device
    weights_digest: str
    tokenizer_digest: str

    @property
    def num_weight_bytes(self) -> int:
        return sum(weight.numel() * weight.element_size() for weight in self.weights.values())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that `name` means on `device`.

    "auto" is bfloat16 where the hardware multiplies it (CPU: AVX512-BF16 or AMX; CUDA: compute capability 8 and
    later), else float32 on CPU and float16 on CUDA.

    Raises:
        ConfigError: an unknown name.
    """
    if name in _DTYPES:
        return _DTYPES[name]
    if name != "auto":
        raise ConfigError(f"dtype {name!r} is not one of auto, {', '.join(_DTYPES)}.")
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
    return torch.bfloat16 if _cpu_multiplies_bfloat16() else torch.float32


def _cpu_multiplies_bfloat16() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith(("flags", "Features"))), "").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def load_model(
    source: ModelSource, dtype: str | torch.dtype = "auto", device: str | torch.device = "cpu"
) -> LoadedModel:
    """Reads config and weights.

    Raises:
        ModelLoadError: see `families.spec_of` and `weights.load_weights`.
        ConfigError: an unknown dtype.
    """
    device = torch.device(device)
    dtype = resolve_dtype(dtype, device) if isinstance(dtype, str) else dtype
    spec = spec_of(source)
    weights = load_weights(source, spec, family_of(Config(source.config())), dtype, device)
    return LoadedModel(source, spec, weights, dtype, device, source.weights_digest(), source.tokenizer_digest())
