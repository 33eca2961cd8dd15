"""How a safetensors checkpoint packs its matrices, as its `quantization_config` says. Stdlib only.

Owns the formats that are read, and refusing every other by name. What the bytes mean is `biphase.model.packed`'s; which
matrices are packed is told by the tensors that are there, since every format leaves some out (lm_head, routers).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from biphase.errors import ModelLoadError
from biphase.model.config import Config

METHODS = ("awq", "compressed-tensors", "fp8", "gptq")


@dataclass(frozen=True, slots=True)
class Packing:
    """`kind` is "scaled" (8-bit numbers and scales, of one tensor, row or block), "awq" or "gptq".

    `block` is what shares a scale, [rows, columns], where "scaled" has blocks; `scale` is the name of its tensor after
    the matrix's. A stored zero of "gptq" stands for `zero_offset` more.
    """

    kind: str
    bits: int
    block: tuple[int, int] | None = None
    scale: str = "weight_scale"
    zero_offset: int = 1


def packing_of(config: Config) -> Packing | None:
    """How matrices are packed; None where the config says nothing about it.

    Raises:
        ModelLoadError: a method, or a variant of one, that is not read.
    """
    given = config.get("quantization_config")
    if given is None:
        given = config.get("compression_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ModelLoadError("config.json: quantization_config is no object.")
    method = given.get("quant_method") or "none"
    readers = {"awq": _awq, "compressed-tensors": _compressed_tensors, "fp8": _fp8, "gptq": _gptq}
    if method not in readers:
        raise ModelLoadError(
            f"config.json: quantization method {method!r} is not supported; supported are {', '.join(METHODS)}."
        )
    return readers[method](given)


def _choose(method: str, name: str, value: Any, supported: tuple[Any, ...]) -> Any:
    if value not in supported or isinstance(value, bool):
        known = ", ".join(str(choice) for choice in supported)
        raise ModelLoadError(
            f"config.json: quantization method {method} with {name} {value!r} is not supported; supported: {known}."
        )
    return value


def _awq(given: Mapping[str, Any]) -> Packing:
    bits = _choose("awq", "bits", given.get("bits", given.get("w_bit", 4)), (4,))
    _choose("awq", "version", str(given.get("version", "gemm")).lower(), ("gemm",))
    return Packing("awq", bits)


def _gptq(given: Mapping[str, Any]) -> Packing:
    bits = _choose("gptq", "bits", given.get("bits", 4), (4, 8))
    form = _choose("gptq", "checkpoint_format", given.get("checkpoint_format") or "gptq", ("gptq", "gptq_v2"))
    if given.get("dynamic"):
        raise ModelLoadError(
            "config.json: quantization method gptq with settings per module (dynamic) is not supported."
        )
    return Packing("gptq", bits, zero_offset=1 if form == "gptq" else 0)


def _fp8(given: Mapping[str, Any]) -> Packing:
    _choose("fp8", "fmt", given.get("fmt") or "e4m3", ("e4m3",))
    block = given.get("weight_block_size")
    if block is None:
        return Packing("scaled", 8)
    return Packing("scaled", 8, _block("fp8", "weight_block_size", block), "weight_scale_inv")


def _block(method: str, name: str, value: Any) -> tuple[int, int]:
    is_pair = isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) and v > 0 for v in value)
    if not is_pair:
        raise ModelLoadError(f"config.json: quantization method {method}: {name} is {value!r}; two sizes are needed.")
    return value[0], value[1]


def _compressed_tensors(given: Mapping[str, Any]) -> Packing:
    method = "compressed-tensors"
    formats = ("float-quantized", "int-quantized", "naive-quantized")
    _choose(method, "format", given.get("format"), formats)
    groups = given.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise ModelLoadError(f"config.json: quantization method {method} names no config_groups.")
    found: set[Packing] = set()
    for group in groups.values():
        _choose(method, "format", group.get("format") or given["format"], formats)
        weights = group.get("weights") or {}
        bits = _choose(method, "num_bits", weights.get("num_bits"), (8,))
        _choose(method, "type", weights.get("type"), ("float", "int"))
        _choose(method, "strategy", weights.get("strategy"), ("tensor", "channel", "block"))
        if not weights.get("symmetric", True):
            raise ModelLoadError(f"config.json: quantization method {method} with zero points is not supported.")
        block = None
        if weights["strategy"] == "block":
            block = _block(method, "block_structure", weights.get("block_structure"))
        found.add(Packing("scaled", bits, block))
    if len(found) > 1:
        raise ModelLoadError(
            f"config.json: quantization method {method} with groups of several kinds is not supported."
        )
    return found.pop()
