"""When something is to happen to what passes a proxy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Trigger:
    """Calls `action` once, in a pump's thread, before the last of `num_parts` parts is forwarded."""

    min_bytes: int
    num_parts: int
    action: Callable[[], None]

    def sees(self, num_bytes: int) -> bool:
        """Whether it is time."""
        if num_bytes >= self.min_bytes:
            self.num_parts -= 1
        return self.num_parts == 0
