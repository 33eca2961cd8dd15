"""The sampler: each parameter against a plain definition, draws that repeat, rows that do not touch each other."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from biphase.request import SamplingParams
from biphase.sampler import SamplingRow, sample, token_logprobs
from biphase.sampler.draw import uniforms

VOCAB = 1200
INF = float("inf")


def logits_of(num_rows: int = 1, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def row_of(params: SamplingParams, prompt: list[int] | None = None, outputs: list[int] | None = None) -> SamplingRow:
    row = SamplingRow(params, prompt or [], VOCAB)
    for token in outputs or []:
        row.add_output(token)
    return row


def drawn(logits: Tensor, params: SamplingParams, num_draws: int = 3000) -> Tensor:
    """How often each token comes out over many positions, as frequencies [vocab_size]."""
    rows = [row_of(params)] * num_draws
    tokens = sample(logits.expand(num_draws, -1).contiguous(), rows, list(range(num_draws)))
    return torch.bincount(torch.tensor([t.token_id for t in tokens]), minlength=logits.shape[-1]) / num_draws


# Greedy


def test_greedy_is_argmax_and_leaves_logits_alone() -> None:
    logits = logits_of(5)
    before = logits.clone()
    tokens = sample(logits, [row_of(SamplingParams())] * 5, [3] * 5)
    assert [t.token_id for t in tokens] == logits.argmax(-1).tolist()
    assert all(t.logprobs is None for t in tokens)
    assert torch.equal(logits, before)


def test_mixed_batch_gives_each_row_its_own() -> None:
    logits = logits_of(4)
    params = [SamplingParams(), SamplingParams(temperature=1.0, seed=5), SamplingParams(logprobs=1), SamplingParams()]
    alone = [sample(logits[i : i + 1].clone(), [row_of(p)], [9])[0] for i, p in enumerate(params)]
    together = sample(logits.clone(), [row_of(p) for p in params], [9] * 4)
    assert [t.token_id for t in together] == [t.token_id for t in alone]


# Draws


def test_uniforms_are_in_range_even_and_independent() -> None:
    values = uniforms([7] * 20_000, range(20_000))
    assert float(values.min()) >= 0.0
    assert float(values.max()) < 1.0
    assert float(values.mean()) == pytest.approx(0.5, abs=0.01)
    counts = torch.histc(values.float(), 20, 0, 1)
    assert float(((counts - 1000) ** 2 / 1000).sum()) < 50  # chi-square, 19 degrees of freedom
    shifted = uniforms([8] * 20_000, range(20_000))
    for lag in (0, 1, 2):
        pair = torch.stack((values[: 20_000 - lag], shifted[lag:]))
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.03


def test_uniforms_depend_on_seed_and_position_alone() -> None:
    known = uniforms([1, 2, -1, 2**64 - 1], [10, 10, 4, 4])
    assert known[0] == uniforms([1], [10])[0]
    assert known[0] != known[1]
    assert known[2] == known[3]
    # A change of the generator would change what running streams say: pinned.
    assert uniforms([0, 42], [0, 100]).tolist() == pytest.approx([0.6524484863740322, 0.673550727720063], abs=1e-15)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=1.0, min_p=0.1),
        SamplingParams(temperature=1.5, top_k=50, top_p=0.9, min_p=0.02),
    ],
)
def test_frequencies_follow_the_distribution(params: SamplingParams) -> None:
    logits = logits_of(vocab=40, scale=1.5)
    expected = distribution(logits[0], params)
    rows = [SamplingRow(params, [], 40)] * 20_000
    tokens = sample(logits.expand(20_000, -1).contiguous(), rows, list(range(20_000)))
    found = torch.bincount(torch.tensor([t.token_id for t in tokens]), minlength=40) / 20_000
    assert bool((found[expected == 0] == 0).all())
    assert float((found - expected).abs().max()) < 0.012


def distribution(logits: Tensor, params: SamplingParams) -> Tensor:
    """The definition, token by token in float64."""
    p = (logits.double() / params.temperature).softmax(-1)
    p[p < params.min_p * p.max()] = 0
    order = p.argsort(descending=True, stable=True)
    if params.top_k > 0:
        p[order[params.top_k :]] = 0
    p /= p.sum()
    before = 0.0
    for token in order.tolist():
        mass = float(p[token])
        if before > 0 and before >= params.top_p < 1.0:
            p[token] = 0
        before += mass
    return p / p.sum()


@pytest.mark.parametrize("vocab", [30, 1200, 5000])
def test_draws_equal_the_definition(vocab: int) -> None:
    """Random parameters, with many ties as bfloat16 logits have, against the definition."""
    draw = random.Random(1)
    for seed in range(60):
        logits = logits_of(vocab=vocab, seed=seed, scale=draw.choice([0.05, 1.0, 6.0])).bfloat16().float()
        params = SamplingParams(
            temperature=draw.choice([0.3, 1.0, 2.0]),
            top_k=draw.choice([0, 1, 3, 40, 600, 10_000]),
            top_p=draw.choice([0.0, 0.1, 0.9, 0.999, 1.0]),
            min_p=draw.choice([0.0, 0.0, 0.05]),
            seed=seed,
        )
        token = sample(logits.clone(), [SamplingRow(params, [], vocab)], [seed])[0].token_id
        expected = distribution(logits[0], params)
        target = uniforms([seed], [seed])[0]
        order = torch.arange(vocab)[expected > 0]
        index = int(torch.searchsorted(expected[order].cumsum(0), target, right=True))
        near = order[max(0, index - 1) : index + 2].tolist()  # a neighbour may win by rounding
        assert token in near
        assert expected[token] > 0


def test_a_row_does_not_depend_on_its_batch() -> None:
    draw = random.Random(3)
    logits = logits_of(24, vocab=5000, scale=1.0).bfloat16().float()
    params = [
        SamplingParams(
            temperature=draw.choice([0.0, 0.5, 1.0]),
            top_k=draw.choice([0, 0, 1, 50, 700]),
            top_p=draw.choice([1.0, 0.3, 0.95]),
            min_p=draw.choice([0.0, 0.01]),
            frequency_penalty=draw.choice([0.0, 0.5]),
            logprobs=draw.choice([None, 3]),
            seed=draw.randrange(1 << 40),
        )
        for _ in range(24)
    ]
    rows = [SamplingRow(p, [1, 2, 3], 5000) for p in params]
    positions = [draw.randrange(1000) for _ in rows]
    alone = [sample(logits[i : i + 1].clone(), [rows[i]], [positions[i]])[0] for i in range(24)]
    for _ in range(5):
        order = draw.sample(range(24), draw.randrange(2, 25))
        together = sample(logits[order].clone(), [rows[i] for i in order], [positions[i] for i in order])
        for i, token in zip(order, together, strict=True):
            assert token.token_id == alone[i].token_id
            assert token.logprobs == alone[i].logprobs


def test_same_seed_and_position_repeat_and_others_differ() -> None:
    logits = logits_of(scale=0.5)
    params = SamplingParams(temperature=1.0, seed=11)

    def at(p: SamplingParams, position: int) -> int:
        return sample(logits.clone(), [row_of(p)], [position])[0].token_id

    assert at(params, 5) == at(params, 5)
    assert len({at(params, position) for position in range(20)}) > 15
    assert len({at(replace(params, seed=seed), 5) for seed in range(20)}) > 15


def test_extreme_temperatures() -> None:
    logits = logits_of() * 1e30
    for temperature in (1e-6, 2.0):
        token = sample(logits.clone(), [row_of(SamplingParams(temperature=temperature))], [0])[0].token_id
        assert token == int(logits.argmax())


# Changes to logits


def test_allowed_token_ids() -> None:
    params = SamplingParams(temperature=1.0, allowed_token_ids=(3, 900, 5_000_000))
    assert set(drawn(logits_of(), params, 200).nonzero().flatten().tolist()) <= {3, 900}


def test_logit_bias() -> None:
    logits = logits_of()
    best = int(logits.argmax())
    assert sample(logits.clone(), [row_of(SamplingParams(logit_bias=((7, 100.0),)))], [0])[0].token_id == 7
    assert sample(logits.clone(), [row_of(SamplingParams(logit_bias=((best, -100.0),)))], [0])[0].token_id != best


def test_min_tokens_bans_every_end() -> None:
    logits = logits_of()
    best, second = logits.topk(2).indices[0].tolist()
    params = SamplingParams(min_tokens=2, eos_token_ids=frozenset({best}), stop_token_ids=frozenset({second}))
    row = row_of(params)
    for _ in range(2):
        token = sample(logits.clone(), [row], [0])[0].token_id
        assert token not in (best, second)
        row.add_output(token)
    assert sample(logits.clone(), [row], [0])[0].token_id == best


def test_bad_words() -> None:
    logits = logits_of()
    order = logits[0].argsort(descending=True).tolist()
    params = SamplingParams(bad_words=((order[0],), (4, 5, order[1])))
    assert sample(logits.clone(), [row_of(params)], [0])[0].token_id == order[1]
    assert sample(logits.clone(), [row_of(params, outputs=[4, 5])], [0])[0].token_id == order[2]
    assert sample(logits.clone(), [row_of(params, outputs=[9, 4, 5])], [0])[0].token_id == order[2]
    assert sample(logits.clone(), [row_of(params, outputs=[5, 4])], [0])[0].token_id == order[1]
    # The word may not begin in the prompt.
    assert sample(logits.clone(), [row_of(params, prompt=[4, 5])], [0])[0].token_id == order[1]


def test_penalties_equal_their_definition_and_count_incrementally() -> None:
    draw = random.Random(5)
    prompt = [draw.randrange(VOCAB) for _ in range(50)]
    params = SamplingParams(repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.2)
    row = row_of(params, prompt)
    outputs: list[int] = []
    for step in range(200):
        logits = logits_of(seed=step)
        expected = logits[0].clone()
        for token in set(prompt) | set(outputs):
            value = expected[token]
            expected[token] = value / 1.3 if value > 0 else value * 1.3
        for token in set(outputs):
            expected[token] -= 0.2 * outputs.count(token) + 0.4
        assert sample(logits, [row], [0])[0].token_id == int(expected.argmax())
        torch.testing.assert_close(logits[0], expected)
        token = draw.randrange(40)
        outputs.append(token)
        row.add_output(token)


def test_only_rows_that_ask_are_changed() -> None:
    logits = logits_of(3)
    before = logits.clone()
    rows = [
        row_of(SamplingParams()),
        row_of(SamplingParams(frequency_penalty=1.0), outputs=[4]),
        row_of(SamplingParams()),
    ]
    sample(logits, rows, [0] * 3)
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert logits[1, 4] == before[1, 4] - 1.0


# Logprobs


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = logits_of(2)
    plain = logits.double().log_softmax(-1)
    best = int(logits[0].argmax())
    params = SamplingParams(logprobs=3, logit_bias=((best, -100.0),), temperature=0.0)
    found = sample(logits.clone(), [row_of(params), row_of(SamplingParams())], [0, 0])[0]
    order = plain[0].argsort(descending=True).tolist()
    assert found.token_id == order[1]
    assert found.logprobs is not None
    assert found.logprobs.token_ids == (order[1], order[0], order[1], order[2])
    assert found.logprobs.rank == 2
    expected = [float(plain[0, token]) for token in found.logprobs.token_ids]
    assert found.logprobs.logprobs == pytest.approx(expected, abs=1e-5)


def test_zero_logprobs_give_the_token_alone() -> None:
    found = token_logprobs(logits_of(2), torch.tensor([5, 6]), [0, 2])
    assert [len(f.token_ids) for f in found] == [1, 3]
    assert found[0].token_ids == (5,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_allowed_give_way(temperature: float) -> None:
    logits = logits_of()
    params = SamplingParams(
        temperature=temperature,
        allowed_token_ids=(7, 9),
        bad_words=((7,), (9,)),
        stop_token_ids=frozenset({9}),
        min_tokens=3,
    )
    assert sample(logits, [row_of(params)], [0])[0].token_id in (7, 9)
    # One ban leaves something.
    one = replace(params, bad_words=((7,),), min_tokens=0)
    assert sample(logits_of(), [row_of(one)], [0])[0].token_id == 9


def test_named_tokens_stand_after_the_likeliest_each_once() -> None:
    logits = logits_of(2)
    order = logits[1].argsort(descending=True).tolist()
    wanted = [order[0], order[7], 10**6, order[5]]
    plain, named = token_logprobs(logits, torch.tensor([5, 6]), [1, 2], [(), wanted])
    assert len(plain.token_ids) == 2
    assert named.token_ids == (6, order[0], order[1], order[7], order[5])
    expected = logits[1].log_softmax(-1)[list(named.token_ids)].tolist()
    assert named.logprobs == pytest.approx(expected, abs=1e-5)


def test_token_ids_out_of_the_vocabulary_are_ignored() -> None:
    params = SamplingParams(
        stop_token_ids=frozenset({10**6}),
        min_tokens=3,
        logit_bias=((10**6, 5.0),),
        bad_words=((10**6,),),
        repetition_penalty=1.1,
    )
    row = row_of(params, prompt=[10**6, 3])
    assert math.isfinite(sample(logits_of(), [row], [0])[0].token_id)
