"""What a request's place in its grammar does to sampling: the mask, the end, replay, and other settings beside it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from biphase.errors import BiphaseError, InternalError, InvalidRequestError
from biphase.grammar import spec
from biphase.grammar.compiler import GrammarCompiler
from biphase.grammar.library import GrammarLibrary
from biphase.grammar.matcher import OutputMatcher
from biphase.request import SamplingParams
from biphase.sampler import SamplingRow, sample
from biphase.tokenizer.tokenizer import ModelTokenizer
from tests.grammar.walking import EOS, logits_at, matcher_of, params_of, row_of, walk
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE

AB = spec.regex("ab{2,5}")


@pytest.fixture
def ids(grammar_tokenizer: ModelTokenizer) -> dict[str, int]:
    return {char: grammar_tokenizer.encode(char, add_special_tokens=False)[0] for char in "abcxyz"}


def test_the_mask_follows_the_output(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    matcher = matcher_of(grammar_compiler, AB)
    assert matcher.allowed().nonzero()[0].tolist() == [ids["a"]]
    for char in "abb":
        assert not matcher.must_end
        matcher.accept(ids[char])
    assert set(matcher.allowed().nonzero()[0]) == {ids["b"], EOS}
    for _ in range(3):
        matcher.accept(ids["b"])
    assert matcher.allowed().nonzero()[0].tolist() == [EOS]
    assert matcher.must_end
    matcher.accept(EOS)
    assert matcher.error is None


def test_stop_tokens_may_end_a_complete_output_only(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    matcher = matcher_of(grammar_compiler, AB, (EOS, ids["x"]))
    assert not matcher.allowed()[ids["x"]]
    for char in "abb":
        matcher.accept(ids[char])
    assert matcher.allowed()[ids["x"]]


def test_a_mask_computed_elsewhere_is_the_same(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    with ThreadPoolExecutor(1) as executor:
        here, there = matcher_of(grammar_compiler, AB), matcher_of(grammar_compiler, AB)
        for char in "abbb":
            there.begin(executor)
            there.begin(executor)
            assert np.array_equal(here.allowed(), there.allowed())
            for matcher in (here, there):
                matcher.accept(ids[char])
        # The step did not sample after all: the mask that was begun is dropped with the next token.
        there.begin(executor)
        there.accept(ids["b"])
        here.accept(ids["b"])
        assert np.array_equal(here.allowed(), there.allowed())


def test_a_token_outside_of_the_grammar_is_an_error(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    matcher = matcher_of(grammar_compiler, AB)
    matcher.accept(ids["x"])
    assert isinstance(matcher.error, InternalError)
    assert not matcher.allowed().any()


def test_an_error_in_place_of_a_grammar_never_frees_the_output() -> None:
    matcher = OutputMatcher(InvalidRequestError("no"), MODEL_VOCAB_SIZE)
    row = SamplingRow(params_of(AB), [], MODEL_VOCAB_SIZE, matcher)
    row.add_output(5)
    sample(logits_at(0, 0), [row], [0])
    assert isinstance(matcher.error, InvalidRequestError)


@pytest.mark.parametrize("seed", range(6))
def test_replayed_output_continues_the_same(grammar_compiler: GrammarCompiler, seed: int) -> None:
    """What preemption, hand-off and moving come to: any prefix replayed gives the rest."""
    params = params_of(spec.json_schema({"type": "array", "items": {"type": "integer"}, "minItems": 3}), seed=seed)
    whole = walk(row_of(grammar_compiler, params), seed)
    for cut in {0, 1, 2, len(whole) // 2, len(whole) - 1}:
        row = row_of(grammar_compiler, params)
        for token in whole[:cut]:
            row.add_output(token)
        assert walk(row, seed, outputs=whole[:cut]) == whole


def test_min_tokens_gives_way_to_a_complete_grammar(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    # As long as the grammar has more, no end; when it has not, the end.
    longer = walk(row_of(grammar_compiler, params_of(spec.regex("ab{1,20}"), min_tokens=10)), 1)
    assert len(longer) >= 10
    assert longer[-1] == EOS
    assert walk(row_of(grammar_compiler, params_of(spec.choice(["a"]), min_tokens=10)), 1) == [ids["a"], EOS]
    # Neither does ignore_eos keep an output going that is complete.
    assert walk(row_of(grammar_compiler, params_of(spec.choice(["a"]), ignore_eos=True)), 1) == [ids["a"], EOS]


@pytest.mark.parametrize(
    "values", [{"allowed_token_ids": (9,)}, {"bad_words": "a"}, {"allowed_token_ids": (9,), "temperature": 0.0}]
)
def test_settings_that_leave_nothing_fail_the_request(
    grammar_compiler: GrammarCompiler, ids: dict[str, int], values: dict[str, object]
) -> None:
    if "bad_words" in values:
        values = {"bad_words": ((ids["a"],),)}
    with pytest.raises(BiphaseError, match="other settings"):
        walk(row_of(grammar_compiler, params_of(AB, **values)), 0)


def test_bias_and_penalties_choose_within_the_grammar(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    asked = spec.regex("[abc]")
    params = params_of(asked, temperature=0.0, logit_bias=((ids["x"], 100.0), (ids["c"], 50.0)))
    assert walk(row_of(grammar_compiler, params), 3)[0] == ids["c"]


def test_penalties_count_the_output_and_its_words_only(grammar_compiler: GrammarCompiler, ids: dict[str, int]) -> None:
    """What the prompt says may be said again, and JSON repeats its marks and digits by necessity."""
    asked = spec.regex("[a-z1]+")
    one = 20  # some token that is no word
    words = np.ones(MODEL_VOCAB_SIZE, dtype=np.bool_)
    words[one] = False
    matcher = OutputMatcher(grammar_compiler.compile(asked).deep_copy(), MODEL_VOCAB_SIZE, (EOS,), words)
    params = params_of(asked, repetition_penalty=2.0, frequency_penalty=1.0)
    row = SamplingRow(params, [ids["c"]], MODEL_VOCAB_SIZE, matcher)
    assert row.seen_ids.tolist() == []
    row.add_output(ids["a"])
    row.add_output(one)
    assert row.seen_ids.tolist() == [ids["a"]]
    free = SamplingRow(SamplingParams(repetition_penalty=2.0), [ids["c"]], MODEL_VOCAB_SIZE)
    free.add_output(one)
    assert set(free.seen_ids.tolist()) == {ids["c"], one}


def test_company_does_not_matter(grammar_compiler: GrammarCompiler) -> None:
    """A structured row beside free ones and others: the same token, and theirs as without it."""
    import torch

    asked = params_of(AB, seed=4, logprobs=2)
    free = SamplingParams(temperature=1.0, seed=5, max_tokens=9)
    plain = SamplingParams(temperature=0.0, max_tokens=9)
    logits = [logits_at(seed, 0) for seed in range(3)]

    def rows() -> list[SamplingRow]:
        return [
            row_of(grammar_compiler, asked),
            SamplingRow(free, [], MODEL_VOCAB_SIZE),
            SamplingRow(plain, [], MODEL_VOCAB_SIZE),
        ]

    together = sample(torch.cat(logits), rows(), [0, 0, 0])
    alone = [sample(one.clone(), [row], [0])[0] for one, row in zip(logits, rows(), strict=True)]
    assert [token.token_id for token in together] == [token.token_id for token in alone]
    # Logprobs are the model's own, before the grammar.
    assert together[0].logprobs is not None
    assert together[0].logprobs.logprobs[0] == pytest.approx(
        float(logits[0].log_softmax(-1)[0, together[0].token_id]), abs=1e-5
    )


async def test_a_library_compiles_once_and_forgets_the_oldest(grammar_tokenizer: ModelTokenizer) -> None:
    library = GrammarLibrary(lambda: grammar_tokenizer, MODEL_VOCAB_SIZE)
    try:
        await library.prepare(AB)
        first = library._kept[AB]
        await library.prepare(AB)
        assert library._kept[AB] is first
        assert library.matcher(SamplingParams()) is None
        with pytest.raises(InvalidRequestError, match="unclosed"):
            await library.prepare(spec.regex("["))
        refused = library.matcher(params_of(spec.regex("[")))
        assert refused is not None
        assert isinstance(refused.error, InvalidRequestError)
        for number in range(300):
            await library.prepare(spec.regex(f"a{{{number + 1}}}"))
        assert len(library._kept) == 256
        assert AB not in library._kept
        # Forgotten is not lost.
        matcher = library.matcher(params_of(AB))
        assert matcher is not None
        assert matcher.allowed().any()
    finally:
        library.close()
