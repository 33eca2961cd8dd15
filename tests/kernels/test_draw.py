"""Drawing a token: the numpy definition against exact arithmetic, and the compiled kernel against it, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kernels import reference_draw
from kernels.cpu.draw import DRAW, draw_tokens
from kernels.cpu.library import Isa, LibraryUnavailableError, available_isas

Floats = npt.NDArray[np.float32]

try:
    ISAS: list[Isa | None] = [None, *available_isas()]
except LibraryUnavailableError:
    ISAS = [None]  # the numpy definition alone

INF = np.float32(np.inf)
# Multiples of a vector and of a block of sums, one more, one less.
SIZES = [1, 2, 15, 16, 17, 255, 256, 511, 512, 513, 1200, 5003, 20_000]


def drawn(logits: Floats, isa: Isa | None, **settings: Any) -> list[int]:
    """One token for each row [num_rows, vocab_size], of the definition (isa None) or the kernel.

    Settings are one for all rows or one for each.
    """
    rows = np.empty(len(logits), dtype=DRAW)
    for name in DRAW.names or ():
        rows[name] = settings.get(name, {"temperature": 1.0, "top_p": 1.0, "uniform": 0.5}.get(name, 0))
    if isa is not None:
        return draw_tokens(logits, rows, isa).tolist()  # type: ignore[no-any-return]
    fields = [dict(zip(DRAW.names or (), row.tolist(), strict=True)) for row in rows]
    return [reference_draw.draw(row, **given) for row, given in zip(logits, fields, strict=True)]


def num_draws_by(isa: Isa | None) -> int:
    """Fewer where numpy draws each."""
    return 100 if isa is None else 4000


def every_token(logits: list[float], isa: Isa | None, **settings: Any) -> npt.NDArray[np.float64]:
    """The share of each token over evenly spaced draws: [vocab_size]."""
    row = np.array(logits, dtype=np.float32)
    num_draws = num_draws_by(isa)
    uniform = (np.arange(num_draws) + 0.5) / num_draws
    tokens = drawn(np.broadcast_to(row, (num_draws, len(row))), isa, uniform=uniform, **settings)
    return np.bincount(tokens, minlength=len(row)) / num_draws


def exactly(logits: Floats, temperature: float, min_p: float, top_k: int, top_p: float) -> npt.NDArray[np.float64]:
    """The definition's probabilities, in float64 and by a sort: [vocab_size]."""
    p = np.exp((logits.astype(np.float64) - logits.max()) / temperature)
    p[p < min_p] = 0.0
    order = np.argsort(-logits, kind="stable")
    if top_k > 0:
        p[order[top_k:]] = 0.0
    before = p[order].cumsum() - p[order]
    if top_p < 1.0:
        p[order[(before >= top_p * p.sum()) & (before > 0.0)]] = 0.0
    return p / p.sum()  # type: ignore[no-any-return]


def adversarial(vocab_size: int, generator: np.random.Generator) -> dict[str, Floats]:
    normal = generator.standard_normal(vocab_size).astype(np.float32)
    half = np.where(generator.random(vocab_size) < 0.5, -INF, normal)
    one = np.full(vocab_size, -INF)
    one[generator.integers(vocab_size)] = 1.0
    return {
        "normal": normal * 4,
        "nearly flat": normal * np.float32(1e-3),
        "ties": (normal * 4).round(decimals=1),
        "equal": np.full(vocab_size, 3.25, dtype=np.float32),
        "half banned": half,
        "all but one banned": one,
        "all banned": np.full(vocab_size, -INF),
        "denormal": normal * np.float32(1e-40),
        "huge": normal * np.float32(5e37),
        "infinite": np.where(generator.random(vocab_size) < 0.5, INF, normal),
        "NaN": np.where(generator.random(vocab_size) < 0.5, np.float32(np.nan), normal),
        "no scale": -np.exp2(generator.integers(-120, 20, vocab_size)).astype(np.float32),
    }


isas = pytest.mark.parametrize("isa", ISAS, ids=lambda isa: "numpy" if isa is None else isa.name)


@pytest.mark.parametrize("vocab_size", SIZES)
def test_the_kernel_draws_what_the_definition_draws(vocab_size: int) -> None:
    generator = np.random.default_rng(vocab_size)
    for name, row in adversarial(vocab_size, generator).items():
        num_rows = 24
        settings = {
            "temperature": generator.choice([1e-300, 1e-40, 1e-6, 0.1, 0.8, 1.0, 2.0, 1e6, 1e38, 1e300], num_rows),
            "top_p": generator.choice([1.0, 1.0, 0.0, 1e-9, 0.1, 0.5, 0.9, 0.999, 1.0 - 1e-16], num_rows),
            "min_p": generator.choice([0.0, 0.0, 0.05, 1.0, 1e-30], num_rows),
            "top_k": generator.choice([0, 0, 1, 2, 40, 600, 10_000], num_rows),
            "uniform": generator.choice([0.0, 1.0 - 2.0**-53, *generator.random(6)], num_rows),
        }
        rows = np.broadcast_to(row, (num_rows, vocab_size))
        expected = drawn(rows, None, **settings)
        for isa in ISAS:
            assert drawn(rows, isa, **settings) == expected, (name, isa)


@isas
@pytest.mark.parametrize("spread", [0.05, 1.0, 5.0])
def test_shares_are_the_exact_probabilities(isa: Isa | None, spread: float) -> None:
    generator = np.random.default_rng(3)
    logits = (generator.standard_normal(90) * spread).astype(np.float32)
    for temperature, min_p, top_k, top_p in itertools.product((0.5, 1.0), (0.0, 0.1), (0, 1, 7, 80), (0.0, 0.7, 1.0)):
        shares = every_token(logits.tolist(), isa, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p)
        # Evenly spaced draws miss a token's share by one of them at most.
        expected = exactly(logits, temperature, min_p, top_k, top_p)
        assert np.abs(shares - expected).max() <= 1.001 / num_draws_by(isa)
        assert not shares[expected == 0.0].any()


@isas
def test_a_large_vocabulary_keeps_what_a_sort_keeps(isa: Isa | None) -> None:
    generator = np.random.default_rng(4)
    for vocab_size, spread, top_k, top_p in itertools.product((3000, 20_000), (0.05, 3.0), (0, 300), (0.3, 0.95)):
        logits = (generator.standard_normal(vocab_size) * spread).astype(np.float32)
        uniform = generator.random(30)
        rows = np.broadcast_to(logits, (30, vocab_size))
        tokens = drawn(rows, isa, uniform=uniform, top_k=top_k, top_p=top_p)
        kept = exactly(logits, 1.0, 0.0, top_k, top_p)
        assert (kept[tokens] > 0.0).all()
        cumulative = kept.cumsum()
        assert (cumulative[tokens] > uniform - 1e-6).all()
        assert (cumulative[tokens] - kept[tokens] <= uniform + 1e-6).all()


@isas
def test_of_equal_logits_the_lower_ids_stay(isa: Isa | None) -> None:
    def kept(logits: list[float], **settings: Any) -> list[int]:
        return every_token(logits, isa, **settings).nonzero()[0].tolist()

    assert kept([1.0] * 100, top_k=3) == [0, 1, 2]
    assert kept([1.0] * 100, top_p=0.065) == list(range(7))
    assert kept([0.0, 2.0, 1.0, 1.0, 1.0], top_k=3) == [1, 2, 3]
    assert kept([1.0, 1.0, 2.0, 1.0], top_k=2, temperature=1e30) == [0, 2]
    assert kept([0.0, 1.0, 1.0, 0.5], top_k=1) == kept([0.0, 1.0, 1.0, 0.5], top_p=1e-9) == [1]
    assert kept([0.0, 1.0, 1.0, 0.5], min_p=1.0) == [1, 2]
    # top_p counts what top_k left: of two equal ones, half is one of them.
    assert kept([0.0, 1.0, 1.0, 0.5], top_k=2, top_p=0.5) == [1]
    # By the logit itself, also where a high temperature makes the weights equal.
    assert kept([1.0, 3.0, 2.0], top_k=2, temperature=1e30) == [1, 2]


@isas
@pytest.mark.parametrize("vocab_size", [3, 16, 700])
def test_bans_extremes_and_ends(isa: Isa | None, vocab_size: int) -> None:
    def one(row: Floats, **settings: Any) -> int:
        return drawn(row[None], isa, **settings)[0]

    row = np.linspace(0.0, 1.0, vocab_size, dtype=np.float32)
    last = vocab_size - 1
    for uniform in (0.0, 0.5, 1.0 - 2.0**-53):
        for settings in ({"temperature": 1e-40}, {"temperature": 1e-300}, {"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
            assert one(row, uniform=uniform, **settings) == last
        assert one(row * np.float32(1e38), uniform=uniform) == last
        assert one(np.full(vocab_size, -INF), uniform=uniform) == 0
        banned = np.full(vocab_size, -INF)
        banned[1] = -3e38
        assert one(banned, uniform=uniform, temperature=1e300) == 1
        assert one(np.where(banned == -INF, np.float32(np.nan), banned), uniform=uniform) == 1
    # Even weights: the uniform says where.
    for temperature in (1e6, 1e300):
        assert one(row, temperature=temperature, uniform=0.0) == 0
        assert one(row, temperature=temperature, uniform=1.0 - 2.0**-53) == last
        assert one(row, temperature=temperature, uniform=0.5) == pytest.approx(last / 2, abs=1)


@isas
def test_a_row_does_not_depend_on_its_batch(isa: Isa | None) -> None:
    generator = np.random.default_rng(5)
    wide = (generator.standard_normal((40, 5100)) * 3).astype(np.float32)
    logits = wide[:, :5003]  # rows that lie apart, at addresses of all kinds
    settings = {
        "top_p": generator.choice([1.0, 0.9], 40),
        "top_k": generator.choice([0, 50], 40),
        "uniform": generator.random(40),
    }
    together = drawn(logits, isa, **settings)
    for _ in range(10):
        order = generator.permutation(40)[: generator.integers(1, 40)]
        part = {name: values[order] for name, values in settings.items()}
        assert drawn(logits[order], isa, **part) == [together[i] for i in order]


def test_weights_are_exact_to_a_few_units_of_the_last_place() -> None:
    logits = np.linspace(-90.0, 0.0, 100_000, dtype=np.float32)
    for temperature in (0.7, 1.0, 2.0):
        exact = np.exp(logits.astype(np.float64) / temperature)
        weights = reference_draw.weights_of(logits, temperature)
        normal = exact >= 2.0**-124
        # The exponent is rounded twice, relative to itself.
        bound = 2.0**-23 * (1.5 - logits[normal] / temperature)
        assert (np.abs(weights[normal] / exact[normal] - 1.0) <= bound).all()
        assert not weights[exact < 2.0**-126].any()
        assert (np.diff(weights) >= 0.0).all()
