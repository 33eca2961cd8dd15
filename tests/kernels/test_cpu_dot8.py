"""Matrix products over small integers, on every instruction set.

Exact but for float32 sums where activations are taken as rounded; within TO_EXACT where they are not.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from torch import Tensor

from biphase.model.quantised import ChannelMatrix, QuantisedMatrix, to_channels
from biphase.ops.cpu_dot8 import dot8_of, pack, packed_bytes, quantised_row_bytes
from kernels import reference_quantised
from kernels.cpu.library import (
    Dtype,
    Epilogue,
    Isa,
    Kind,
    LibraryUnavailableError,
    Model,
    Op,
    Step,
    available_isas,
    load,
)

try:
    ISAS = available_isas()
except LibraryUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

# Largest error of an element, relative to the largest element.
TO_ROUNDED, TO_EXACT = 1e-6, 1.5e-2
DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}


def blocks_of(weight: Tensor, encoding: str) -> QuantisedMatrix:
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    packed = quantize(weight.numpy(), GGMLQuantizationType[encoding])
    return QuantisedMatrix(encoding, torch.from_numpy(packed), weight.shape[1])


def matrix(kind: str, n: int, k: int) -> QuantisedMatrix | ChannelMatrix:
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(n)) * 0.05
    if kind == "int8":
        return to_channels(weight)
    found = blocks_of(weight, kind)
    if kind == "Q8_0":
        # Files of others may hold -128.
        found.blocks.view(torch.int8)[:, 2] = -128
    return found


def aligned(num_bytes: int) -> Tensor:
    space = torch.zeros(num_bytes + 64, dtype=torch.uint8)
    start = -space.data_ptr() % 64
    return space[start : start + num_bytes]


def rounded(x: Tensor) -> Tensor:
    """Groups of 32 in steps of 1/127 of their largest, as the kernels round them."""
    m, k = x.shape
    padded = torch.nn.functional.pad(x.float(), (0, -k % 32)).view(m, -1, 32)
    most = padded.abs().amax(-1, keepdim=True)
    # Torch's quotient may be off by a bit, which decides where a value lies in the middle.
    exact = np.divide(np.float32(127), most.numpy(), where=most.numpy() > 0, out=np.zeros_like(most.numpy()))
    steps = torch.from_numpy(exact)
    return ((padded * steps).round() * (most / 127.0)).view(m, -1)[:, :k]


def run(weight: QuantisedMatrix | ChannelMatrix, x: Tensor, isa: Isa, num_threads: int = 2) -> Tensor:
    """x quantised times the packed weight, float32 [rows, n], through a program of two ops."""
    lib, kind = load(), dot8_of([weight])
    assert kind is not None
    m, (n, k) = x.shape[0], weight.shape
    packed = aligned(packed_bytes(lib, [weight], kind, False))
    pack(lib, [weight], kind, False, packed.data_ptr())
    row_bytes = quantised_row_bytes(k)
    integers, out = aligned(m * row_bytes), torch.full((m, n), float("nan"))
    ops = (Op * 2)(
        Op(
            kind=Kind.QUANTISE,
            n=k,
            input=x.data_ptr(),
            in_stride=x.stride(0),
            output=integers.data_ptr(),
            out_stride=row_bytes,
        ),
        Op(
            kind=Kind.GEMM_DOT8,
            epilogue=Epilogue.STORE_F32,
            dot8=kind,
            n=n,
            k=k,
            input=integers.data_ptr(),
            in_stride=row_bytes,
            weight=packed.data_ptr(),
            output=out.data_ptr(),
            out_stride=n,
        ),
    )
    model = Model(
        dtype=DTYPES[x.dtype],
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rotary_dim=16,
        num_layers=1,
        block_size=16,
        max_tokens=m,
        max_seqs=1,
    )
    program = lib.bp_program_create(ctypes.byref(model), ctypes.byref(ops), 2, num_threads, 0, isa)
    assert program
    lib.bp_program_run(program, ctypes.byref(Step(num_tokens=m)))
    lib.bp_program_destroy(program)
    return out


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "int8"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 64), (3, 96, 576), (13, 40, 1536), (110, 33, 32)])
def test_products(m: int, n: int, k: int, kind: str, dtype: torch.dtype, isa: Isa) -> None:
    weight = matrix(kind, n, k)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[0, :32] = 0.0
    out = run(weight, x, isa)
    dense = weight.dequantise(torch.float32).double()
    for inputs, tolerance in ((rounded(x), TO_ROUNDED), (x, TO_EXACT)):
        expected = inputs.double() @ dense.T
        assert float((out - expected).abs().max()) <= tolerance * float(expected.abs().max())


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_int8_takes_any_number_of_inputs(isa: Isa) -> None:
    weight = matrix("int8", 50, 75)
    spread = torch.full((4, 90), float("nan"))
    spread[:, :75] = torch.randn(4, 75, generator=torch.Generator().manual_seed(1))
    out = run(weight, spread[:, :75], isa)
    expected = rounded(spread[:, :75]).double() @ weight.dequantise(torch.float32).double().T
    assert float((out - expected).abs().max()) <= TO_ROUNDED * float(expected.abs().max())


@pytest.mark.parametrize("isa", ISAS, ids=lambda isa: isa.name)
def test_extremes_do_not_saturate(isa: Isa) -> None:
    """All products at their largest, where sums of 16 bits would overflow."""
    values = torch.full((32, 64), 127, dtype=torch.int8)
    values[1::2] = -127
    weight = ChannelMatrix(values, torch.ones(32))
    x = torch.ones(2, 64)
    x[1] = -1.0
    out = run(weight, x, isa)
    assert torch.allclose(out, x @ values.float().T, rtol=1e-6)


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "int8"])
def test_a_row_is_the_same_whatever_runs_beside_it(kind: str) -> None:
    weight = matrix(kind, 100, 320)
    x = torch.randn(40, 320, generator=torch.Generator().manual_seed(2))
    whole = run(weight, x, ISAS[-1])
    for rows in ([0], [5, 39], list(range(7, 20))):
        assert torch.equal(run(weight, x[rows].contiguous(), ISAS[-1], num_threads=1), whole[rows])


def test_channels_are_the_reference_s() -> None:
    weight = torch.randn(5000, 40, generator=torch.Generator().manual_seed(0))
    weight[7] = 0
    found = to_channels(weight)
    values, scales = reference_quantised.quantise_int8(weight)
    torch.testing.assert_close(found.scales, scales)
    assert int((found.values.int() - values.int()).abs().max()) <= 1
    assert bool(((found.dequantise(torch.float32) - weight).abs() <= scales.unsqueeze(1) * 0.5001).all())


def test_parts_of_different_kinds_are_not_multiplied_as_integers() -> None:
    q4, q8 = matrix("Q4_0", 32, 32), matrix("Q8_0", 32, 32)
    assert dot8_of([q4, matrix("Q4_1", 32, 32)]) is not None
    assert dot8_of([q4, q8]) is None
    assert dot8_of([q4, torch.zeros(32, 32)]) is None
    assert dot8_of([QuantisedMatrix("Q6_K", torch.zeros(32, 210, dtype=torch.uint8), 256)]) is None
