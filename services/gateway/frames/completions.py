"""Text completions: chunks and whole answers, with echo and the scoring call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from biphase.rpc.v1 import common_pb2
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.domain import Generation
from services.gateway.frames.choice import Choice
from services.gateway.frames.chunks import Chunks, around
from services.gateway.frames.usage import Usage
from services.gateway.logprobs import CompletionLogprobs, LogprobWriter
from services.gateway.sequence_text import Delta


class CompletionFrames:
    """Implements Frames."""

    def __init__(self, generation: Generation, tokenizer: ModelTokenizer, fingerprint: str) -> None:
        self._generation = generation
        self._options = generation.answer
        self._tokenizer = tokenizer
        self._fingerprint = fingerprint
        self._writer = LogprobWriter(tokenizer, tokens_as_ids=self._options.tokens_as_ids)
        self._chunks = Chunks(
            generation,
            "text_completion",
            fingerprint,
            before='"text":',
            after=',"logprobs":null,"finish_reason":null,"stop_reason":null',
        )
        self._plain = self._options.logprobs is None and not self._options.return_token_ids
        # By choice: the character offsets of logprobs run on from part to part.
        self._lists: dict[int, CompletionLogprobs] = {}

    def begin(self, choice: Choice, usage: Usage | None) -> bytes:
        if not self._options.echo:
            return b""
        chosen = self._chosen(choice, choice.prompt.text, self._prompt_part(choice), None, None, ())
        return self._chunks.chunk(chosen, usage)

    def delta(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        if self._plain and usage is None and delta.finish_reason is None:
            return self._chunks.text(choice.index, delta.text)
        logprobs = self._part(choice, delta.token_ids, delta.logprobs)
        chosen = self._chosen(choice, delta.text, logprobs, delta.finish_reason, delta.stop_reason, delta.token_ids)
        return self._chunks.chunk(chosen, usage)

    def usage(self, usage: Usage) -> bytes:
        return self._chunks.usage(usage)

    def _chosen(
        self,
        choice: Choice,
        text: str,
        logprobs: dict[str, list[Any]] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
        token_ids: Sequence[int],
    ) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        if self._options.return_token_ids:
            chosen["token_ids"] = list(token_ids)
            chosen["prompt_token_ids"] = list(choice.prompt.token_ids)
        return chosen

    def _part(
        self, choice: Choice, token_ids: Sequence[int], entries: Sequence[common_pb2.TokenLogprobs | None]
    ) -> dict[str, list[Any]] | None:
        count = self._options.logprobs
        if count is None or not entries:
            return None
        lists = self._lists.get(choice.index)
        if lists is None:
            skips = self._generation.text.skip_special_tokens
            lists = CompletionLogprobs(self._writer, self._tokenizer, count, skip_special_tokens=skips)
            self._lists[choice.index] = lists
        return lists.part(token_ids, entries)

    def _prompt_part(self, choice: Choice) -> dict[str, list[Any]] | None:
        return self._part(choice, choice.prompt.token_ids, [None, *choice.prompt_logprobs])

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        return {
            **around(self._generation, "text_completion"),
            "choices": [self._choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": usage.to_object(),
            "kv_transfer_params": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        text = choice.text
        token_ids: list[int] = choice.token_ids
        entries: list[common_pb2.TokenLogprobs | None] = list(choice.logprobs)
        if self._options.echo:
            text = choice.prompt.text + text
            token_ids = [*choice.prompt.token_ids, *token_ids]
            entries = [None, *choice.prompt_logprobs, *entries]
        prompt_logprobs = None
        count = self._options.prompt_logprobs
        if count is None and self._options.echo:
            count = self._options.logprobs
        if count is not None:
            prompt_logprobs = self._writer.prompt(choice.prompt.token_ids, choice.prompt_logprobs, count)
        logprobs = self._part(choice, token_ids, entries)
        if logprobs is None and self._options.logprobs is not None:
            logprobs = {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}
        return {
            "index": choice.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._options.return_token_ids else None,
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": list(choice.prompt.token_ids) if self._options.return_token_ids else None,
        }
