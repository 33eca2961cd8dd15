"""The frames between the checker and the processes that compile for it: four bytes of length, then the content."""

from __future__ import annotations

import struct
from typing import BinaryIO

LENGTH = struct.Struct("<I")


def framed(content: bytes) -> bytes:
    return LENGTH.pack(len(content)) + content


def read_frame(source: BinaryIO) -> bytes | None:
    """The next content; None at the end of the input."""
    head = source.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    content = source.read(length)
    return content if len(content) == length else None
