"""Small random checkpoints in the formats that quantised models are published in, with the dequantised model beside.

The packing is written here from what the formats' own tools do, one value at a time where that is clearer, and shares
nothing with the code that reads it:
    AWQ     AutoAWQ's WQLinear_GEMM.from_linear
    GPTQ    AutoGPTQ's QuantLinear.pack ("gptq": zeros less one; "gptq_v2": zeros as they are)
    fp8     one scale, or weight_scale_inv for blocks of 128 x 128 as DeepSeek-V3 and Qwen3-FP8 ship it
    compressed-tensors  "float-quantized" and "int-quantized"
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny_models import save_tiny

SIZES = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


@dataclass(frozen=True)
class Packed:
    """A matrix as a checkpoint ships it: its tensors by their names after the matrix's; and what they stand for."""

    tensors: dict[str, Tensor]
    weight: Tensor


def pack_words(values: Tensor, bits: int, order: list[int]) -> Tensor:
    """int32 [rows, columns * bits / 32]: bits * i of a word hold column order[i] of its 32 / bits columns."""
    per_word = 32 // bits
    words = torch.zeros(values.shape[0], values.shape[1] // per_word, dtype=torch.int64)
    for word in range(words.shape[1]):
        for i in range(per_word):
            words[:, word] |= values[:, word * per_word + order[i]] << (bits * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def asymmetric(weight: Tensor, groups: Tensor, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Values [k, n], zeros [groups, n], scales float16 [groups, n] of weight [n, k]; groups [k] names each input's."""
    values = torch.empty(weight.shape[1], weight.shape[0], dtype=torch.int64)
    zeros, scales = [], []
    for group in range(int(groups.max()) + 1):
        part = weight[:, groups == group]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        scale = ((high - low) / (2**bits - 1)).half()
        # Not 0: "gptq" cannot tell that from 16.
        zero = (-low / scale.float()).round().clamp(1, 2**bits - 1).long()
        values[groups == group] = (
            ((part / scale.float().unsqueeze(1)).round() + zero.unsqueeze(1)).clamp(0, 2**bits - 1).long().T
        )
        zeros.append(zero)
        scales.append(scale)
    return values, torch.stack(zeros), torch.stack(scales)


def awq(weight: Tensor, group: int) -> Packed:
    group = weight.shape[1] if group == -1 else group
    groups = torch.arange(weight.shape[1]) // group
    values, zeros, scales = asymmetric(weight, groups, 4)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    plain = (values - zeros[groups]).float() * scales[groups].float()
    tensors = {"qweight": pack_words(values, 4, order), "qzeros": pack_words(zeros, 4, order), "scales": scales}
    return Packed(tensors, plain.T.contiguous())


def gptq(weight: Tensor, group: int, bits: int, *, sym: bool, desc_act: bool, v2: bool) -> Packed:
    group = weight.shape[1] if group == -1 else group
    groups = torch.arange(weight.shape[1]) // group
    if desc_act:
        groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(len(groups)))]
    values, zeros, scales = asymmetric(weight, groups, bits)
    if sym:
        zeros[:] = 2 ** (bits - 1)
        scales = torch.stack(
            [weight[:, groups == g].abs().amax(1) / (2 ** (bits - 1) - 1) for g in range(len(scales))]
        ).half()
        steps = (weight.T / scales[groups].float()).round().long() + zeros[groups]
        values = steps.clamp(0, 2**bits - 1)
    order = list(range(32 // bits))
    plain = (values - zeros[groups]).float() * scales[groups].float()
    tensors = {
        "qweight": pack_words(values.T.contiguous(), bits, order).T.contiguous(),
        "qzeros": pack_words(zeros if v2 else zeros - 1, bits, order),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }
    return Packed(tensors, plain.T.contiguous())


def scaled(
    weight: Tensor, dtype: torch.dtype, scale_name: str, scale_dtype: torch.dtype, block: tuple[int, int] | None
) -> Packed:
    """Block None: one scale for all; (1, 0): one for each row, as a column; else for each block."""
    largest = 448.0 if dtype == torch.float8_e4m3fn else 127.0
    n, k = weight.shape
    rows, columns = (n, k) if block is None else (block[0], block[1] or k)
    values = torch.empty(n, k, dtype=dtype)
    plain = torch.empty(n, k)
    scales = torch.empty(-(-n // rows), -(-k // columns), dtype=scale_dtype)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
            scales[i, j] = weight[at].abs().max() / largest
            steps = (weight[at] / scales[i, j].float()).clamp(-largest, largest)
            values[at] = steps.to(dtype) if dtype == torch.float8_e4m3fn else steps.round().to(dtype)
            plain[at] = values[at].float() * scales[i, j].float()
    return Packed({"weight": values, scale_name: scales.reshape(()) if block is None else scales}, plain)


def compressed(format_name: str, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    group = {"weights": weights, "input_activations": None, "output_activations": None, "targets": ["Linear"]}
    return {
        "quant_method": "compressed-tensors",
        "format": format_name,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "quantization_status": "compressed",
    }


FP8, INT8, BF16 = torch.float8_e4m3fn, torch.int8, torch.bfloat16
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
# name -> (quantization_config, how a matrix is packed)
KINDS: dict[str, tuple[dict[str, Any], Callable[[Tensor], Packed]]] = {
    "fp8 tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        lambda w: scaled(w, FP8, "weight_scale", torch.float32, None),
    ),
    "fp8 blocks": (
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        lambda w: scaled(w, FP8, "weight_scale_inv", BF16, (128, 128)),
    ),
    "compressed fp8 channels": (
        compressed("float-quantized", "float", "channel"),
        lambda w: scaled(w, FP8, "weight_scale", BF16, (1, 0)),
    ),
    "compressed fp8 blocks": (
        compressed("float-quantized", "float", "block", block_structure=[64, 32]),
        lambda w: scaled(w, FP8, "weight_scale", torch.float32, (64, 32)),
    ),
    "compressed int8": (
        compressed("int-quantized", "int", "channel"),
        lambda w: scaled(w, INT8, "weight_scale", BF16, (1, 0)),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, lambda w: awq(w, 32)),
    "awq one group": ({"quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM"}, lambda w: awq(w, -1)),
    "gptq": (_GPTQ, lambda w: gptq(w, 32, 4, sym=True, desc_act=False, v2=False)),
    "gptq ordered": (
        _GPTQ | {"sym": False, "desc_act": True},
        lambda w: gptq(w, 32, 4, sym=False, desc_act=True, v2=False),
    ),
    "gptq 8 bits": (
        _GPTQ | {"bits": 8, "group_size": -1, "sym": False},
        lambda w: gptq(w, -1, 8, sym=False, desc_act=False, v2=False),
    ),
    "gptq v2": (
        _GPTQ | {"checkpoint_format": "gptq_v2", "sym": False},
        lambda w: gptq(w, 32, 4, sym=False, desc_act=False, v2=True),
    ),
}


def save_packed(
    kind: str, folder: Path, family: str = "llama", ending: str | tuple[str, ...] = "_proj.weight", **changes: Any
) -> tuple[Path, Path]:
    """The packed checkpoint, and one of the plain weights that it stands for.

    Args:
        ending: of the names of the tensors that are packed.
    """
    plain = save_tiny(family, folder / "plain", **(SIZES | changes))
    packed = folder / "packed"
    shutil.copytree(plain, packed)
    described, pack = KINDS[kind]
    tensors = load_file(plain / "model.safetensors")
    shipped = dict(tensors)
    for name, weight in tensors.items():
        if not name.endswith(ending):
            continue
        matrix = pack(weight)
        del shipped[name]
        shipped |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in matrix.tensors.items()}
        tensors[name] = matrix.weight
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(shipped, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": described}))
    return packed, plain
