"""The ops around attention against the reference: slots, rotary, norms, activations, sampling."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from biphase.sampler.draw import uniforms
from kernels import reference
from kernels.reference_fp8 import FP8, exponents_of
from kernels.triton_ops import rows, sampling, store
from tests.kernels.triton_cases import DEVICE, DTYPES, draw, empty_cache, near, spread

SLOTS = [33, -1, 2, 0, 19]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_kv_heads", "block_size", "head_dim"), [(2, 16, 16), (3, 5, 24), (1, 32, 64)])
def test_store_kv(dtype: torch.dtype, num_kv_heads: int, block_size: int, head_dim: int) -> None:
    k, v = (draw(5, num_kv_heads, head_dim, dtype=dtype, seed=s) for s in (1, 2))
    slots = torch.tensor(SLOTS, device=DEVICE)
    expected, actual = (empty_cache(7, num_kv_heads, block_size, head_dim, dtype) for _ in range(2))
    reference.store_kv(k, v, expected, 1, slots)
    store.store_kv(spread(k), spread(v), actual, 1, slots)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("num_kv_heads", "block_size", "head_dim"), [(2, 16, 16), (3, 5, 24)])
def test_store_in_fp8_is_the_definition_bit_for_bit(num_kv_heads: int, block_size: int, head_dim: int) -> None:
    shape = (5, num_kv_heads, head_dim)
    k, v = draw(*shape, seed=1) * 2.0 ** draw(*shape, seed=3).mul(6).round(), draw(*shape, seed=2) * 1e5
    k[0, 0, 3], k[2, 1], v[3, 0, 0], v[3, 1, 1], k[4] = 448.0, 0.0, float("nan"), float("-inf"), k[4] * 1e-20
    slots = torch.tensor(SLOTS, device=DEVICE)
    expected, actual = (empty_cache(7, num_kv_heads, block_size, head_dim, FP8) for _ in range(2))
    reference.store_kv(k, v, expected, 1, slots)
    store.store_kv(spread(k), spread(v), actual, 1, slots)
    assert_same_rows(actual, expected)
    cos, sin = torch.ones(1, head_dim // 2, device=DEVICE), torch.zeros(1, head_dim // 2, device=DEVICE)
    positions = torch.zeros(5, dtype=torch.int32, device=DEVICE)
    qkv = torch.cat((k.nan_to_num(), k.nan_to_num(), v.nan_to_num(0.0, 0.0, 0.0)), dim=1).flatten(1)
    expected, actual = (empty_cache(7, num_kv_heads, block_size, head_dim, FP8) for _ in range(2))
    reference.store_kv(k, v.nan_to_num(0.0, 0.0, 0.0), expected, 1, slots)
    store.rope_store(qkv, positions, cos, sin, actual, 1, slots, num_kv_heads)
    assert_same_rows(actual, expected)


def assert_same_rows(actual: Tensor, expected: Tensor) -> None:
    exponents = exponents_of(expected)
    assert torch.equal(exponents_of(actual), exponents)
    # A row of NaN has whatever codes.
    no_number = (exponents == 255).unsqueeze(-1)
    codes = (x.view(torch.uint8).masked_fill(no_number, 0) for x in (actual, expected))
    assert torch.equal(*codes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (24, 16), (64, 64), (24, 24)])
def test_rotary(dtype: torch.dtype, head_dim: int, rotary_dim: int) -> None:
    x = draw(5, 9, head_dim, dtype=dtype)
    cos, sin = (t.to(DEVICE) for t in reference.rotary_table(1e4, rotary_dim, 100))
    positions = torch.tensor([0, 99, 7, 7, 50], dtype=torch.int32, device=DEVICE)
    near(store.rotary(spread(x), positions, cos, sin), reference.rotary(x, positions, cos, sin), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (9, 3), (12, 1)])
@pytest.mark.parametrize(("head_dim", "rotary_dim", "norm"), [(16, 16, True), (24, 16, True), (64, 64, False)])
def test_rope_store_is_norm_rotary_and_store(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int, rotary_dim: int, norm: bool
) -> None:
    total = num_heads + 2 * num_kv_heads
    qkv = draw(5, total * head_dim, dtype=dtype)
    cos, sin = (t.to(DEVICE) for t in reference.rotary_table(1e4, rotary_dim, 100))
    positions = torch.tensor([0, 99, 7, 7, 50], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor(SLOTS, device=DEVICE)
    q_norm, k_norm = (draw(head_dim, seed=s) for s in (5, 6))
    q, k, v = torch.split(qkv.view(5, total, head_dim), [num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norm:
        q, k = reference.rms_norm(q, q_norm, 1e-5, 1.0), reference.rms_norm(k, k_norm, 1e-5, 1.0)
    expected, actual = (empty_cache(7, num_kv_heads, 16, head_dim, dtype) for _ in range(2))
    reference.store_kv(reference.rotary(k, positions, cos, sin), v, expected, 1, slots)
    out = store.rope_store(
        spread(qkv),
        positions,
        cos,
        sin,
        actual,
        1,
        slots,
        num_heads,
        q_norm=q_norm if norm else None,
        k_norm=k_norm if norm else None,
        eps=1e-5,
        weight_offset=1.0,
    )
    near(out, reference.rotary(q, positions, cos, sin), dtype)
    assert torch.equal(actual.isnan(), expected.isnan())
    near(actual.nan_to_num(), expected.nan_to_num(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [16, 48, 576])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_norms(dtype: torch.dtype, dim: int, offset: float) -> None:
    x, residual, weight = draw(5, dim, dtype=dtype), draw(5, dim, dtype=dtype, seed=1), draw(dim, seed=2)
    near(rows.rms_norm(spread(x), weight, 1e-5, offset), reference.rms_norm(x, weight, 1e-5, offset), dtype)
    expected = reference.fused_add_rms_norm(x, residual, weight, 1e-5, offset)
    actual = rows.fused_add_rms_norm(spread(x), spread(residual), weight, 1e-5, offset)
    near(actual[0], expected[0], dtype)
    # The interpreter rounds to bfloat16 its own way.
    assert torch.equal(actual[1], expected[1]) or (DEVICE == "cpu" and dtype == torch.bfloat16)
    near(actual[1], expected[1], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_of_heads(dtype: torch.dtype) -> None:
    x, weight = draw(5, 3, 24, dtype=dtype), draw(24)
    near(rows.rms_norm(spread(x), weight, 1e-5), reference.rms_norm(x, weight, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [16, 1030])
def test_gated_activations(dtype: torch.dtype, columns: int) -> None:
    both = draw(3, 2 * columns, dtype=dtype) * 8
    gate, up = both[:, :columns], both[:, columns:]
    near(rows.silu_mul(gate, up), reference.silu_mul(gate, up), dtype)
    near(rows.gelu_tanh_mul(gate, up), reference.gelu_tanh_mul(gate, up), dtype)


def test_activations_of_large_values_do_not_overflow() -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=DEVICE)
    up = torch.ones_like(gate)
    near(rows.silu_mul(gate, up), reference.silu_mul(gate, up), torch.float32)
    near(rows.gelu_tanh_mul(gate, up), reference.gelu_tanh_mul(gate, up), torch.float32)


@pytest.mark.parametrize("vocab_size", [11, 5000, 9001])
def test_argmax_takes_the_first_of_equals(vocab_size: int) -> None:
    logits = spread(draw(4, vocab_size).round(decimals=1))
    assert sampling.argmax(logits).tolist() == [int(np.argmax(row)) for row in logits.cpu().numpy()]


@pytest.mark.parametrize("vocab_size", [11, 5000, 9001])
def test_draw_is_the_sampler_s(vocab_size: int) -> None:
    num_rows = 12
    logits = draw(num_rows, vocab_size) * 3
    logits[:, 3] = float("-inf")
    temperatures = torch.linspace(0.3, 2.0, num_rows, device=DEVICE)
    min_p = torch.tensor([0.0, 0.02] * 6, device=DEVICE)
    uniform = uniforms(range(num_rows), [7] * num_rows).to(DEVICE)
    weights = ((logits - logits.amax(-1, keepdim=True)) / temperatures.unsqueeze(1)).exp()
    weights = weights.masked_fill(weights < min_p.unsqueeze(1), 0.0)
    cumulative = weights.cumsum(-1, dtype=torch.float64)
    expected = torch.searchsorted(cumulative, uniform.unsqueeze(1) * cumulative[:, -1:], right=True).squeeze(1)
    drawn = sampling.draw(spread(logits), temperatures, min_p, uniform)
    assert torch.equal(drawn, expected)
    assert len(set(drawn.tolist())) > 3


def test_draw_at_the_ends_and_at_temperature_zero() -> None:
    logits = draw(3, 5000)
    zeros = torch.zeros(3, device=DEVICE)
    greedy = sampling.draw(logits, zeros, zeros, zeros.double())
    assert torch.equal(greedy, logits.argmax(-1))
    ends = torch.tensor([0.0, 1.0 - 2.0**-53, 0.5], dtype=torch.float64, device=DEVICE)
    drawn = sampling.draw(logits, zeros + 1.0, zeros, ends).tolist()
    assert (drawn[0], drawn[1]) == (0, 4999)


@pytest.mark.parametrize("vocab_size", [11, 9001])
def test_gather_logprobs(vocab_size: int) -> None:
    logits = draw(5, vocab_size) * 4
    tokens = torch.tensor([0, 10, 3, 7, 7], device=DEVICE)
    wide = logits.log_softmax(-1)
    chosen = wide.gather(1, tokens.unsqueeze(1)).squeeze(1)
    logprobs, ranks = sampling.gather_logprobs(spread(logits), tokens)
    near(logprobs, chosen, torch.float32)
    assert torch.equal(ranks, (logits > logits.gather(1, tokens.unsqueeze(1))).sum(-1) + 1)


def test_nothing_to_do() -> None:
    cache = empty_cache(7, 2, 4, 16, torch.float32)
    none = torch.empty(0, 2, 16, device=DEVICE)
    slots = torch.empty(0, dtype=torch.int64, device=DEVICE)
    store.store_kv(none, none, cache, 0, slots)
    assert bool(cache.isnan().all())
    assert rows.rms_norm(none, torch.ones(16, device=DEVICE), 1e-5).shape == (0, 2, 16)
    assert sampling.argmax(torch.empty(0, 9, device=DEVICE)).shape == (0,)
