"""From a ModelSource to a LoadedModel: spec and weights, ready for an executor. Owns the dtype rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from biphase.errors import ConfigError
from biphase.model.config import Config
from biphase.model.families import family_of, spec_of
from biphase.model.packed import PackedMatrix
from biphase.model.packing import packing_of
from biphase.model.quantised import QuantisedMatrix, Weight, dense
from biphase.model.source import ModelSource
from biphase.model.spec import ModelSpec
from biphase.model.weights import load_weights

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in memory. `weights` are by canonical name (see `spec`): norms in float32, the rest in `dtype` or packed.

    `quantization` is "none", "gguf" or "int8". With the latter two packed matrices are meant to be multiplied as
    integers; with "none" they may be there as well, and stand for their decoded values exactly.
    """

    source: ModelSource
    spec: ModelSpec
    weights: dict[str, Weight]
    dtype: torch.dtype
    device: torch.device
    weights_digest: str
    tokenizer_digest: str
    quantization: str = "none"

    @property
    def num_weight_bytes(self) -> int:
        return sum(w.nbytes if isinstance(w, torch.Tensor) else w.num_bytes for w in self.weights.values())

    def dense_weights(self) -> dict[str, torch.Tensor]:
        """Every weight as a tensor: `weights` itself where none is packed; packed ones are decoded at each call."""
        if all(isinstance(weight, torch.Tensor) for weight in self.weights.values()):
            return cast(dict[str, torch.Tensor], self.weights)
        return {name: dense(weight, self.dtype) for name, weight in self.weights.items()}

    def weights_for(self, multiplies: Callable[[PackedMatrix], bool]) -> dict[str, Weight]:
        """The weights for an executor that multiplies from packed matrices of checkpoints, if not from all of them.

        Of matrices that are joined (q, k, v; gate and up) either all stay packed or none.
        """
        kept = {name: isinstance(weight, PackedMatrix) and multiplies(weight) for name, weight in self.weights.items()}
        for name in self.weights:
            prefix, _, part = name.rpartition(".")
            for group in (("q", "k", "v"), ("gate", "up")):
                if part in group and not all(kept[f"{prefix}.{other}"] for other in group):
                    kept[name] = False
        return {name: w if kept[name] else dense(w, self.dtype) for name, w in self.weights.items()}


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
    source: ModelSource,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    quantization: str = "none",
    *,
    keep_blocks: bool = False,
    keep_packed: bool | None = None,
) -> LoadedModel:
    """Reads config and weights.

    Args:
        quantization, keep_blocks: see `weights.load_weights`.
        keep_packed: likewise; None: on other devices than the CPU.

    Raises:
        ModelLoadError: see `families.spec_of` and `weights.load_weights`.
        ConfigError: an unknown dtype, or a quantization that this model or device cannot have.
    """
    device = torch.device(device)
    if quantization != "none" and device.type != "cpu":
        raise ConfigError(f"--quantization {quantization} is for CPU workers; on {device.type} weights are not packed")
    dtype = resolve_dtype(dtype, device) if isinstance(dtype, str) else dtype
    spec = spec_of(source)
    config = Config(source.config())
    weights = load_weights(
        source,
        spec,
        family_of(config),
        dtype,
        device,
        quantization,
        keep_blocks,
        packing_of(config),
        # A GPU's kernels multiply from packed matrices; the CPU's do not know these kinds.
        keep_packed=device.type != "cpu" if keep_packed is None else keep_packed,
    )
    if quantization == "gguf" and not any(isinstance(weight, QuantisedMatrix) for weight in weights.values()):
        raise ConfigError(f"--quantization gguf: {source.path} has no matrices in blocks of Q4_0, Q4_1 or Q8_0")
    return LoadedModel(
        source, spec, weights, dtype, device, source.weights_digest(), source.tokenizer_digest(), quantization
    )
