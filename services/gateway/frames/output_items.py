"""The output of a response as items: a message, reasoning, function calls; and the events that tell how they grow.

Pure: fed with pieces of text in order, it keeps the items so far and says what to send. Whole answers feed it the same
way and keep the items only, so that a stream's items are those of the plain answer.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

# An event: its name, and its fields but for type and sequence_number.
Event = tuple[str, dict[str, Any]]


class OutputItems:
    """One item is open at a time; something of another kind closes it."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._text: list[str] = []
        self._logprobs: list[dict[str, Any]] = []

    def reasoning(self, text: str) -> Iterator[Event]:
        if not text:
            return
        if not self._is_open("reasoning"):
            yield from self._begin({"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": []})
            yield "response.content_part.added", self._part_at() | {"part": {"type": "reasoning_text", "text": ""}}
        self._text.append(text)
        yield "response.reasoning_text.delta", self._part_at() | {"delta": text}

    def text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        if not text and not logprobs:
            return
        if not self._is_open("message"):
            yield from self._begin({"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []})
            yield "response.content_part.added", self._part_at() | {"part": _text_part("", [])}
        self._text.append(text)
        self._logprobs.extend(logprobs)
        yield "response.output_text.delta", self._part_at() | {"delta": text, "logprobs": logprobs}

    def call(self, call_id: str, name: str) -> Iterator[Event]:
        """A function call begins."""
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call_id, "name": name, "arguments": ""}
        yield from self._begin(item)

    def arguments(self, text: str) -> Iterator[Event]:
        """More of the arguments of the call that is open."""
        if not text or not self._is_open("function_call"):
            return
        self._text.append(text)
        yield "response.function_call_arguments.delta", self._item_at() | {"delta": text}

    def finish(self, *, cut: bool) -> Iterator[Event]:
        """Closes what is open.

        Args:
            cut: the answer ended before the model had done with it.
        """
        if not self.items:
            yield from self._begin({"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []})
            yield "response.content_part.added", self._part_at() | {"part": _text_part("", [])}
        yield from self._close("incomplete" if cut else "completed")

    def _is_open(self, kind: str) -> bool:
        return self._open is not None and self._open["type"] == kind

    def _begin(self, item: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        item["status"] = "in_progress"
        self._open = item
        self._text, self._logprobs = [], []
        self.items.append(item)
        shown = {**item, "content": []} if "content" in item else dict(item)
        yield "response.output_item.added", {"output_index": len(self.items) - 1, "item": shown}

    def _close(self, status: str) -> Iterator[Event]:
        item = self._open
        if item is None:
            return
        self._open = None
        text = "".join(self._text)
        item["status"] = status
        at = self._item_at(item)
        if item["type"] == "function_call":
            item["arguments"] = text
            yield _call_done(at, item)
        else:
            is_reasoning = item["type"] == "reasoning"
            part = {"type": "reasoning_text", "text": text} if is_reasoning else _text_part(text, self._logprobs)
            item["content"] = [part]
            yield from _part_done(at | {"content_index": 0}, part)
        yield _item_done(at["output_index"], item)

    def _item_at(self, item: dict[str, Any] | None = None) -> dict[str, Any]:
        item = item or self._open
        assert item is not None
        return {"item_id": item["id"], "output_index": len(self.items) - 1}

    def _part_at(self) -> dict[str, Any]:
        return self._item_at() | {"content_index": 0}


def replayed(items: Sequence[dict[str, Any]]) -> Iterator[Event]:
    """The events of items that are complete, each text in one piece."""
    for index, item in enumerate(items):
        at: dict[str, Any] = {"item_id": item["id"], "output_index": index}
        empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
        yield "response.output_item.added", {"output_index": index, "item": {**item, **empty, "status": "in_progress"}}
        if item["type"] == "function_call":
            yield "response.function_call_arguments.delta", at | {"delta": item["arguments"]}
            yield _call_done(at, item)
        for place, part in enumerate(item.get("content", ())):
            at |= {"content_index": place}
            text = part["text"]
            if part["type"] == "reasoning_text":
                yield "response.content_part.added", at | {"part": {**part, "text": ""}}
                yield "response.reasoning_text.delta", at | {"delta": text}
            else:
                yield "response.content_part.added", at | {"part": _text_part("", [])}
                yield "response.output_text.delta", at | {"delta": text, "logprobs": part["logprobs"]}
            yield from _part_done(at, part)
        yield _item_done(index, item)


def _call_done(at: dict[str, Any], item: dict[str, Any]) -> Event:
    return "response.function_call_arguments.done", at | {"name": item["name"], "arguments": item["arguments"]}


def _part_done(at: dict[str, Any], part: dict[str, Any]) -> Iterator[Event]:
    if part["type"] == "reasoning_text":
        yield "response.reasoning_text.done", at | {"text": part["text"]}
    else:
        yield "response.output_text.done", at | {"text": part["text"], "logprobs": part["logprobs"]}
    yield "response.content_part.done", at | {"part": part}


def _item_done(index: int, item: dict[str, Any]) -> Event:
    return "response.output_item.done", {"output_index": index, "item": item}


def _text_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _new_id(prefix: str) -> str:
    return f"{prefix}_{secrets.token_hex(16)}"
