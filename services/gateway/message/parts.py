"""The pieces that an answer's text is taken apart into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A piece of a tool call. The first one of a call has its id and name, and no arguments."""

    index: int
    arguments: str = ""
    call_id: str = ""
    name: str = ""


@dataclass(slots=True)
class ToolCall:
    """A call, as far as it has come."""

    call_id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class MessagePart:
    """What some text adds to the message."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


def gather(calls: list[ToolCall], deltas: Sequence[ToolCallDelta]) -> None:
    """Adds pieces to the calls so far."""
    for delta in deltas:
        if delta.name:
            calls.append(ToolCall(delta.call_id, delta.name))
        calls[delta.index].arguments += delta.arguments
