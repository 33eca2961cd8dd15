"""Walks through grammars as sampling does, without a model: random logits, and the sampler's own choice."""

from __future__ import annotations

import torch

from biphase.errors import BiphaseError
from biphase.grammar.compiler import GrammarCompiler
from biphase.grammar.matcher import OutputMatcher
from biphase.request import SamplingParams, StructuredOutput
from biphase.sampler import SamplingRow, sample
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE

EOS = 2


def matcher_of(compiler: GrammarCompiler, asked: StructuredOutput, ends: tuple[int, ...] = (EOS,)) -> OutputMatcher:
    return OutputMatcher(compiler.compile(asked).deep_copy(), MODEL_VOCAB_SIZE, ends)


def row_of(compiler: GrammarCompiler, params: SamplingParams) -> SamplingRow:
    assert params.structured_output is not None
    matcher = matcher_of(compiler, params.structured_output, tuple(params.eos_token_ids | params.stop_token_ids))
    return SamplingRow(params, [], MODEL_VOCAB_SIZE, matcher)


def params_of(asked: StructuredOutput, **values: object) -> SamplingParams:
    fields = {"temperature": 1.0, "eos_token_ids": frozenset({EOS}), "structured_output": asked, "max_tokens": 400}
    return SamplingParams(**(fields | values))  # type: ignore[arg-type]


def logits_at(seed: int, position: int) -> torch.Tensor:
    """What a model would say: a function of the place, here of nothing else."""
    generator = torch.Generator().manual_seed(seed * 100_003 + position)
    logits = torch.randn(1, MODEL_VOCAB_SIZE, generator=generator) * 2
    # Ends are likely, as they are for a model: the walk stays short.
    logits[0, EOS] += 3.0
    return logits


def walk(row: SamplingRow, seed: int, *, outputs: list[int] | None = None) -> list[int]:
    """Samples until the end, or max_tokens. `outputs` is what was sampled before, replayed already."""
    tokens = list(outputs or [])
    while len(tokens) < row.params.max_tokens:
        token = sample(logits_at(seed, len(tokens)), [row], [len(tokens)])[0].token_id
        assert row.matcher is not None
        if row.matcher.error is not None:
            raise row.matcher.error
        tokens.append(token)
        if row.params.ends_at(token, len(tokens)):
            return tokens
        row.add_output(token)
    return tokens


def refusal(compiler: GrammarCompiler, asked: StructuredOutput) -> str:
    """Why it is refused; "" when it is not."""
    try:
        compiler.probe(asked)
    except BiphaseError as error:
        return error.message
    return ""
