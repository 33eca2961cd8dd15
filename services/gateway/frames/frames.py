"""What chat and completions frames have in common, and what the streaming loop needs of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from services.gateway.frames.choice import Choice
from services.gateway.frames.usage import Usage
from services.gateway.sequence_text import Delta


class Frames(Protocol):
    """The bytes of one answer. `usage` is None but for continuous_usage_stats."""

    def begin(self, choice: Choice, usage: Usage | None) -> bytes:
        """What comes before a choice's first delta; may be nothing."""
        ...

    def delta(self, choice: Choice, delta: Delta, usage: Usage | None) -> bytes: ...

    def usage(self, usage: Usage) -> bytes:
        """The last chunk, without choices."""
        ...

    def whole(self, choices: Sequence[Choice], usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...
