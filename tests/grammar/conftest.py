from __future__ import annotations

import pytest

from biphase.grammar.compiler import GrammarCompiler
from biphase.grammar.vocabulary import Vocabulary, exact_encoder, vocabulary_of
from biphase.tokenizer.tokenizer import ModelTokenizer
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE, tiny_tokenizer


@pytest.fixture(scope="session")
def grammar_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ModelTokenizer:
    return tiny_tokenizer(tmp_path_factory.mktemp("tiny-tokenizer"))


@pytest.fixture(scope="session")
def grammar_vocabulary(grammar_tokenizer: ModelTokenizer) -> Vocabulary:
    return vocabulary_of(grammar_tokenizer, MODEL_VOCAB_SIZE)


@pytest.fixture(scope="session")
def grammar_compiler(grammar_tokenizer: ModelTokenizer, grammar_vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(grammar_vocabulary, exact_encoder(grammar_tokenizer, grammar_vocabulary))
