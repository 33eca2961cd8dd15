"""The reference ops against independent formulas, and their manners: no mutation, nothing leaks from unused slots."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels import reference

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.bfloat16: (2e-2, 2e-2), torch.float16: (2e-3, 2e-3)}
DTYPES = list(TOLERANCES)


def near(a: Tensor, b: Tensor, dtype: torch.dtype) -> None:
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(a.float(), b.float(), rtol=rtol, atol=atol)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def untouched(function: Callable[..., object], *arguments: object) -> object:
    """Calls the function and asserts that no tensor among its arguments changed."""
    before = [a.clone() if isinstance(a, Tensor) else None for a in arguments]
    result = function(*arguments)
    for argument, copy in zip(arguments, before, strict=True):
        if isinstance(argument, Tensor):
            torch.testing.assert_close(argument, copy, rtol=0, atol=0, equal_nan=True)
    return result


class Cache:
    """A poisoned cache with ragged sequences at shuffled block ids."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        *,
        num_heads: int = 6,
        num_kv_heads: int = 2,
        head_dim: int = 16,
        block_size: int = 4,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.layer, num_layers = 1, 3
        blocks_of = [-(-n // block_size) for n in seq_lens]
        num_blocks = sum(blocks_of) + 5
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self.kv_cache = torch.full(shape, float("nan"), dtype=dtype)
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        self.block_tables = torch.full((len(seq_lens), max(blocks_of) + 1), 2**30, dtype=torch.int32)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        starts = [0]
        for n in query_lens:
            starts.append(starts[-1] + n)
        self.query_start_loc = torch.tensor(starts, dtype=torch.int32)
        self.q = draw(starts[-1], num_heads, head_dim, dtype=dtype, seed=1)
        self.keys, self.values = [], []
        for i, n in enumerate(seq_lens):
            own = [order.pop() for _ in range(blocks_of[i])]
            self.block_tables[i, : len(own)] = torch.tensor(own)
            k = draw(n, num_kv_heads, head_dim, dtype=dtype, seed=10 + i)
            v = draw(n, num_kv_heads, head_dim, dtype=dtype, seed=50 + i)
            slots = torch.tensor([own[t // block_size] * block_size + t % block_size for t in range(n)])
            reference.store_kv(k, v, self.kv_cache, self.layer, slots)
            self.keys.append(k)
            self.values.append(v)

    def arguments(self) -> tuple[Tensor, Tensor, int, Tensor, Tensor, Tensor]:
        return self.q, self.kv_cache, self.layer, self.query_start_loc, self.seq_lens, self.block_tables

    def expected(self, scale: float, window: int | None, softcap: float) -> Tensor:
        """Token by token and head by head, in float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        starts = self.query_start_loc.tolist()
        group = self.q.shape[1] // self.kv_cache.shape[3]
        for i, n in enumerate(self.seq_lens.tolist()):
            num_queries = starts[i + 1] - starts[i]
            for row in range(num_queries):
                at = n - num_queries + row
                first = 0 if window is None else max(0, at - window + 1)
                for head in range(self.q.shape[1]):
                    k = self.keys[i][first : at + 1, head // group].double()
                    v = self.values[i][first : at + 1, head // group].double()
                    scores = k @ self.q[starts[i] + row, head].double() * scale
                    if softcap:
                        scores = softcap * torch.tanh(scores / softcap)
                    out[starts[i] + row, head] = scores.softmax(0) @ v
        return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (7, 1)])
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (5, 0.0), (1, 0.0), (None, 3.0), (6, 3.0)])
def test_paged_attention(
    dtype: torch.dtype, block_size: int, num_heads: int, num_kv_heads: int, window: int | None, softcap: float
) -> None:
    cache = Cache(
        [1, 9, 16, 5, 23],
        [1, 1, 4, 5, 7],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        block_size=block_size,
        dtype=dtype,
    )
    out = untouched(reference.paged_attention, *cache.arguments(), 0.3, window, softcap)
    assert isinstance(out, Tensor)
    assert out.dtype == dtype
    near(out, cache.expected(0.3, window, softcap), dtype)


def test_paged_attention_skips_a_sequence_without_queries() -> None:
    cache = Cache([4, 6], [0, 2])
    near(reference.paged_attention(*cache.arguments(), 1.0), cache.expected(1.0, None, 0.0), torch.float32)


def test_paged_attention_takes_non_contiguous_queries() -> None:
    cache = Cache([9, 16], [1, 4])
    expected = reference.paged_attention(*cache.arguments(), 1.0)
    spread = torch.full((*cache.q.shape, 2), float("nan"))
    spread[..., 0] = cache.q
    assert not spread[..., 0].is_contiguous()
    out = reference.paged_attention(spread[..., 0], *cache.arguments()[1:], 1.0)
    assert torch.equal(out, expected)


def test_store_kv_writes_its_slots_and_nothing_else() -> None:
    kv_cache = torch.zeros(3, 2, 2, 2, 4, 8)
    k, v = draw(3, 2, 8, seed=1), draw(3, 2, 8, seed=2)
    reference.store_kv(k, v, kv_cache, 1, torch.tensor([9, -1, 2]))
    expected = torch.zeros_like(kv_cache)
    expected[2, 1, 0, :, 1], expected[2, 1, 1, :, 1] = k[0], v[0]
    expected[0, 1, 0, :, 2], expected[0, 1, 1, :, 2] = k[2], v[2]
    assert torch.equal(kv_cache, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, offset: float) -> None:
    x, weight = draw(5, 3, 32, dtype=dtype), draw(32)
    expected = F.rms_norm(x.double(), (32,), weight.double() + offset, 1e-5)
    out = untouched(reference.rms_norm, x, weight, 1e-5, offset)
    assert isinstance(out, Tensor)
    near(out, expected, dtype)


def test_fused_add_rms_norm_returns_the_sum() -> None:
    x, residual, weight = draw(4, 16), draw(4, 16, seed=1), draw(16, seed=2)
    result = untouched(reference.fused_add_rms_norm, x, residual, weight, 1e-6)
    assert isinstance(result, tuple)
    assert torch.equal(result[1], x + residual)
    assert torch.equal(result[0], reference.rms_norm(x + residual, weight, 1e-6))


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_activations(dtype: torch.dtype) -> None:
    gate, up = draw(4, 16, dtype=dtype), draw(4, 16, dtype=dtype, seed=1)
    near(reference.silu_mul(gate, up), gate.double() * torch.sigmoid(gate.double()) * up.double(), dtype)
    wide = gate.double()
    gelu = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    near(reference.gelu_tanh_mul(gate, up), gelu * up.double(), dtype)


def test_embedding_scales() -> None:
    weight = draw(10, 4)
    ids = torch.tensor([3, 3, 0], dtype=torch.int32)
    assert torch.equal(reference.embedding(ids, weight), weight[[3, 3, 0]])
    assert torch.equal(reference.embedding(ids, weight, 2.0), weight[[3, 3, 0]] * 2)


def test_rotary_turns_pairs_and_leaves_the_rest() -> None:
    cos, sin = reference.rotary_table(100.0, 8, 20)
    x = draw(3, 2, 12)
    positions = torch.tensor([0, 7, 19], dtype=torch.int32)
    out = untouched(reference.rotary, x, positions, cos, sin)
    assert isinstance(out, Tensor)
    for row, position in enumerate(positions.tolist()):
        for j in range(4):
            angle = position * 100.0 ** (-2 * j / 8)
            pair = torch.complex(x[row, :, j].double(), x[row, :, j + 4].double())
            turned = pair * complex(math.cos(angle), math.sin(angle))
            near(out[row, :, j], turned.real, torch.float32)
            near(out[row, :, j + 4], turned.imag, torch.float32)
    assert torch.equal(out[..., 8:], x[..., 8:])
    # Position 0 does not turn.
    assert torch.equal(out[0], x[0])


def test_rotary_scalings() -> None:
    plain, one = reference.rotary_frequencies(1e4, 16)
    assert one == 1.0
    halved, _ = reference.rotary_frequencies(1e4, 16, "linear", {"factor": 2.0})
    near(halved, plain / 2, torch.float32)
    divided, _ = reference.rotary_frequencies(1e4, 16, "factors", {f"{i:04d}": float(i + 1) for i in range(8)})
    near(divided, plain / torch.arange(1, 9), torch.float32)
    llama3 = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192.0,
    }
    scaled, _ = reference.rotary_frequencies(5e5, 128, "llama3", llama3)
    plain, _ = reference.rotary_frequencies(5e5, 128)
    ratio = plain / scaled
    assert ratio[0] == 1.0
    assert ratio[-1] == 8.0
    assert bool(((ratio >= 1.0) & (ratio <= 8.0)).all())
    _, magnitude = reference.rotary_frequencies(
        1e4, 16, "yarn", {"factor": 4.0, "original_max_position_embeddings": 64.0}
    )
    assert magnitude == pytest.approx(0.1 * math.log(4) + 1)
    with pytest.raises(ValueError, match="unknown rope scaling"):
        reference.rotary_frequencies(1e4, 16, "magic")


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_moe_equals_the_weighted_sum_of_experts(norm_topk_prob: bool) -> None:
    x, router = draw(7, 12), draw(5, 12, seed=1)
    gates = [draw(8, 12, seed=10 + e) for e in range(5)]
    ups = [draw(8, 12, seed=20 + e) for e in range(5)]
    downs = [draw(12, 8, seed=30 + e) for e in range(5)]
    out = untouched(reference.moe, x, router, gates, ups, downs, 2, norm_topk_prob, "silu")
    assert isinstance(out, Tensor)
    for row in range(7):
        probabilities = (router.double() @ x[row].double()).softmax(0)
        best = probabilities.topk(2)
        weights = best.values / best.values.sum() if norm_topk_prob else best.values
        expected = torch.zeros(12, dtype=torch.float64)
        for weight, e in zip(weights, best.indices.tolist(), strict=True):
            hidden = F.silu(gates[e].double() @ x[row].double()) * (ups[e].double() @ x[row].double())
            expected += weight * (downs[e].double() @ hidden)
        torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-4)


def test_softcap() -> None:
    x = draw(10) * 100
    assert reference.softcap(x, 0.0) is x
    assert bool((reference.softcap(x, 5.0).abs() <= 5).all())


def test_package_is_not_taken_for_the_hub_kernels_package() -> None:
    code = (
        "import kernels\n"
        "from transformers.utils import is_kernels_available\n"
        "assert kernels.__version__ == '0'\n"
        "assert not is_kernels_available()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
