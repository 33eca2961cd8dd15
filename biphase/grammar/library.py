"""The grammars a worker has compiled for its vocabulary. Compiles in a thread of its own, keeps what was used last.

The tokenizer is read when the first structured request comes: a worker that never sees one pays nothing.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher

from biphase.errors import BiphaseError, ModelLoadError, UnsupportedError
from biphase.grammar.compiler import GrammarCompiler
from biphase.grammar.matcher import OutputMatcher
from biphase.grammar.vocabulary import exact_encoder, vocabulary_of
from biphase.request import SamplingParams, StructuredOutput
from biphase.tokenizer.tokenizer import ModelTokenizer

# What is kept, by number and by size of specification: a compiled grammar's size grows with that.
_MAX_KEPT = 256
_MAX_KEPT_CHARACTERS = 2**22
# The compiling thread yields to the model's.
_NICE = 10


class GrammarLibrary:
    """Thread-safe.

    Args:
        tokenizer: reads it; called once.
        vocab_size: of the model's logits.
    """

    def __init__(self, tokenizer: Callable[[], ModelTokenizer], vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._words: npt.NDArray[np.bool_] | None = None
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutput, LLMatcher] = OrderedDict()
        self._num_characters = 0
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammar", initializer=_yield_to_others)
        # Masks are due while a step runs: they do not wait behind a compilation.
        self.masks = ThreadPoolExecutor(1, thread_name_prefix="masks")

    async def prepare(self, asked: StructuredOutput) -> None:
        """Compiles it, unless it is there: `matcher` is quick then.

        Raises:
            InvalidRequestError: it does not compile.
            UnsupportedError: the model has no tokenizer, or no end of sequence.
        """
        if asked not in self._kept:
            await asyncio.get_running_loop().run_in_executor(self._compiling, self._first, asked)

    def matcher(self, sampling: SamplingParams) -> OutputMatcher | None:
        """A matcher at its start for a request, with the error in it where there is one; None for free output."""
        if sampling.structured_output is None:
            return None
        ends: Iterable[int] = sampling.eos_token_ids | sampling.stop_token_ids
        try:
            first = self._first(sampling.structured_output)
        except BiphaseError as error:
            return OutputMatcher(error, self._vocab_size)
        return OutputMatcher(first.deep_copy(), self._vocab_size, ends, self._words)

    def close(self) -> None:
        for executor in (self._compiling, self.masks):
            executor.shutdown(wait=False, cancel_futures=True)

    def _first(self, asked: StructuredOutput) -> LLMatcher:
        with self._lock:
            first = self._kept.get(asked)
            if first is not None:
                self._kept.move_to_end(asked)
                return first
        first = self._ready_compiler().compile(asked)
        with self._lock:
            if asked not in self._kept:
                self._num_characters += len(asked.spec)
            self._kept[asked] = first
            while len(self._kept) > _MAX_KEPT or (len(self._kept) > 1 and self._num_characters > _MAX_KEPT_CHARACTERS):
                dropped, _ = self._kept.popitem(last=False)
                self._num_characters -= len(dropped.spec)
        return first

    def _ready_compiler(self) -> GrammarCompiler:
        # Two at once would build two: harmless, and never in practice.
        if self._compiler is None:
            try:
                tokenizer = self._tokenizer()
            except ModelLoadError as error:
                raise UnsupportedError(f"Structured output needs the model's tokenizer: {error.message}") from error
            vocabulary = vocabulary_of(tokenizer, self._vocab_size)
            self._words = np.array([_has_letter(token) for token in vocabulary.tokens], dtype=np.bool_)
            self._compiler = GrammarCompiler(vocabulary, exact_encoder(tokenizer, vocabulary))
        return self._compiler


def _has_letter(token: bytes) -> bool:
    return any(char.isalpha() for char in token.decode("utf-8", "ignore"))


def _yield_to_others() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
