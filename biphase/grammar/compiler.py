"""Compiles grammars for one vocabulary with llguidance, within limits, and tries them out.

Everything llguidance says in its own way is put into one sentence here. Synchronous; a compilation may take seconds,
so it is called in threads and processes made for it. Knows nothing of torch.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Any

from llguidance import LLMatcher, LLTokenizer
from llguidance._lib import LLParserLimits

from biphase.errors import InvalidRequestError, UnsupportedError
from biphase.grammar.dialect import to_engine
from biphase.grammar.limits import MASK_SECONDS, PARSER_LIMITS
from biphase.grammar.vocabulary import Encode, Vocabulary
from biphase.request import StructuredOutput

# Random walks through a grammar before it is let in: many show only after some tokens that they are too much.
_WALKS = 2
_WALK_TOKENS = 24
_NAMES = {
    "json_schema": "JSON schema",
    "json_object": "JSON object",
    "regex": "regular expression",
    "choice": "choice",
    "grammar": "grammar",
    "structural_tag": "structural tag",
    "tool_calls": "schema of a tool's parameters",
}


class _Tokens:
    """The form in which llguidance wants a tokenizer."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids | vocabulary.eos_token_ids)
        self.eos_token_id = min(vocabulary.eos_token_ids)
        self.bos_token_id = None
        self._encode = encode

    def __call__(self, text: str | bytes) -> list[int]:
        return self._encode(text.encode() if isinstance(text, str) else text)


class GrammarCompiler:
    """
    Args:
        encode: how the model writes a text whose every byte is fixed.

    Raises:
        UnsupportedError: the model has no token that ends a text.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Encode) -> None:
        if not vocabulary.eos_token_ids:
            raise UnsupportedError("Structured output needs a model with an end-of-sequence token.")
        self.vocabulary = vocabulary
        self._special_tokens = {
            text: token_id for text, token_id in vocabulary.special_tokens.items() if "\ufffd" not in text
        }
        # Any: the stub asks for a class of its own, where the attributes are what counts.
        tokens: Any = _Tokens(vocabulary, encode)
        self._tokenizer = LLTokenizer(
            tokens, n_vocab=len(vocabulary.tokens), eos_token=sorted(vocabulary.eos_token_ids)
        )
        self._limits = LLParserLimits(verbose_errors=False, **PARSER_LIMITS)  # type: ignore[arg-type]

    def compile(self, asked: StructuredOutput) -> LLMatcher:
        """A matcher at its start, with the first mask computed: copies of it are at once ready.

        Raises:
            InvalidRequestError: it does not parse, uses what is not supported, or is too complex.
        """
        name = _NAMES.get(asked.kind, "structured output")
        try:
            text = to_engine(asked, self._special_tokens)
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"Invalid {name}: {error.message}") from None
        except ValueError as error:
            raise InvalidRequestError(f"Invalid {name}: {_reason(str(error))}") from None
        self._check(matcher, name)
        matcher.compute_bitmask()
        self._check(matcher, name)
        return matcher

    def _check(self, matcher: LLMatcher, name: str) -> None:
        if matcher.is_error():
            raise InvalidRequestError(f"Invalid {name}: {_reason(matcher.get_error())}")

    def probe(
        self,
        asked: StructuredOutput,
        *,
        mask_seconds: float = MASK_SECONDS,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Compiles it and takes some steps through it, as a model would.

        Raises:
            InvalidRequestError: as `compile`, or too complex in one of these steps.
        """
        first = self.compile(asked)
        name = _NAMES.get(asked.kind, "structured output")
        for walk in range(_WALKS):
            matcher = first.deep_copy()
            for step in range(_WALK_TOKENS):
                began = clock()
                mask = matcher.compute_bitmask()
                if (seconds := clock() - began) > mask_seconds:
                    raise InvalidRequestError(
                        f"Invalid {name}: too complex: which tokens may follow takes {seconds * 1000:.0f} ms to find "
                        "at one place"
                    )
                if matcher.is_error() or matcher.is_stopped():
                    break
                token_id = _pick(mask, walk * _WALK_TOKENS + step, self.vocabulary.eos_token_ids)
                if token_id is None or not matcher.consume_token(token_id):
                    break
            if matcher.is_error() and matcher.stop_reason() != "NoExtension":
                raise InvalidRequestError(f"Invalid {name}: {_reason(matcher.get_error())}")


def _pick(mask: bytes, salt: int, eos_token_ids: frozenset[int]) -> int | None:
    """Some allowed token that ends nothing: spread over the vocabulary, the same every time."""
    bits = int.from_bytes(mask, "little")
    for token_id in eos_token_ids:
        bits &= ~(1 << token_id)
    count = bits.bit_count()
    if not count:
        return None
    # The first one at or above a place that depends on the step only, so that the cost is that of one shift.
    place = (salt * 2_654_435_761) % (len(mask) * 8)
    above = bits >> place
    return place + (above & -above).bit_length() - 1 if above else (bits & -bits).bit_length() - 1


def _reason(said: str) -> str:
    """What llguidance says of a failure as one short sentence."""
    if (keys := re.search(r"Unimplemented keys: \[(.*?)\]", said)) is not None:
        return f"unsupported keywords: {keys[1]}"[:300]
    if "NoExtension" in said:
        return "nothing matches it, or it has no end"
    # The regex crate draws the pattern and marks the place; its last line says what is wrong.
    if (found := re.search(r"^error: (.+)$", said, re.MULTILINE)) is not None:
        return found[1][:300]
    if re.search(r"too (many|big|large|complex)|fuel|limit", said):
        return f"too complex ({said.partition('<state>')[0].splitlines()[0][:150]})"
    first = re.sub(r"^(at )?\d+\(\d+\): ", "", said.partition("<state>")[0].strip().partition("\n")[0])
    return first[:300] or "it does not compile"
