"""Compiles every Triton kernel to machine code for a chip that need not be here, as the wrappers would launch it.

    python -m tests.kernels.compile_triton 80|90|100 [--full]

Run without TRITON_INTERPRET. Prints one JSON line for each compiled kernel: name, what it was compiled for, bytes of
machine code and of shared memory, registers and spilled bytes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from biphase.cache.tensors import kv_block_bytes, kv_view
from kernels import reference
from kernels.reference_fp8 import FP8
from kernels.triton_ops import decode, prefill, quantised, rows, sampling, store

# Heads, KV heads and head_dim of models that are served: Llama 3, SmolLM2, Qwen 2 (groups of 7), Gemma 2 and 3.
HEADS = [(32, 8, 128), (9, 3, 64), (14, 2, 64), (8, 4, 256)]
BLOCK_SIZES = [16, 32]


class Chip:
    """Stands in for a driver: names the target, owns no device."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread and bytes of stack (spills)."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+)", text), re.search(r"STACK:(\d+)", text)
    assert registers and stack, text
    return int(registers[1]), int(stack[1])


def attention_cases(dtype: torch.dtype, full: bool) -> Iterator[str]:
    lens = torch.tensor([300, 40], dtype=torch.int32)
    for heads, kv_heads, dim in HEADS if full or dtype == torch.bfloat16 else HEADS[:1]:
        first = full or (heads, kv_heads, dim) == HEADS[0]
        for block_size in BLOCK_SIZES if first else BLOCK_SIZES[:1]:
            cache = torch.zeros(2, 2, 2, kv_heads, block_size, dim, dtype=dtype)
            tables = torch.zeros(2, 64, dtype=torch.int32)
            variants: list[tuple[int | None, float]] = [(4096, 50.0) if dim == 256 else (None, 0.0)]
            if full:
                variants.append((4096, 0.0))
            for window, cap in variants:
                yield f"{heads}/{kv_heads} heads of {dim}, blocks of {block_size}, window {window}, cap {cap}"
                q = torch.zeros(16, heads, dim, dtype=dtype)
                starts = torch.tensor([0, 10, 16], dtype=torch.int32)
                prefill.paged_prefill_attention(q, cache, 1, starts, lens, tables, 0.1, window, cap, min_queries=2)
                for num_splits in (1, 8) if first else (8,):
                    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
                    decode.paged_decode_attention(
                        q[:2], cache, 1, starts, lens, tables, 0.1, window, cap, num_splits=num_splits
                    )
            if first:
                # Extents of 1 are compiled in.
                yield f"{heads}/{kv_heads} heads of {dim}, one sequence in one block"
                starts, one = torch.tensor([0, 16], dtype=torch.int32), lens[1:]
                prefill.paged_prefill_attention(q, cache, 1, starts, one, tables[:1, :1], 0.1, min_queries=2)
                decode.paged_decode_attention(q[:1], cache, 1, starts, one, tables[:1, :1], 0.1)
            if first and block_size == BLOCK_SIZES[0]:
                yield f"{heads}/{kv_heads} heads of {dim}, fp8"
                fp8_cases(dtype, heads, kv_heads, dim, block_size, lens, tables)
            yield f"{heads}/{kv_heads} heads of {dim}, blocks of {block_size}"
            qkv = torch.zeros(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
            cos, sin = reference.rotary_table(1e4, dim, 16)
            positions, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
            store.rope_store(qkv, positions, cos, sin, cache, 1, slots, heads)
            if first and block_size == BLOCK_SIZES[0]:
                norm = torch.ones(dim)
                store.rope_store(qkv, positions, cos, sin, cache, 1, slots, heads, q_norm=norm, k_norm=norm)
                k = torch.zeros(3, kv_heads, dim, dtype=dtype)
                store.store_kv(k, k, cache, 1, slots)
                store.rotary(k, positions, cos, sin)


def fp8_cases(
    dtype: torch.dtype, heads: int, kv_heads: int, dim: int, block_size: int, lens: Tensor, tables: Tensor
) -> None:
    """Everything that touches a KV cache, with one in fp8."""
    shape = (2, kv_heads, block_size, dim, FP8)
    cache = kv_view(torch.zeros(2, kv_block_bytes(*shape), dtype=torch.uint8), *shape)
    q, k = torch.zeros(16, heads, dim, dtype=dtype), torch.zeros(3, kv_heads, dim, dtype=dtype)
    starts = torch.tensor([0, 10, 16], dtype=torch.int32)
    prefill.paged_prefill_attention(q, cache, 1, starts, lens, tables, 0.1, min_queries=2)
    starts = torch.tensor([0, 1, 2], dtype=torch.int32)
    decode.paged_decode_attention(q[:2], cache, 1, starts, lens, tables, 0.1, num_splits=8)
    positions, slots = torch.zeros(3, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    cos, sin = reference.rotary_table(1e4, dim, 16)
    qkv = torch.zeros(3, (heads + 2 * kv_heads) * dim, dtype=dtype)
    store.rope_store(qkv, positions, cos, sin, cache, 1, slots, heads)
    store.store_kv(k, k, cache, 1, slots)


def other_cases(dtype: torch.dtype, full: bool) -> Iterator[str]:
    for hidden in [576, 4096, 8192] if full else [4096]:
        yield f"rows of {hidden}"
        x, weight = torch.zeros(2, hidden, dtype=dtype), torch.zeros(hidden)
        rows.rms_norm(x, weight, 1e-5)
        rows.fused_add_rms_norm(x, x, weight, 1e-5)
    rows.silu_mul(x, x)
    rows.gelu_tanh_mul(x, x)
    k, n = 4096, 1024
    for m in (1, 200) if full or dtype == torch.bfloat16 else (1,):
        yield f"{m} x {k} x {n}"
        x, scale = torch.zeros(m, k, dtype=dtype), torch.ones(n)
        quantised.int8_linear(x, torch.zeros(n, k, dtype=torch.int8), scale)
        quantised.fp8_linear(x, torch.zeros(n, k, dtype=torch.float8_e4m3fn), scale)
        blocks = torch.ones(n // 128, k // 128)
        quantised.fp8_linear(x, torch.zeros(n, k, dtype=torch.float8_e4m3fn), blocks, block=(128, 128))
        scales = torch.ones(k // 128, n, dtype=dtype)
        zeros = torch.zeros(k // 128, n // 8, dtype=torch.int32)
        quantised.awq_linear(x, torch.zeros(k, n // 8, dtype=torch.int32), zeros, scales)
        qweight = torch.zeros(k // 8, n, dtype=torch.int32)
        quantised.gptq_linear(x, qweight, zeros, scales)
        wide = torch.zeros(k // 4, n, dtype=torch.int32)
        quantised.gptq_linear(x, wide, torch.zeros(k // 128, n // 4, dtype=torch.int32), scales, bits=8)
        quantised.gptq_linear(x, qweight, zeros, scales, g_idx=torch.zeros(k, dtype=torch.int32))


def float32_cases() -> Iterator[str]:
    yield "logits"
    logits = torch.zeros(2, 9000)
    sampling.argmax(logits)
    sampling.draw(logits, torch.ones(2), torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    sampling.gather_logprobs(logits, torch.zeros(2, dtype=torch.int64))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("--full", action="store_true", help="every dtype with every shape")
    options = parser.parse_args()
    triton.runtime.driver.set_active(Chip(options.capability))
    what = SimpleNamespace(name="", dtype="")
    seen: set[int] = set()
    run: Any = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        if id(kernel) not in seen:
            seen.add(id(kernel))
            cubin = kernel.asm["cubin"]
            registers, stack = usage(cubin)
            line = {
                "kernel": kernel.metadata.name,
                "for": what.name,
                "dtype": what.dtype,
                "bytes": len(cubin),
                "shared": kernel.metadata.shared,
                "registers": registers,
                "spilled": stack,
            }
            print(json.dumps(line), flush=True)
        return kernel

    JITFunction.run = compile_only
    for dtype in (torch.bfloat16, torch.float16):
        what.dtype = str(dtype).removeprefix("torch.")
        for cases in (attention_cases(dtype, options.full), other_cases(dtype, options.full)):
            for what.name in cases:
                pass
    what.dtype = "float32"
    for what.name in float32_cases():
        pass


if __name__ == "__main__":
    main()
