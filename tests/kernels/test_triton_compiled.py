"""The Triton kernels compile to machine code that fits the chips, with no chip here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
# Bytes of shared memory that one program may have.
SHARED = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
KERNELS = {
    "argmax_kernel", "decode_kernel", "draw_kernel", "gated_kernel", "join_kernel", "logprob_kernel", "matmul_kernel",
    "norm_kernel", "prefill_kernel", "rope_store_kernel", "rotary_kernel", "store_kernel",
}  # fmt: skip

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def compiled() -> dict[int, list[dict[str, Any]]]:
    """All chips at once, each in a process that has not loaded triton for its interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    running = {
        capability: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compile_triton", str(capability)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment,
        )
        for capability in SHARED
    }
    found = {}
    for capability, process in running.items():
        out, errors = process.communicate()
        assert process.returncode == 0, errors[-4000:]
        found[capability] = [json.loads(line) for line in out.splitlines()]
    return found


@pytest.mark.parametrize("capability", SHARED)
def test_every_kernel_compiles_and_fits(compiled: dict[int, list[dict[str, Any]]], capability: int) -> None:
    lines = compiled[capability]
    assert {line["kernel"] for line in lines} == KERNELS
    assert {line["dtype"] for line in lines} == {"bfloat16", "float16", "float32"}
    for line in lines:
        assert line["bytes"] > 1000
        assert line["shared"] <= SHARED[capability], line
        assert line["registers"] <= 255
        # A handful of values on the stack is the compiler's choice; more would mean tiles that are too large.
        assert line["spilled"] <= 128, line
