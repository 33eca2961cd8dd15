"""Each native op against its definition in kernels.reference, as a tape of one op, on every instruction set here."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from biphase.cache.tensors import kv_block_bytes, kv_view
from kernels import reference
from kernels.cpu.library import (
    PANEL,
    Activation,
    Dtype,
    Epilogue,
    Kind,
    LibraryUnavailableError,
    Model,
    Op,
    Rows,
    Step,
    available_isas,
    load,
)
from kernels.reference_fp8 import FP8, dequantise_rows, exponents_of

try:
    ISAS = available_isas()
except LibraryUnavailableError as error:
    pytest.skip(str(error), allow_module_level=True)

DTYPES = {torch.float32: Dtype.F32, torch.bfloat16: Dtype.BF16}
KV_DTYPES = {FP8: Dtype.FP8, **DTYPES}
# Largest difference, relative to the largest value: of float32 sums, and of a result rounded to the dtype.
SUM_TOLERANCE = 3e-6
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 2e-2}

RunOp = Callable[..., None]


@pytest.fixture(params=ISAS, ids=lambda isa: isa.name)
def run_op(request: pytest.FixtureRequest) -> Iterator[RunOp]:
    """Runs one op: run_op(kind, dtype, model=..., step=..., **op fields); tensors stand for their addresses."""
    lib = load()

    def address(value: Any) -> Any:
        return value.data_ptr() if isinstance(value, Tensor) else value

    def run(
        kind: Kind, dtype: torch.dtype, model: dict[str, Any], step: dict[str, Any], threads: int = 2, **fields: Any
    ) -> None:
        op = Op(kind=kind, **{name: address(value) for name, value in fields.items()})
        sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": 16, "num_layers": 1} | model
        described = Model(dtype=DTYPES[dtype], **{name: address(value) for name, value in sizes.items()})
        program = lib.bp_program_create(ctypes.byref(described), ctypes.byref(op), 1, threads, 0, request.param)
        assert program
        given = Step(**{name: address(value) for name, value in step.items()})
        lib.bp_program_run(program, ctypes.byref(given))
        lib.bp_program_destroy(program)

    yield run


def pack(
    weight: Tensor, dtype: torch.dtype, run: int = 0, step: int = 0, first: int = 0, out: Tensor | None = None
) -> Tensor:
    n, k = weight.shape
    panels = -(-n // PANEL)
    out = torch.zeros(panels * PANEL * k, dtype=dtype) if out is None else out
    load().bp_pack(
        weight.data_ptr(), {torch.float16: Dtype.F16, **DTYPES}[weight.dtype], n, k, weight.stride(0),
        out.data_ptr(), DTYPES[dtype], first, run or n, step or n,
    )  # fmt: skip
    return out


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(values: Tensor, extra: int) -> Tensor:
    """The same values in rows that are longer than they need be; the rest is NaN."""
    wide = torch.full((values.shape[0], values.shape[1] + extra), float("nan"), dtype=values.dtype)
    wide[:, : values.shape[1]] = values
    return wide


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    actual, expected = actual.float(), expected.float()
    assert not actual.isnan().any()
    assert (actual - expected).abs().max() <= tolerance * expected.abs().max()


both_dtypes = pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
# The cache in the dtype of the program, or in fp8.
kv_dtypes = pytest.mark.parametrize("kv_dtype", [None, FP8], ids=["same", "fp8"])


@both_dtypes
@pytest.mark.parametrize("packed", [True, False])
def test_embedding(run_op: RunOp, dtype: torch.dtype, packed: bool) -> None:
    weight, tokens = random(70, 40, dtype=dtype), torch.tensor([69, 0, 31, 32, 5], dtype=torch.int32)
    out = torch.zeros(5, 48)
    given = pack(weight, dtype) if packed else weight
    run_op(
        Kind.EMBED, dtype, {}, {"num_tokens": 5, "token_ids": tokens},
        weight=given, packed=int(packed), in_stride=40, n=40, scale=2.0, output=out, out_stride=48,
    )  # fmt: skip
    assert torch.equal(out[:, :40], reference.embedding(tokens, weight.float(), 2.0))


@both_dtypes
@pytest.mark.parametrize("n", [8, 72, 576, 33])
def test_rms_norm(run_op: RunOp, dtype: torch.dtype, n: int) -> None:
    x, weight = random(7, n), random(n, seed=1)
    source, out = strided(x, 5), torch.zeros(7, n + 3, dtype=dtype)
    run_op(
        Kind.NORM, dtype, {}, {"num_tokens": 7},
        input=source, in_stride=n + 5, output=out, out_stride=n + 3, weight=weight, n=n, eps=1e-5,
    )  # fmt: skip
    assert_close(out[:, :n], reference.rms_norm(x, weight, 1e-5), TOLERANCE[dtype])
    assert not out[:, n:].any()


def test_rms_norm_of_chosen_rows(run_op: RunOp) -> None:
    x, weight, rows = random(7, 24), random(24, seed=1), torch.tensor([6, 2], dtype=torch.int32)
    out = torch.zeros(2, 24)
    run_op(
        Kind.NORM, torch.float32, {}, {"num_tokens": 7, "num_logits": 2, "logits_indices": rows}, rows=Rows.LOGITS_ROWS,
        input=x, in_stride=24, output=out, out_stride=24, weight=weight, n=24, eps=1e-5,
    )  # fmt: skip
    assert_close(out, reference.rms_norm(x, weight, 1e-5)[[6, 2]], SUM_TOLERANCE)


def test_rms_norm_and_add(run_op: RunOp) -> None:
    x, weight, residual = random(7, 72), random(72, seed=1), random(7, 72, seed=2)
    out = residual.clone()
    run_op(
        Kind.NORM_ADD, torch.float32, {}, {"num_tokens": 7},
        input=x, in_stride=72, output=out, out_stride=72, weight=weight, n=72, eps=1e-5,
    )  # fmt: skip
    assert_close(out, residual + reference.rms_norm(x, weight, 1e-5), SUM_TOLERANCE)


@both_dtypes
@pytest.mark.parametrize("m, n, k", [(1, 64, 32), (3, 203, 72), (13, 40, 576), (97, 33, 48), (230, 96, 64)])
def test_linear(run_op: RunOp, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x, weight, bias = random(m, k, dtype=dtype), random(n, k, seed=1, dtype=dtype), random(n + PANEL, seed=2)
    residual = random(m, n, seed=3)
    expected = reference.linear(x.double(), weight.double(), bias[:n].double())
    for epilogue, start in ((Epilogue.STORE_F32, torch.zeros(m, n)), (Epilogue.ADD_F32, residual)):
        out = strided(start, 6)
        run_op(
            Kind.GEMM, dtype, {}, {"num_tokens": m}, epilogue=epilogue,
            input=strided(x, 8), in_stride=k + 8, output=out, out_stride=n + 6,
            weight=pack(weight, dtype), bias=bias, n=n, k=k,
        )  # fmt: skip
        assert_close(out[:, :n], expected + start, SUM_TOLERANCE)
        assert out[:, n:].isnan().all()


@both_dtypes
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("m, n", [(1, 16), (5, 136), (40, 40)])
def test_gated_linear(run_op: RunOp, dtype: torch.dtype, activation: Activation, m: int, n: int) -> None:
    x, gate, up = random(m, 64, dtype=dtype), random(n, 64, seed=1, dtype=dtype), random(n, 64, seed=2, dtype=dtype)
    packed = torch.zeros(-(-n // 16) * PANEL * 64, dtype=dtype)
    pack(gate, dtype, 16, PANEL, 0, packed)
    pack(up, dtype, 16, PANEL, 16, packed)
    out = torch.zeros(m, n, dtype=dtype)
    run_op(
        Kind.GEMM, dtype, {}, {"num_tokens": m}, epilogue=Epilogue.GATED, activation=activation,
        input=x, in_stride=64, output=out, out_stride=n, weight=packed, n=2 * n, k=64,
    )  # fmt: skip
    gated = reference.GATED_ACTIVATIONS["silu" if activation is Activation.SILU else "gelu_tanh"]
    expected = gated(reference.linear(x.float(), gate.float()), reference.linear(x.float(), up.float()))
    assert_close(out, expected, TOLERANCE[dtype])


def test_activations_at_extremes(run_op: RunOp) -> None:
    """One column of ones: the gate is the input itself."""
    x = torch.tensor([[-1e4], [-100.0], [-88.0], [-1e-3], [0.0], [1e-3], [3.0], [88.0], [100.0], [1e4]])
    x = torch.cat((x, torch.zeros(10, 1)), dim=1)
    gate = torch.zeros(16, 2)
    gate[:, 0] = 1.0
    packed = torch.zeros(PANEL * 2)
    # `up` cannot be a constant without a bias, so x * act(x) is compared.
    pack(gate, torch.float32, 16, PANEL, 0, packed)
    pack(gate, torch.float32, 16, PANEL, 16, packed)
    for activation, name in ((Activation.SILU, "silu"), (Activation.GELU_TANH, "gelu_tanh")):
        out = torch.zeros(10, 16)
        run_op(
            Kind.GEMM, torch.float32, {}, {"num_tokens": 10}, epilogue=Epilogue.GATED, activation=activation,
            input=x, in_stride=2, output=out, out_stride=16, weight=packed, n=32, k=2,
        )  # fmt: skip
        expected = reference.GATED_ACTIVATIONS[name](x[:, :1].double(), x[:, :1].double()).expand(10, 16)
        torch.testing.assert_close(out.double(), expected.double(), rtol=3e-6, atol=1e-29)


def test_logits_are_capped(run_op: RunOp) -> None:
    x, weight = random(3, 64), random(50, 64, seed=1)
    logits = torch.full((3, 50), float("nan"))
    run_op(
        Kind.GEMM, torch.float32, {}, {"num_tokens": 9, "num_logits": 3, "logits": logits}, rows=Rows.LOGITS_ROWS,
        epilogue=Epilogue.LOGITS, softcap=5.0, input=x, in_stride=64, weight=pack(weight, torch.float32), n=50, k=64,
    )  # fmt: skip
    assert_close(logits, reference.softcap(reference.linear(x, weight), 5.0), SUM_TOLERANCE)


@pytest.mark.parametrize("source", [torch.float16, torch.float32, torch.bfloat16], ids=str)
def test_pack_converts(run_op: RunOp, source: torch.dtype) -> None:
    weight = random(40, 32, dtype=source)
    weight[0, :4] = torch.tensor([0.0, -0.0, 1e-6, 60000.0]).to(source)
    for dtype in DTYPES:
        out = torch.zeros(40, 32)
        run_op(
            Kind.EMBED, dtype, {}, {"num_tokens": 40, "token_ids": torch.arange(40, dtype=torch.int32)},
            weight=pack(weight, dtype), packed=1, n=32, scale=1.0, output=out, out_stride=32,
        )  # fmt: skip
        assert torch.equal(out, weight.to(dtype).float())


class Paged:
    """Ragged sequences over a cache whose unused slots are NaN and whose blocks are shuffled."""

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """lengths: (query tokens, context altogether) of each sequence."""
        num_blocks = sum(-(-total // block_size) for _, total in lengths) + 3
        shape = (2, num_kv_heads, block_size, head_dim, kv_dtype or dtype)
        # All bits set is NaN in every dtype.
        raw = torch.full((num_blocks, kv_block_bytes(*shape)), 255, dtype=torch.uint8)
        self.cache = kv_view(raw, *shape)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7)).tolist()
        width = max(-(-total // block_size) for _, total in lengths) + 2
        self.tables = torch.full((len(lengths), width), 2**30, dtype=torch.int32)
        slots: list[int] = []
        for i, (queries, total) in enumerate(lengths):
            blocks = [order.pop() for _ in range(-(-total // block_size))]
            self.tables[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
            at = torch.tensor([blocks[t // block_size] * block_size + t % block_size for t in range(total)])
            k, v = (random(total, num_kv_heads, head_dim, seed=10 * i + s, dtype=dtype) for s in (1, 2))
            reference.store_kv(k, v, self.cache, 1, at)
            slots += at[total - queries :].tolist()
        self.slots = torch.tensor(slots, dtype=torch.int64)
        self.num_tokens = len(slots)
        self.starts = torch.tensor([0, *(q for q, _ in lengths)], dtype=torch.int32).cumsum(0).int()
        self.seq_lens = torch.tensor([total for _, total in lengths], dtype=torch.int32)
        self.positions = torch.cat([torch.arange(t - q, t) for q, t in lengths]).int()
        self.model = {
            "num_kv_heads": num_kv_heads, "head_dim": head_dim, "block_size": block_size,
            "num_layers": 2, "kv_cache": self.cache, "norm_eps": 1e-5, "kv_dtype": KV_DTYPES[self.cache.dtype],
        }  # fmt: skip
        self.step = {
            "num_tokens": self.num_tokens, "num_seqs": len(lengths), "block_table_stride": width,
            "positions": self.positions, "slot_mapping": self.slots, "query_start_loc": self.starts,
            "seq_lens": self.seq_lens, "block_tables": self.tables,
        }  # fmt: skip


@both_dtypes
@kv_dtypes
@pytest.mark.parametrize("block_size", [1, 8, 16, 64])
@pytest.mark.parametrize("heads, kv_heads, head_dim", [(9, 3, 64), (8, 1, 16), (4, 4, 40), (2, 1, 128), (20, 1, 22)])
def test_attention(
    run_op: RunOp,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    block_size: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
) -> None:
    lengths = [(1, 1), (1, 64), (1, 65), (3, 130), (70, 71), (1, 200), (33, 190)]
    paged = Paged(lengths, kv_heads, head_dim, block_size, dtype, kv_dtype)
    q = random(paged.num_tokens, heads * head_dim, seed=99, dtype=dtype)
    for window, softcap in ((None, 0.0), (40, 0.0), (None, 3.0)):
        out = torch.zeros_like(q)
        run_op(
            Kind.ATTENTION, dtype, paged.model | {"num_heads": heads}, paged.step, layer=1, window=window or 0,
            scale=0.3, softcap=softcap, input=q, in_stride=q.shape[1], output=out, out_stride=q.shape[1],
        )  # fmt: skip
        expected = reference.paged_attention(
            q.view(-1, heads, head_dim),
            paged.cache,
            1,
            paged.starts,
            paged.seq_lens,
            paged.tables,
            0.3,
            window,
            softcap,
        )
        assert_close(out.view(-1, heads, head_dim), expected, TOLERANCE[dtype])


@pytest.mark.parametrize("value", [30.0, -30.0])
def test_attention_with_large_scores(run_op: RunOp, value: float) -> None:
    """Scores of thousands: one key takes everything, nothing overflows."""
    paged = Paged([(5, 100)], 1, 16, 16, torch.float32)
    q = random(5, 16) * value
    out = torch.zeros_like(q)
    run_op(
        Kind.ATTENTION, torch.float32, paged.model, paged.step, layer=1, scale=10.0,
        input=q, in_stride=16, output=out, out_stride=16,
    )  # fmt: skip
    expected = reference.paged_attention(
        q.view(5, 1, 16), paged.cache, 1, paged.starts, paged.seq_lens, paged.tables, 10.0
    )
    assert_close(out.view(5, 1, 16), expected, 1e-4)


@both_dtypes
@kv_dtypes
@pytest.mark.parametrize(
    "head_dim, rotary_dim, norms", [(64, 64, False), (16, 16, True), (40, 20, False), (22, 6, True)]
)
def test_rotary_and_store(
    run_op: RunOp, dtype: torch.dtype, kv_dtype: torch.dtype | None, head_dim: int, rotary_dim: int, norms: bool
) -> None:
    heads, kv_heads = 6, 2
    paged = Paged([(1, 9), (5, 30), (2, 2)], kv_heads, head_dim, 8, dtype, kv_dtype)
    other = Paged([(1, 9), (5, 30), (2, 2)], kv_heads, head_dim, 8, dtype, kv_dtype)
    paged.slots[-1] = -1
    before = numbers(paged.cache)
    sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
    qkv = random(paged.num_tokens, sum(sizes))
    cos, sin = reference.rotary_table(10000.0, rotary_dim, 64)
    weights = {"q_norm": random(head_dim, seed=5), "k_norm": random(head_dim, seed=6)} if norms else {}
    out = torch.zeros(paged.num_tokens, sizes[0], dtype=dtype)
    table = torch.cat((cos, sin), dim=1).contiguous()
    run_op(
        Kind.ROPE_STORE, dtype, paged.model | {"num_heads": heads, "rotary_dim": rotary_dim}, paged.step, layer=1,
        input=qkv, in_stride=qkv.shape[1], output=out, out_stride=sizes[0], rope=table, **weights,
    )  # fmt: skip
    q, k, v = (part.view(paged.num_tokens, -1, head_dim) for part in qkv.split(sizes, dim=1))
    if norms:
        q, k = reference.rms_norm(q, weights["q_norm"], 1e-5), reference.rms_norm(k, weights["k_norm"], 1e-5)
    q, k = (reference.rotary(part, paged.positions, cos, sin) for part in (q, k))
    reference.store_kv(k, v, other.cache, 1, paged.slots)
    assert_close(out.view(q.shape), q, TOLERANCE[dtype])
    actual, expected = numbers(paged.cache), numbers(other.cache)
    assert torch.equal(actual.isnan(), expected.isnan())
    # Where sums differ in their last bit, a value may round to the code beside: 1/16 of it away at most.
    assert_close(actual.nan_to_num(), expected.nan_to_num(), TOLERANCE[dtype] if kv_dtype is None else 1 / 16)
    if kv_dtype is not None:
        assert float((actual != expected).logical_and(~expected.isnan()).float().mean()) < 1e-3
    assert torch.equal(actual[:, 0].nan_to_num(), before[:, 0].nan_to_num())


def test_fp8_rows_at_extremes(run_op: RunOp) -> None:
    """The program's codes are the definition's, bit for bit: every code, ties, too large, too small, not a number."""
    head_dim = 32
    every_code = torch.arange(128, dtype=torch.uint8)[:127].view(FP8).float()
    ties = (every_code[1:] + every_code[:-1]) / 2
    rows = [
        torch.cat((every_code, torch.zeros(1))).view(4, 32) * 2.0**-3,
        torch.cat((ties, torch.tensor([448.0, -448.0]))).view(4, 32),
        random(4, 32) * torch.tensor([[1e-30], [1e-6], [1e3], [1e9]]),
        torch.zeros(1, 32),
        torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [1e-42]]) * torch.ones(4, 32),
    ]
    k = torch.cat(rows).unsqueeze(1)
    num_tokens = k.shape[0]
    v = -k.flip(0)
    paged = Paged([(num_tokens, num_tokens)], 1, head_dim, 8, torch.float32, FP8)
    other = Paged([(num_tokens, num_tokens)], 1, head_dim, 8, torch.float32, FP8)
    qkv = torch.cat((torch.zeros_like(k), k, v), dim=-1).view(num_tokens, -1)
    table = torch.cat(reference.rotary_table(1e4, 2, num_tokens), dim=1).contiguous()
    table[:, 0], table[:, 1] = 1.0, 0.0  # turns by nothing
    out = torch.zeros(num_tokens, head_dim)
    run_op(
        Kind.ROPE_STORE, torch.float32, paged.model | {"num_heads": 1, "rotary_dim": 2}, paged.step, layer=1,
        input=qkv, in_stride=3 * head_dim, output=out, out_stride=head_dim, rope=table,
    )  # fmt: skip
    reference.store_kv(k, v, other.cache, 1, paged.slots)
    exponents = exponents_of(other.cache)
    assert torch.equal(exponents_of(paged.cache), exponents)
    held = (exponents != 255).unsqueeze(-1)
    codes = (x.view(torch.uint8).masked_fill(~held, 0) for x in (paged.cache, other.cache))
    assert torch.equal(*codes)


def numbers(cache: Tensor) -> Tensor:
    """What a cache holds, as float32, a copy."""
    if cache.dtype != FP8:
        return cache.float()
    return dequantise_rows(cache.view(torch.uint8).clone().view(FP8), exponents_of(cache))
