"""Chat completions: chunks and whole answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.domain import Generation
from services.gateway.frames.choice import Choice
from services.gateway.frames.chunks import Chunks, around
from services.gateway.frames.usage import Usage
from services.gateway.logprobs import LogprobWriter
from services.gateway.message.parts import ToolCallDelta
from services.gateway.sequence_text import Delta


class ChatFrames:
    """Implements Frames."""

    def __init__(self, generation: Generation, tokenizer: ModelTokenizer, fingerprint: str) -> None:
        self._generation = generation
        self._options = generation.answer
        self._fingerprint = fingerprint
        self._writer = LogprobWriter(tokenizer, tokens_as_ids=self._options.tokens_as_ids)
        self._chunks = Chunks(
            generation,
            "chat.completion.chunk",
            fingerprint,
            before='"delta":{"content":',
            after='},"logprobs":null,"finish_reason":null',
        )
        # Nothing is asked for beside the text; and the text is more than content.
        self._plain = self._options.logprobs is None and not self._options.return_token_ids
        self._reads = generation.message is not None

    def begin(self, choice: Choice, usage: Usage | None) -> bytes:
        chosen: dict[str, Any] = {
            "index": choice.index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        shows_ids = self._options.return_token_ids
        more = {"prompt_token_ids": list(choice.prompt.token_ids)} if shows_ids else {}
        return self._chunks.chunk(chosen, usage, **more)

    def delta(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes:
        if self._plain and usage is None:
            if not self._reads and delta.finish_reason is None:
                return self._chunks.text(choice.index, delta.text)
            if self._reads and not _says_something(delta):
                return b""
        content: dict[str, Any] = {}
        if delta.reasoning:
            # Under the name that clients read now, and the one they read before.
            content["reasoning"] = content["reasoning_content"] = delta.reasoning
        if delta.tool_calls:
            content["tool_calls"] = [_call_delta(call) for call in delta.tool_calls]
        if delta.text or (delta.finish_reason is None and not content):
            content["content"] = delta.text
        chosen: dict[str, Any] = {
            "index": choice.index,
            "delta": content,
            "logprobs": self._logprobs(delta.logprobs),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            chosen["stop_reason"] = delta.stop_reason
        if self._options.return_token_ids:
            chosen["token_ids"] = list(delta.token_ids)
        return self._chunks.chunk(chosen, usage)

    def usage(self, usage: Usage) -> bytes:
        return self._chunks.usage(usage)

    def _logprobs(self, entries: Sequence[Any]) -> dict[str, Any] | None:
        if self._options.logprobs is None or not entries:
            return None
        return {"content": self._writer.chat(entries, self._options.logprobs)}

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        first = choices[0]
        prompt_ids = first.prompt.token_ids
        prompt_logprobs = None
        if self._options.prompt_logprobs is not None:
            prompt_logprobs = self._writer.prompt(prompt_ids, first.prompt_logprobs, self._options.prompt_logprobs)
        return {
            **around(self._generation, "chat.completion"),
            "choices": [self._choice(choice) for choice in choices],
            "service_tier": None,
            "system_fingerprint": self._fingerprint,
            "usage": usage.to_object(),
            "prompt_logprobs": prompt_logprobs,
            "prompt_token_ids": list(prompt_ids) if self._options.return_token_ids else None,
            "kv_transfer_params": None,
        }

    def _choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.logprobs)
        if logprobs is None and self._options.logprobs is not None:
            logprobs = {"content": []}
        return {
            "index": choice.index,
            "message": _message(choice),
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
            "token_ids": choice.token_ids if self._options.return_token_ids else None,
        }


def _says_something(delta: Delta) -> bool:
    """Text that may become a call, or is one's frame, is read and not shown."""
    return bool(delta.text or delta.reasoning or delta.tool_calls or delta.finish_reason is not None)


def _message(choice: Choice) -> dict[str, Any]:
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.text if choice.text or not choice.tool_calls else None,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": choice.reasoning or None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    # Absent without calls: clients ask whether it is there.
    if choice.tool_calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in choice.tool_calls
        ]
    return message


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.call_id, "type": "function", "function": function}
