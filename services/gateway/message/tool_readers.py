"""Readers of tool calls in the formats that models write: text in pieces in, content and call deltas out.

A reader holds back what may be the beginning of a call, and white space around calls, which is part of no content. What
looks like a call and is none (no JSON, no known tool) comes out as content.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection
from typing import Protocol

from services.gateway.message.json_call import JsonCall, JsonValue
from services.gateway.message.parts import MessagePart, ToolCallDelta

_ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_call_id() -> str:
    """Nine letters and digits, the one form that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))


def held_length(text: str, marker: str) -> int:
    """How much of the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


class ToolReader(Protocol):
    def push(self, text: str) -> MessagePart:
        """Takes the next text."""
        ...

    def finish(self) -> MessagePart:
        """The text is over: what was held comes out."""
        ...


class _Calls:
    """The calls of one message: their indexes and ids, and which names are tools.

    Args:
        names: of the tools there are.
        max_calls: later ones are dropped; 0: no limit.
    """

    def __init__(self, names: Collection[str], max_calls: int, new_id: Callable[[], str]) -> None:
        self._names = names
        self._max_calls = max_calls
        self._new_id = new_id
        self.count = 0
        self._dropping = False

    def begin(self, name: str, part: MessagePart) -> bool:
        """False when there is no such tool."""
        if name not in self._names:
            return False
        self._dropping = 0 < self._max_calls <= self.count
        if not self._dropping:
            part.tool_calls.append(ToolCallDelta(self.count, call_id=self._new_id(), name=name))
        self.count += 1
        return True

    def arguments(self, text: str, part: MessagePart) -> None:
        if text and not self._dropping:
            part.tool_calls.append(ToolCallDelta(self.count - 1, text))


class _Content:
    """Content around calls: white space waits, since what stands beside a call is not content."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._blank = ""
        self._has_begun = False

    def push(self, text: str, part: MessagePart) -> None:
        text = self._blank + text
        kept = text.rstrip()
        if not kept:
            self._blank = text
            return
        self._blank = text[len(kept) :]
        part.content += kept if self._has_begun or not self._calls.count else kept.lstrip()
        self._has_begun = True

    def call_follows(self) -> None:
        self._blank = ""

    def finish(self, part: MessagePart) -> None:
        if not self._calls.count:
            part.content += self._blank
        self._blank = ""


class _OneCall:
    """Reads one JSON call for a reader that knows where it begins."""

    def __init__(self, calls: _Calls) -> None:
        self._calls = calls
        self._json = JsonCall()
        # It names a tool that there is.
        self.is_call = False
        self._names_nothing = False

    def push(self, text: str, part: MessagePart) -> int:
        """How much it took."""
        taken = self._json.push(text)
        if not self.is_call and self._json.name:
            self.is_call = self._calls.begin(self._json.name, part)
            self._names_nothing = not self.is_call
        if self.is_call:
            self._calls.arguments(self._json.take_arguments(), part)
        return taken

    @property
    def is_over(self) -> bool:
        return self._json.is_done or self._json.is_broken or self._names_nothing

    @property
    def raw(self) -> str:
        return self._json.raw


class HermesReader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and many more."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str], max_calls: int) -> None:
        self._calls = _Calls(names, max_calls, call_id)
        self._content = _Content(self._calls)
        self._call: _OneCall | None = None
        self._after_call = False
        self._held = ""

    def push(self, text: str) -> MessagePart:
        part = MessagePart()
        text, self._held = self._held + text, ""
        while text:
            if self._call is not None:
                text = self._in_call(self._call, text, part)
                continue
            if self._after_call:
                stripped = text.lstrip()
                if stripped.startswith(self.end):
                    text, self._after_call = stripped[len(self.end) :], False
                    continue
                if self.end.startswith(stripped):
                    self._held = text
                    break
                self._after_call = False
            place = text.find(self.begin)
            if place < 0:
                held = held_length(text, self.begin)
                self._content.push(text[: len(text) - held], part)
                self._held = text[len(text) - held :] if held else ""
                break
            self._content.push(text[:place], part)
            text = text[place + len(self.begin) :]
            self._call = _OneCall(self._calls)
        return part

    def _in_call(self, call: _OneCall, text: str, part: MessagePart) -> str:
        taken = call.push(text, part)
        if call.is_call:
            self._content.call_follows()
        if call.is_over:
            self._call = None
            self._after_call = call.is_call
            if not call.is_call:
                self._content.push(self.begin + call.raw, part)
        return text[taken:]

    def finish(self) -> MessagePart:
        part = MessagePart()
        if self._call is not None and not self._call.is_call:
            self._content.push(self.begin + self._call.raw, part)
        if not self._after_call:
            self._content.push(self._held, part)
        self._content.finish(part)
        return part


class LlamaReader:
    """`{"name": ..., "parameters": {...}}`, several with ";" between, perhaps after `<|python_tag|>`: Llama 3."""

    begin, separator = "<|python_tag|>", ";"

    def __init__(self, names: Collection[str], max_calls: int) -> None:
        self._calls = _Calls(names, max_calls, call_id)
        self._call: _OneCall | None = None
        self._is_content = False
        # What stood before the call that is being read.
        self._before = ""
        self._held = ""

    def push(self, text: str) -> MessagePart:
        part = MessagePart()
        if self._is_content:
            part.content = text
            return part
        text, self._held = self._held + text, ""
        while text:
            if self._call is not None:
                taken = self._call.push(text, part)
                text = text[taken:]
                if self._call.is_over:
                    call, self._call = self._call, None
                    if not call.is_call:
                        self._is_content = True
                        part.content += self._before + call.raw + text
                        break
                continue
            start = text.lstrip()
            if self._calls.count:
                start = start.removeprefix(self.separator).lstrip()
            if start.startswith(self.begin):
                start = start[len(self.begin) :].lstrip()
            if not start or self.begin.startswith(start):
                self._held = text
                break
            if not start.startswith("{"):
                self._is_content = True
                part.content += text
                break
            self._before, text = text[: len(text) - len(start)], start
            self._call = _OneCall(self._calls)
        return part

    def finish(self) -> MessagePart:
        part = MessagePart()
        if self._call is not None and not self._call.is_call:
            part.content += self._before + self._call.raw
        elif not self._calls.count:
            part.content += self._held
        return part


class MistralReader:
    """`[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or in newer models `[TOOL_CALLS]name[ARGS]{...}`."""

    begin, args_mark = "[TOOL_CALLS]", "[ARGS]"

    def __init__(self, names: Collection[str], max_calls: int) -> None:
        self._calls = _Calls(names, max_calls, short_call_id)
        self._content = _Content(self._calls)
        # What the next text belongs to.
        self._state: Callable[[str, MessagePart], str] = self._in_content
        self._call: _OneCall | None = None
        self._value = JsonValue()
        self._held = ""

    def push(self, text: str) -> MessagePart:
        part = MessagePart()
        text, self._held = self._held + text, ""
        while text:
            text = self._state(text, part)
        return part

    def _in_content(self, text: str, part: MessagePart) -> str:
        place = text.find(self.begin)
        if place < 0:
            held = held_length(text, self.begin)
            self._content.push(text[: len(text) - held], part)
            self._held = text[len(text) - held :] if held else ""
            return ""
        self._content.push(text[:place], part)
        self._content.call_follows()
        self._state = self._at_start
        return text[place + len(self.begin) :]

    def _at_start(self, text: str, part: MessagePart) -> str:
        rest = text.lstrip()
        if rest:
            self._state = self._between if rest[0] in "[{" else self._at_name
        return rest.removeprefix("[") if rest[:1] == "[" else rest

    def _between(self, text: str, part: MessagePart) -> str:
        rest = text.lstrip(" \t\r\n,")
        if not rest:
            return ""
        if rest[0] == "{":
            self._call = _OneCall(self._calls)
            self._state = self._in_call
            return rest
        self._state = self._in_content
        return rest.removeprefix("]")

    def _in_call(self, text: str, part: MessagePart) -> str:
        assert self._call is not None
        taken = self._call.push(text, part)
        if self._call.is_over:
            if not self._call.is_call:
                self._content.push(self._call.raw, part)
            self._call = None
            self._state = self._between
        return text[taken:]

    def _at_name(self, text: str, part: MessagePart) -> str:
        place = text.find("{")
        if place < 0:
            self._held = text
            return ""
        # Between name and arguments newer models put marks: [CALL_ID]..., [ARGS].
        name = text[:place].partition("[")[0].strip()
        if not self._calls.begin(name, part):
            self._content.push(text[:place], part)
            self._state = self._in_content
            return text[place:]
        self._value = JsonValue()
        self._state = self._in_arguments
        return text[place:]

    def _in_arguments(self, text: str, part: MessagePart) -> str:
        for place, char in enumerate(text):
            _, ended = self._value.push(char)
            if ended:
                self._calls.arguments(text[: place + 1], part)
                self._state = self._in_content
                return text[place + 1 :]
        self._calls.arguments(text, part)
        return ""

    def finish(self) -> MessagePart:
        part = MessagePart()
        if self._call is not None and not self._call.is_call:
            self._content.push(self._call.raw, part)
        self._content.push(self._held, part)
        self._content.finish(part)
        return part
