"""A response: the object, and the events of its stream. Owns no I/O; items are built in output_items."""

from __future__ import annotations

import time
from typing import Any

from biphase.errors import BiphaseError
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.domain import Generation
from services.gateway.frames.output_items import Event, OutputItems
from services.gateway.frames.text import to_json
from services.gateway.frames.usage import Usage
from services.gateway.logprobs import LogprobWriter
from services.gateway.sequence_text import Delta
from services.gateway.wire_responses import ResponsesRequest


class ResponseFrames:
    """Fed with every delta in order, whether the answer is streamed or not."""

    def __init__(self, body: ResponsesRequest, generation: Generation, tokenizer: ModelTokenizer) -> None:
        self._generation = generation
        self._writer = LogprobWriter(tokenizer, tokens_as_ids=generation.answer.tokens_as_ids)
        self._built = OutputItems()
        self._echo = _echoed(body)
        self._sequence = 0
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._completed_at: int | None = None
        self._finish_reason: str | None = None

    def begin(self) -> bytes:
        shown = self.response(None)
        return self._bytes(("response.created", {"response": shown})) + self._bytes(
            ("response.in_progress", {"response": shown})
        )

    def push(self, delta: Delta) -> bytes:
        """Takes what came and returns its events."""
        count = self._generation.answer.logprobs
        logprobs = [] if count is None else self._writer.chat(delta.logprobs, count)
        if delta.finish_reason is not None:
            self._finish_reason = delta.finish_reason
        events = list(self._built.reasoning(delta.reasoning))
        # Logprobs of the tokens that make a call or a thought have no text to stand beside.
        if delta.text or not (delta.reasoning or delta.tool_calls):
            events += self._built.text(delta.text, logprobs)
        for call in delta.tool_calls:
            if call.name:
                events += self._built.call(call.call_id, call.name)
            events += self._built.arguments(call.arguments)
        return b"".join(map(self._bytes, events))

    def end(self, usage: Usage) -> tuple[bytes, dict[str, Any]]:
        """The last events, and the response as it stays."""
        cut = self._finish_reason == "length"
        events = b"".join(map(self._bytes, self._built.finish(cut=cut)))
        self._status = "incomplete" if cut else "completed"
        self._completed_at = None if cut else int(time.time())
        response = self.response(usage)
        return events + self._bytes((f"response.{self._status}", {"response": response})), response

    def fail(self, error: BiphaseError) -> tuple[bytes, dict[str, Any]]:
        """What a stream that broke ends with, and the response as it stays."""
        self._status = "failed"
        self._close_items()
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        self._error = {"code": code, "message": error.message}
        response = self.response(None)
        return self._bytes(("response.failed", {"response": response})), response

    def cancel(self) -> tuple[bytes, dict[str, Any]]:
        """What a stream ends with whose response was cancelled, and the response as it stays."""
        self._close_items()
        response = self.with_status("cancelled")
        # There is no event of that name.
        return self._bytes(("response.incomplete", {"response": response})), response

    def with_status(self, status: str) -> dict[str, Any]:
        """The response before it has an end of its own: "queued", "in_progress"."""
        self._status = status
        return self.response(None)

    def _close_items(self) -> None:
        if self._built.items:
            list(self._built.finish(cut=True))

    def response(self, usage: Usage | None) -> dict[str, Any]:
        generation, sampling = self._generation, self._generation.sampling
        return {
            "id": generation.response_id,
            "object": "response",
            "created_at": generation.created,
            "completed_at": self._completed_at,
            "status": self._status,
            "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": generation.model,
            "output": list(self._built.items) if self._status != "in_progress" else [],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_logprobs": generation.answer.logprobs or 0,
            "usage": _usage(usage) if usage is not None else None,
            **self._echo,
        }

    def _bytes(self, event: Event) -> bytes:
        self._sequence += 1
        return event_bytes(event, self._sequence - 1)


def event_bytes(event: Event, number: int) -> bytes:
    """
    Args:
        number: its place among the response's events.
    """
    name, fields = event
    body = {"type": name, "sequence_number": number, **fields}
    return f"event: {name}\ndata: {to_json(body)}\n\n".encode()


def _echoed(body: ResponsesRequest) -> dict[str, Any]:
    """What the reply repeats of the request."""
    text = body.text or {}
    return {
        "background": bool(body.background),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "text": {"format": text.get("format") or {"type": "text"}},
        "tool_choice": body.tool_choice if body.tool_choice is not None else "auto",
        "tools": body.tools or [],
        "truncation": body.truncation or "disabled",
        "user": body.user if isinstance(body.user, str) else None,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
