"""JSON and SSE by hand where it is done once per token."""

from __future__ import annotations

import json
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

DONE = b"data: [DONE]\n\n"


def json_string(text: str) -> str:
    """`text` as a JSON string. Line separators that some readers of SSE split at are escaped."""
    if text.isascii():
        return encode_basestring_ascii(text)
    quoted = encode_basestring(text)
    # Rare: one look for the three is cheaper than three replacements.
    if "\u2028" in quoted or "\u2029" in quoted or "\x85" in quoted:
        quoted = quoted.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return quoted


def to_json(value: Any) -> str:
    """Compact JSON; never NaN."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    if not text.isascii():
        text = text.replace("\u2028", "\\u2028").replace("\u2029", "\\u2029").replace("\x85", "\\u0085")
    return text


def event(value: Any) -> bytes:
    return f"data: {to_json(value)}\n\n".encode()
