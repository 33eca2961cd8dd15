"""The data plane's wire format: bytes to values and back, with limits. No sockets here.

Everything is little-endian. A connection starts with one exchange:

    reader -> holder   HELLO      JSON: who asks, whom it expects, its layout
    holder -> reader   CHALLENGE  a number used once; where the cluster has a service token only
    reader -> holder   PROOF      MAC of HELLO and the challenge under the token
    holder -> reader   WELCOME    JSON: who answers, how many blocks go in a batch; with a token its own MAC of the same
                       REFUSE     JSON: code and message; the holder closes

over tcp the test pattern follows WELCOME, over a unix socket the descriptors of the shared memory. Then, tcp only:

    reader -> holder   READ     lease id, all block ids, all generations
    holder -> reader   DATA     one status byte per block; then, of the blocks whose status is OK, in the order asked
                       payload  of one batch, back to back, and
                       trailer  its checksums, batch after batch, and at last
                       end      all generations, read again after the last payload was sent

The next READ may be sent before the answer to the last one is complete. A frame is magic, version, kind, length, body.
Whatever does not parse raises FrameError, and the connection ends.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from biphase.errors import TransferFailedError

VERSION = 4
MAX_HELLO_BYTES = 64 * 1024
MAX_BATCH_BLOCKS = 256
MAX_READ_BLOCKS = 8 * MAX_BATCH_BLOCKS
MAX_READ_BYTES = 40 * 1024
# A PIN is answered once, not batch by batch: it may name more.
MAX_PIN_BLOCKS = 16 * 1024
MAX_PIN_BYTES = 8 * 1024 + 16 * MAX_PIN_BLOCKS

_MAGIC = b"BPKV"
_HEADER = struct.Struct("<4sHHI")
_READ_HEAD = struct.Struct("<HI")
WORD_BYTES = 8
_WORD = np.dtype("<u8")
# Block ids or generations, one a block. Of thousands of them nothing may be done one by one in Python.
Words = npt.NDArray[np.uint64]
HEADER_BYTES = _HEADER.size


class FrameError(TransferFailedError):
    """The peer sent something that is not this protocol, or more than it allows."""


class Kind(IntEnum):
    HELLO = 1
    WELCOME = 2
    REFUSE = 3
    READ = 4
    DATA = 5
    # These are the nixl transport's, see there.
    PIN = 6
    DONE = 7
    AGENT = 8
    CHALLENGE = 9
    PROOF = 10


class Status(IntEnum):
    """What became of one block of a READ."""

    OK = 0
    # Not under this lease, or its generation moved on.
    STALE = 1


def pack_header(kind: Kind, length: int) -> bytes:
    return _HEADER.pack(_MAGIC, VERSION, kind, length)


def unpack_header(raw: bytes | memoryview, max_bytes: int) -> tuple[Kind, int]:
    """Kind and body length of a frame.

    Raises:
        FrameError: another protocol or version, an unknown kind, a body longer than `max_bytes`.
    """
    magic, version, kind, length = _HEADER.unpack(raw)
    if magic != _MAGIC:
        raise FrameError(f"not a block transfer connection: it starts with {bytes(magic)!r}")
    if version != VERSION:
        raise FrameError(f"block transfer protocol version {version} is not supported, this is version {VERSION}")
    if kind not in Kind._value2member_map_:
        raise FrameError(f"unknown frame kind {kind}")
    if length > max_bytes:
        raise FrameError(f"a {Kind(kind).name} frame of {length} bytes is over the limit of {max_bytes}")
    return Kind(kind), length


def pack_json(kind: Kind, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body, separators=(",", ":")).encode()
    return pack_header(kind, len(raw)) + raw


def unpack_json(raw: bytes) -> dict[str, Any]:
    """
    Raises:
        FrameError: not a JSON object.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a handshake that is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise FrameError("a handshake that is not a JSON object")
    return body


def text_field(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str):
        raise FrameError(f"handshake field {name} is missing or not text")
    return value


def count_field(body: dict[str, Any], name: str, minimum: int, maximum: int) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value <= maximum:
        raise FrameError(f"handshake field {name} is not a number from {minimum} to {maximum}")
    return value


def pack_read(lease_id: str, block_ids: bytes, generations: bytes, kind: Kind = Kind.READ) -> bytes:
    """A READ (or PIN) frame; at most MAX_READ_BLOCKS (MAX_PIN_BLOCKS) blocks, packed."""
    lease = lease_id.encode()
    body = _READ_HEAD.pack(len(lease), len(block_ids) // WORD_BYTES) + lease + block_ids + generations
    return pack_header(kind, len(body)) + body


def unpack_read(body: bytes, max_blocks: int = MAX_READ_BLOCKS) -> tuple[str, Words, Words]:
    """Lease id, block ids, generations.

    Raises:
        FrameError: the lengths do not add up, or no or too many blocks are asked for.
    """
    if len(body) < _READ_HEAD.size:
        raise FrameError("a READ frame without a head")
    lease_bytes, num_blocks = _READ_HEAD.unpack_from(body)
    start = _READ_HEAD.size + lease_bytes
    if not 1 <= num_blocks <= max_blocks or len(body) != start + num_blocks * 2 * WORD_BYTES:
        raise FrameError(f"a READ frame of {len(body)} bytes that claims {num_blocks} blocks")
    try:
        lease_id = body[_READ_HEAD.size : start].decode()
    except UnicodeDecodeError as error:
        raise FrameError("a READ frame whose lease id is not text") from error
    words = words_of(body[start:])
    return lease_id, words[:num_blocks], words[num_blocks:]


def pack_data(statuses: bytes) -> bytes:
    return pack_header(Kind.DATA, len(statuses)) + statuses


def trailer_bytes(num_blocks: int) -> int:
    return (num_blocks + 1) * WORD_BYTES


def wrong_blocks(ours: bytes, theirs: bytes) -> list[int]:
    """Places in the batch whose block is not what the holder sent, by two trailers: of what came, and as it came."""
    if ours == theirs:
        return []
    pairs = list(zip(unpack_words(ours)[:-1], unpack_words(theirs)[:-1], strict=True))
    # With every sum right, the batch or its order is another one.
    return [place for place, (our, their) in enumerate(pairs) if our != their] or list(range(len(pairs)))


def pack_words(values: Sequence[int] | Words) -> bytes:
    """Block ids, checksums or generations, 8 bytes each."""
    if not isinstance(values, np.ndarray):
        # A list is so packed three times as fast as by numpy.
        values = np.frombuffer(array("Q", values), np.uint64)
    return values.astype(_WORD, copy=False).tobytes()


def words_of(raw: bytes) -> Words:
    return np.frombuffer(raw, _WORD).astype(np.uint64, copy=False)


def unpack_words(raw: bytes) -> list[int]:
    values: list[int] = words_of(raw).tolist()
    return values
