"""What all readers of tool calls share: the calls of one message, the content around them, one JSON call."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection

from services.gateway.message.json_call import JsonCall
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


class Calls:
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


class Content:
    """Content around calls: white space waits, since what stands beside a call is not content."""

    def __init__(self, calls: Calls) -> None:
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


class OneCall:
    """Reads one JSON call for a reader that knows where it begins."""

    def __init__(self, calls: Calls) -> None:
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
