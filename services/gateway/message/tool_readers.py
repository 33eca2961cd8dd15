"""Readers of tool calls in the formats that models write: text in pieces in, content and call deltas out.

A reader holds back what may be the beginning of a call, and white space around calls, which is part of no content. What
looks like a call and is none (no JSON, no known tool) comes out as content.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol

from services.gateway.message.calls import Calls, Content, OneCall, call_id, held_length, short_call_id
from services.gateway.message.json_call import JsonValue
from services.gateway.message.parts import MessagePart


class ToolReader(Protocol):
    def push(self, text: str) -> MessagePart:
        """Takes the next text."""
        ...

    def finish(self) -> MessagePart:
        """The text is over: what was held comes out."""
        ...


class HermesReader:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`: Hermes, Qwen, SmolLM and many more."""

    begin, end = "<tool_call>", "</tool_call>"

    def __init__(self, names: Collection[str], max_calls: int) -> None:
        self._calls = Calls(names, max_calls, call_id)
        self._content = Content(self._calls)
        self._call: OneCall | None = None
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
            self._call = OneCall(self._calls)
        return part

    def _in_call(self, call: OneCall, text: str, part: MessagePart) -> str:
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
        self._calls = Calls(names, max_calls, call_id)
        self._call: OneCall | None = None
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
            self._call = OneCall(self._calls)
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
        self._calls = Calls(names, max_calls, short_call_id)
        self._content = Content(self._calls)
        # What the next text belongs to.
        self._state: Callable[[str, MessagePart], str] = self._in_content
        self._call: OneCall | None = None
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
            self._call = OneCall(self._calls)
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
