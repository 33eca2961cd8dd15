"""Token ids to text while they arrive: never half a character, never part of a stop string.

Owns the incremental decoding of one sequence (tokenizers' DecodeStream) and the watch for stop strings. What was
handed out, put together, is exactly the text a caller gets who asks for everything at once.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers.decoders import DecodeStream

from biphase.tokenizer.tokenizer import ModelTokenizer

# Enough of the prompt for the decoder to know what the first output token stands behind.
_PRIMING_TOKENS = 24
_UNFINISHED = "�"


class IncrementalDecoder:
    """Decodes one sequence. Characters whose bytes are not all there yet are held.

    Args:
        prompt_token_ids: what the output follows; keeps the space before the first word where there is one.
    """

    def __init__(
        self, tokenizer: ModelTokenizer, prompt_token_ids: Sequence[int] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._backend = tokenizer.backend
        self._skip_special_tokens = skip_special_tokens
        # Characters of the first text that the prompt has shown already (it ended within a token's bytes).
        self._num_shown = 0
        self._stream = self._primed(prompt_token_ids)

    def _primed(self, prompt_token_ids: Sequence[int]) -> DecodeStream:
        tail = list(prompt_token_ids[-_PRIMING_TOKENS:])
        whole = len(tail)
        # The prompt may end within a character, which the output then completes.
        shown = text = self._decode(tail)
        while whole and text.endswith(_UNFINISHED):
            whole -= 1
            text = self._decode(tail[:whole])
        self._num_shown = len(shown.rstrip(_UNFINISHED)) - len(text)
        stream = DecodeStream(ids=tail[:whole], skip_special_tokens=self._skip_special_tokens)
        for token_id in tail[whole:]:
            stream.step(self._backend, token_id)
        return stream

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=self._skip_special_tokens))

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is unfinished or for a skipped special token."""
        try:
            text = self._stream.step(self._backend, token_id) or ""
        except Exception as error:  # the library raises plain Exception
            if "Invalid prefix" not in str(error):
                raise
            # The decoder changed its mind about earlier text (possible with odd byte sequences): start afresh here.
            self._stream = DecodeStream(skip_special_tokens=self._skip_special_tokens)
            text = self._stream.step(self._backend, token_id) or ""
        if self._num_shown and text:
            text, self._num_shown = text[self._num_shown :], 0
        return text


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, and holds back what may become one.

    Args:
        stops: not empty strings; may be none at all.
        include: whether the stop string itself belongs to the text.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        # The stop string that was found.
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Text that is safe to hand out. After `found` is set nothing more comes."""
        if self.found is not None:
            return ""
        if not self._stops:
            return text
        text = self._held + text
        hits = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if hits:
            # The one that ends first was complete first; of those the earliest, longest.
            place, stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            self.found, self._held = stop, ""
            return text[: place + len(stop)] if self._include else text[:place]
        held = self._length_held(text)
        self._held = text[len(text) - held :] if held else ""
        return text[: len(text) - held] if held else text

    def _length_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        last = text[-1:]
        for stop in self._stops:
            for length in range(min(len(stop) - 1, len(text)), longest, -1):
                if stop[length - 1] == last and text.endswith(stop[:length]):
                    longest = length
                    break
        return longest

    def flush(self) -> str:
        """What was held, once it is clear that no stop string comes."""
        held, self._held = self._held, ""
        return held
