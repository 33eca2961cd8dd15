"""Reads one call, `{"name": ..., "arguments": {...}}`, from JSON text that arrives in pieces.

The arguments are handed out as they come, in the model's own spelling, as soon as the name is known. Only as much JSON
is understood as that needs: where keys, strings and values begin and end.
"""

from __future__ import annotations

import json
from enum import Enum, auto

_BLANK = " \t\r\n"
_NAME_KEYS = ("name",)
_ARGUMENT_KEYS = ("arguments", "parameters")


class JsonValue:
    """Finds the end of one JSON value: fed character by character from its first one on."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False

    def push(self, char: str) -> tuple[bool, bool]:
        """
        Returns:
            Whether the character belongs to the value, and whether the value has ended with it or before it.
        """
        if self._in_string:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._in_string = False
                return True, self._depth == 0
            return True, False
        if self._scalar:
            ended = char in _BLANK or char in ",}]"
            return not ended, ended
        if char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
            return True, self._depth <= 0
        elif self._depth == 0:
            self._scalar = True
        return True, False


class _At(Enum):
    OPEN = auto()
    KEY = auto()
    IN_KEY = auto()
    COLON = auto()
    VALUE = auto()
    IN_VALUE = auto()
    COMMA = auto()
    DONE = auto()
    BROKEN = auto()


class JsonCall:
    """
    `name` is "" until it is known. `raw` is all that was taken, for those who find that it is no call.
    """

    def __init__(self) -> None:
        self.name = ""
        self.raw = ""
        self._at = _At.OPEN
        self._key = ""
        self._value = JsonValue()
        self._text = ""
        self._escaped = False
        # Arguments not handed out yet.
        self._ready = ""

    @property
    def is_done(self) -> bool:
        return self._at is _At.DONE

    @property
    def is_broken(self) -> bool:
        """It is no JSON object; or one, complete, that names nothing to call."""
        return self._at is _At.BROKEN or (self._at is _At.DONE and not self.name)

    def push(self, text: str) -> int:
        """Takes text until the object ends or proves to be none. Returns how many characters it took."""
        for place, char in enumerate(text):
            if self._at in (_At.DONE, _At.BROKEN):
                self.raw += text[:place]
                return place
            self._step(char)
        self.raw += text
        return len(text)

    def take_arguments(self) -> str:
        """What has come of the arguments since the last time; nothing before the name."""
        if not self.name:
            return ""
        ready, self._ready = self._ready, ""
        return ready

    def _step(self, char: str) -> None:
        at = self._at
        if at is _At.IN_VALUE:
            self._in_value(char)
        elif at is _At.IN_KEY:
            if self._escaped:
                self._escaped = False
            elif char == "\\":
                self._escaped = True
            elif char == '"':
                self._at = _At.COLON
                return
            self._key += char
        elif char in _BLANK:
            return
        elif at is _At.OPEN:
            self._at = _At.KEY if char == "{" else _At.BROKEN
        elif at is _At.KEY:
            self._at = _At.IN_KEY if char == '"' else _At.DONE if char == "}" else _At.BROKEN
            self._key = ""
        elif at is _At.COLON:
            self._at = _At.VALUE if char == ":" else _At.BROKEN
        elif at is _At.VALUE:
            self._at, self._value, self._text = _At.IN_VALUE, JsonValue(), ""
            self._in_value(char)
        elif at is _At.COMMA:
            self._after_value(char)

    def _after_value(self, char: str) -> None:
        self._at = _At.KEY if char == "," else _At.DONE if char == "}" else _At.BROKEN

    def _in_value(self, char: str) -> None:
        belongs, ended = self._value.push(char)
        if belongs:
            self._text += char
            # An object streams; arguments as a string of JSON have to be unquoted first.
            if self._key in _ARGUMENT_KEYS and self._text[0] != '"':
                self._ready += char
        if not ended:
            return
        self._at = _At.COMMA
        if self._key in _NAME_KEYS:
            self.name = self._string()
        elif self._key in _ARGUMENT_KEYS and self._text[0] == '"':
            self._ready += self._string()
        if not belongs and char not in _BLANK:
            self._after_value(char)

    def _string(self) -> str:
        try:
            value = json.loads(self._text)
        except ValueError:
            value = None
        if not isinstance(value, str) or not value:
            self._at = _At.BROKEN
            return ""
        return value
