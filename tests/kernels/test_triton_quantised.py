"""Matrix products with packed weights against the reference, and the reference against plain numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference_quantised as packed
from kernels.triton_ops import quantised
from tests.kernels.triton_cases import DEVICE, DOT_DTYPES, draw, near, spread

K, N = 128, 72


def ints(high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int64)


def pack(values: Tensor, nibbles: tuple[int, ...]) -> Tensor:
    """The inverse of `unpack_nibbles`, written the slow way: eight values of the last dimension to a word."""
    words = torch.zeros(*values.shape[:-1], values.shape[-1] // 8, dtype=torch.int64)
    for i, nibble in enumerate(nibbles):
        words |= values[..., i::8] << (4 * nibble)
    words = torch.where(words >= 2**31, words - 2**32, words)
    return words.to(torch.int32).to(DEVICE)


PLAIN = tuple(range(8))


def expected(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.to(x.device).double().T
    return y if bias is None else y + bias.double()


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("m", "num_splits"), [(1, 2), (19, 1), (70, None)])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_channels(dtype: torch.dtype, m: int, num_splits: int | None, form: str) -> None:
    x, bias = draw(m, K - 8, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    weight = draw(N, K - 8, seed=3)
    if form == "int8":
        values, scale = packed.quantise_int8(weight)
        y = quantised.int8_linear(spread(x), values, scale, bias, num_splits=num_splits)
    else:
        scale = weight.abs().amax(1) / 448
        values = (weight / scale.unsqueeze(1)).to(torch.float8_e4m3fn)
        values[0, :3] = torch.tensor([2.0**-9, -(2.0**-7), 448.0]).to(torch.float8_e4m3fn)
        y = quantised.fp8_linear(spread(x), values, scale, bias, num_splits=num_splits)
    assert y.dtype == dtype
    wide = packed.dequantise_channels(values, scale)
    # Sums of 120 products of normal numbers are about 11.
    near(y / 11, expected(x, wide, bias) / 11, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("block", [(128, 128), (16, 32), (24, 48), (200, 16)])
@pytest.mark.parametrize("form", ["int8", "fp8"])
def test_blocks(dtype: torch.dtype, block: tuple[int, int], form: str) -> None:
    x, bias = draw(19, K, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    weight = draw(N, K, seed=3)
    scale = draw(-(-N // block[0]), -(-K // block[1]), seed=4).abs() * 0.02 + 0.01
    values = (weight * 40).round().clamp(-127, 127)
    if form == "int8":
        values = values.to(torch.int8)
        y = quantised.int8_linear(spread(x), values, scale, bias, block=block, num_splits=2)
    else:
        values = values.to(torch.float8_e4m3fn)
        y = quantised.fp8_linear(spread(x), values, scale, bias, block=block)
    wide = packed.dequantise_blocks(values, scale, block)
    assert wide[block[0] - 1 if block[0] <= N else -1, 0] == values.float()[min(block[0], N) - 1, 0] * scale[0, 0]
    near(y / 11, expected(x, wide, bias) / 11, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("num_groups", [1, 2, 4])
@pytest.mark.parametrize(("m", "num_splits"), [(1, 2), (19, None)])
def test_awq(dtype: torch.dtype, num_groups: int, m: int, num_splits: int | None) -> None:
    x = draw(m, K, dtype=dtype, seed=1)
    values, zeros = ints(16, K, N), ints(16, num_groups, N, seed=1)
    scales = (torch.rand(num_groups, N, generator=torch.Generator().manual_seed(2)) * 0.1 + 0.02).to(dtype).to(DEVICE)
    qweight, qzeros = pack(values, packed.AWQ_NIBBLES), pack(zeros, packed.AWQ_NIBBLES)
    group = K // num_groups
    plain = (values - zeros.repeat_interleave(group, 0)) * scales.cpu().double().repeat_interleave(group, 0)
    wide = packed.dequantise_awq(qweight, qzeros, scales)
    torch.testing.assert_close(wide.cpu(), plain.T.float().contiguous())
    near(
        quantised.awq_linear(spread(x), qweight, qzeros, scales, num_splits=num_splits) / 5,
        expected(x, wide) / 5,
        dtype,
    )


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize(("num_groups", "ordered", "zero_offset"), [(1, False, 1), (4, False, 0), (4, True, 1)])
@pytest.mark.parametrize(("m", "num_splits"), [(1, 2), (19, None)])
def test_gptq(
    dtype: torch.dtype, num_groups: int, ordered: bool, zero_offset: int, m: int, num_splits: int | None
) -> None:
    x, bias = draw(m, K, dtype=dtype, seed=1), draw(N, dtype=dtype, seed=2)
    values, zeros = ints(16, N, K), ints(16, num_groups, N, seed=1)
    scales = (torch.rand(num_groups, N, generator=torch.Generator().manual_seed(2)) * 0.1 + 0.02).to(dtype).to(DEVICE)
    g_idx = torch.arange(K) // (K // num_groups)
    if ordered:
        g_idx = g_idx[torch.randperm(K, generator=torch.Generator().manual_seed(4))]
    qweight, qzeros = pack(values, PLAIN).T.contiguous(), pack(zeros, PLAIN)
    plain = (values - (zeros[g_idx].T + zero_offset)) * scales.cpu().double()[g_idx].T
    given = g_idx.to(torch.int32).to(DEVICE) if ordered else None
    wide = packed.dequantise_gptq(qweight, qzeros, scales, given, zero_offset)
    torch.testing.assert_close(wide.cpu(), plain.float())
    y = quantised.gptq_linear(
        x, qweight, qzeros, scales, bias, g_idx=given, zero_offset=zero_offset, num_splits=num_splits
    )
    near(y / 5, expected(x, wide, bias) / 5, dtype)


@pytest.mark.parametrize("dtype", DOT_DTYPES)
@pytest.mark.parametrize("num_groups", [1, 4])
def test_gptq_of_8_bits(dtype: torch.dtype, num_groups: int) -> None:
    x = draw(19, K, dtype=dtype, seed=1)
    values, zeros = ints(256, N, K), ints(256, num_groups, N, seed=1)
    scales = (torch.rand(num_groups, N, generator=torch.Generator().manual_seed(2)) * 0.01 + 0.002).to(dtype).to(DEVICE)
    g_idx = torch.arange(K) // (K // num_groups)
    qweight, qzeros = pack_bytes(values).T.contiguous(), pack_bytes(zeros)
    plain = (values - (zeros[g_idx].T + 1)) * scales.cpu().double()[g_idx].T
    wide = packed.dequantise_gptq(qweight, qzeros, scales, bits=8)
    torch.testing.assert_close(wide.cpu(), plain.float())
    y = quantised.gptq_linear(spread(x), qweight, qzeros, scales, bits=8)
    near(y / 8, expected(x, wide) / 8, dtype)


def pack_bytes(values: Tensor) -> Tensor:
    """Four values of the last dimension to a word, the first lowest."""
    words = sum(values[..., i::4] << (8 * i) for i in range(4))
    assert isinstance(words, Tensor)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32).to(DEVICE)


def test_quantise_int8_is_within_half_a_step() -> None:
    weight = draw(9, 40)
    weight[4] = 0
    values, scale = packed.quantise_int8(weight)
    assert bool(((packed.dequantise_channels(values, scale) - weight).abs() <= scale.unsqueeze(1) * 0.5001).all())
    assert values.abs().amax(1).tolist() == [127, 127, 127, 127, 0, 127, 127, 127, 127]


def test_odd_groups_are_refused() -> None:
    none = torch.empty(0, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="power of two"):
        quantised.awq_linear(draw(1, 96), none, none, draw(4, 8))
