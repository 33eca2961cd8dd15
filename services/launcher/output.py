"""What the launcher prints while children run: their lines passed on, one line per event, in the format asked for.

Owns the border between a child's free text (tracebacks, warnings of libraries) and log events.
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import TextIO

_TEXT_EVENT = re.compile(r"\d\d:\d\d:\d\d\.\d{3} (DEBUG|INFO|WARNING|ERROR|CRITICAL) ")


class ChildOutput:
    """Writes children's lines. Events pass through as they are; anything else gets the child's name."""

    def __init__(self, log_format: str, stream: TextIO | None = None) -> None:
        self._json = log_format == "json"
        self._stream = stream

    def is_event(self, line: str) -> bool:
        """Whether the line is a log event of ours, as `biphase.telemetry.events` writes them."""
        if not self._json:
            return _TEXT_EVENT.match(line) is not None
        if not line.startswith("{"):
            return False
        try:
            parsed = json.loads(line)
        except ValueError:
            return False
        return isinstance(parsed, dict) and "event" in parsed

    def write(self, child: str, line: str) -> None:
        stream = self._stream or sys.stderr
        if not self.is_event(line):
            line = self._wrapped(child, line)
        # One write per line: whoever else writes to this stream cannot get in between.
        stream.write(line + "\n")
        stream.flush()

    def _wrapped(self, child: str, line: str) -> str:
        if self._json:
            fields = {"time": round(time.time(), 6), "level": "info", "component": child, "event": "output"}
            return json.dumps({**fields, "line": line})
        return f"{child} | {line}"
