"""Logprobs in the two forms clients know: chat's list of tokens, and completions' parallel lists."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from biphase.rpc.v1 import common_pb2
from biphase.tokenizer.tokenizer import ModelTokenizer

# What -inf becomes: JSON has no infinity.
LOWEST_LOGPROB = -9999.0


def _value(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)


class LogprobWriter:
    """
    Args:
        tokens_as_ids: name tokens "token_id:N" instead of by their text.
    """

    def __init__(self, tokenizer: ModelTokenizer, *, tokens_as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._tokens_as_ids = tokens_as_ids

    def name(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._tokens_as_ids else self._tokenizer.token_text(token_id)

    def chat(self, entries: Sequence[common_pb2.TokenLogprobs], count: int) -> list[dict[str, Any]]:
        """`content` of chat's logprobs.

        Args:
            count: alternatives to show with each token.
        """
        return [self._chat_entry(entry, count) for entry in entries]

    def _chat_entry(self, entry: common_pb2.TokenLogprobs, count: int) -> dict[str, Any]:
        token_ids, logprobs = entry.token_ids, entry.logprobs
        shown = self._one(token_ids[0], logprobs[0])
        # The sampled token stands first; it is among the best already when its rank says so.
        alternatives = _alternatives(entry, count)
        shown["top_logprobs"] = [self._one(token_id, logprob) for token_id, logprob in alternatives]
        return shown

    def _one(self, token_id: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self.name(token_id),
            "logprob": _value(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def prompt(
        self, token_ids: Sequence[int], entries: Sequence[common_pb2.TokenLogprobs], count: int
    ) -> list[dict[str, Any] | None]:
        """vLLM's `prompt_logprobs`: for each prompt token a map of ids; none for the first."""
        rows: list[dict[str, Any] | None] = [None]
        for token_id, entry in zip(token_ids[1:], entries, strict=False):
            row = {str(token_id): self._ranked(token_id, entry.logprobs[0], entry.rank)}
            for place, (other, logprob) in enumerate(_alternatives(entry, count)):
                row.setdefault(str(other), self._ranked(other, logprob, place + 1))
            rows.append(row)
        return rows

    def _ranked(self, token_id: int, logprob: float, rank: int) -> dict[str, Any]:
        return {"logprob": _value(logprob), "rank": rank, "decoded_token": self._tokenizer.token_text(token_id)}


def _alternatives(entry: common_pb2.TokenLogprobs, count: int) -> list[tuple[int, float]]:
    """The `count` most likely tokens, best first. Workers send the token itself first and then these."""
    return list(zip(entry.token_ids[1 : count + 1], entry.logprobs[1 : count + 1], strict=True))


class CompletionLogprobs:
    """Collects completions' parallel lists for one choice; offsets run on over all parts of a stream."""

    def __init__(
        self, writer: LogprobWriter, tokenizer: ModelTokenizer, count: int, *, skip_special_tokens: bool
    ) -> None:
        self._writer = writer
        # Tokens that take no room in the text.
        self._unseen = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._tokenizer = tokenizer
        self._count = count
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def part(
        self, token_ids: Sequence[int], entries: Sequence[common_pb2.TokenLogprobs | None]
    ) -> dict[str, list[Any]]:
        """The lists for the next tokens. An entry of None is the prompt's first token, which nothing predicts."""
        offsets: list[int] = []
        values: list[float | None] = []
        names: list[str] = []
        best: list[dict[str, float] | None] = []
        for token_id, entry in zip(token_ids, entries, strict=True):
            offsets.append(self._offset)
            if token_id not in self._unseen:
                self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token_id)))
            names.append(self._writer.name(token_id))
            if entry is None:
                values.append(None)
                best.append(None)
                continue
            value = _value(entry.logprobs[0])
            values.append(value)
            row = {names[-1]: value}
            row |= {self._writer.name(other): _value(logprob) for other, logprob in _alternatives(entry, self._count)}
            best.append(row)
        return {"text_offset": offsets, "token_logprobs": values, "tokens": names, "top_logprobs": best}
