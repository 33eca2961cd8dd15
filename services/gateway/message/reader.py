"""Reads one choice's text: reasoning first, then content and tool calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from services.gateway.message.parts import MessagePart
from services.gateway.message.reasoning import ReasoningFormat, ReasoningReader
from services.gateway.message.tool_formats import ToolFormat


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What the text of a request's answers has to be read for."""

    reasoning: ReasoningFormat | None = None
    # The prompt ends within reasoning.
    reasoning_is_open: bool = False
    include_reasoning: bool = True
    # Reasoning of so many tokens is ended by these; None: it takes what it takes.
    max_reasoning_tokens: int | None = None
    reasoning_end_ids: Sequence[int] = ()
    tools: ToolFormat | None = None
    tool_names: Collection[str] = ()
    # 0: no limit.
    max_calls: int = 0
    # The client named the tool: then calls are no reason for the end of the answer.
    is_named: bool = False

    def reader(self) -> MessageReader:
        return MessageReader(self)


class MessageReader:
    def __init__(self, form: MessageForm) -> None:
        self._form = form
        self._reasoning = None
        if form.reasoning is not None:
            self._reasoning = ReasoningReader(form.reasoning, is_open=form.reasoning_is_open)
        self._tools = None if form.tools is None else form.tools.reader(form.tool_names, form.max_calls)
        self.num_calls = 0
        self.num_reasoning_tokens = 0

    @property
    def is_reasoning(self) -> bool:
        """Whether the text so far ends within reasoning."""
        return self._reasoning is not None and self._reasoning.is_open

    @property
    def reasoning_end_ids(self) -> Sequence[int]:
        return self._form.reasoning_end_ids

    @property
    def has_thought_enough(self) -> bool:
        """Whether its reasoning, which goes on, is to be ended."""
        most = self._form.max_reasoning_tokens
        return most is not None and self.is_reasoning and self.num_reasoning_tokens >= most

    def push(self, text: str, *, num_tokens: int = 0, is_last: bool) -> MessagePart:
        """
        Args:
            num_tokens: that the text took.
            is_last: nothing follows; what was held comes out.
        """
        if self.is_reasoning:
            self.num_reasoning_tokens += num_tokens
        part = MessagePart(content=text)
        if self._reasoning is not None:
            part = self._reasoning.push(text)
            if is_last:
                rest = self._reasoning.finish()
                part.content += rest.content
                part.reasoning += rest.reasoning
        if self._tools is not None:
            read = self._tools.push(part.content)
            if is_last:
                rest = self._tools.finish()
                read.content += rest.content
                read.tool_calls += rest.tool_calls
            part.content, part.tool_calls = read.content, read.tool_calls
            self.num_calls += sum(1 for call in read.tool_calls if call.name)
        if not self._form.include_reasoning:
            part.reasoning = ""
        return part

    def finish_reason(self, reason: str) -> str:
        """The reason as clients know it, for what the engine says."""
        return "tool_calls" if reason == "stop" and self.num_calls and not self._form.is_named else reason
