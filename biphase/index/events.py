"""What holders say about their blocks, as it stands in Redis: events, snapshots, and each holder's position.

Owns the form of the bytes and the names of the keys, per namespace:

    events     stream   one entry per event: holder, incarnation, sequence, hashes stored and removed
    holders    hash     node id -> incarnation and last sequence, written in one transaction with the event
    snapshot   string   per holder: everything it holds after event `sequence`, and a fence: a stream id such that
                        all later events of this holder have greater ids

An event's sequence is one more than the one before, from 1, per holder and incarnation. So a reader can tell what it
has seen (again) from what it has missed, and a missed event leads to the snapshot and the events after its fence.
Owns no connection and no state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from biphase.index.connection import key
from biphase.request import NodeId

HASH_BYTES = 32
# Stream entries kept at least; beyond, readers that fell behind take the snapshot.
MAX_STREAM_ENTRIES = 8192
# A stream id before every other.
START_ID = "0-0"


class EventKind(StrEnum):
    DELTA = "delta"
    # A snapshot was written; nothing was lost, so whoever is up to date stays so.
    SNAPSHOT = "snapshot"
    # A snapshot was written because events before it were dropped: only the snapshot is right.
    RELOAD = "reload"
    # The holder leaves: it holds nothing any more.
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class IndexEvent:
    """One step in what one holder holds. `stored` and `removed`: hashes, packed end to end, disjoint."""

    node_id: NodeId
    incarnation: str
    sequence: int
    kind: EventKind = EventKind.DELTA
    stored: bytes = b""
    removed: bytes = b""

    def to_fields(self) -> dict[str, str | bytes]:
        fields: dict[str, str | bytes] = {
            "n": self.node_id,
            "i": self.incarnation,
            "s": str(self.sequence),
            "k": self.kind.value,
        }
        if self.stored:
            fields["+"] = self.stored
        if self.removed:
            fields["-"] = self.removed
        return fields

    @staticmethod
    def from_fields(fields: Mapping[bytes, bytes]) -> IndexEvent:
        """
        Raises:
            ValueError: not an event.
        """
        try:
            event = IndexEvent(
                node_id=NodeId(fields[b"n"].decode()),
                incarnation=fields[b"i"].decode(),
                sequence=int(fields[b"s"]),
                kind=EventKind(fields[b"k"].decode()),
                stored=fields.get(b"+", b""),
                removed=fields.get(b"-", b""),
            )
        except KeyError as error:
            raise ValueError(f"index event without field {error}") from error
        _check_packed(event.stored)
        _check_packed(event.removed)
        return event


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Everything a holder holds after its event `sequence`. `hashes`: packed end to end."""

    incarnation: str
    sequence: int
    fence: str
    hashes: bytes = b""

    @property
    def header(self) -> bytes:
        """The first line, which tells the snapshot from every other without its hashes."""
        return json.dumps([self.incarnation, self.sequence, self.fence]).encode() + b"\n"

    def to_bytes(self) -> bytes:
        return self.header + self.hashes

    @staticmethod
    def from_bytes(raw: bytes) -> Snapshot:
        """
        Raises:
            ValueError: not a snapshot.
        """
        head, found, hashes = raw.partition(b"\n")
        parts = json.loads(head)
        if not found or not isinstance(parts, list) or len(parts) != 3:
            raise ValueError("an index snapshot starts with its header line")
        incarnation, sequence, fence = parts
        id_order(fence)
        _check_packed(hashes)
        return Snapshot(str(incarnation), int(sequence), str(fence), hashes)


@dataclass(frozen=True, slots=True)
class Position:
    """How far a holder's events go."""

    incarnation: str
    sequence: int

    def to_text(self) -> str:
        return f"{self.sequence} {self.incarnation}"

    @staticmethod
    def from_bytes(raw: bytes) -> Position:
        """
        Raises:
            ValueError: not a position.
        """
        sequence, _, incarnation = raw.decode().partition(" ")
        return Position(incarnation, int(sequence))


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Names of one namespace's keys in Redis."""

    events: str
    holders: str
    snapshot_prefix: str

    @staticmethod
    def of(cluster: str, namespace: bytes) -> IndexKeys:
        return IndexKeys(*(key(cluster, name, namespace.hex()) for name in ("events", "holders", "snapshot")))

    def snapshot(self, node_id: str) -> str:
        return f"{self.snapshot_prefix}:{node_id}"


def id_order(stream_id: str | bytes) -> tuple[int, int]:
    """Stream ids compare as pairs of numbers, not as text.

    Raises:
        ValueError: not a stream id.
    """
    text = stream_id.decode() if isinstance(stream_id, bytes) else stream_id
    milliseconds, _, counter = text.partition("-")
    return int(milliseconds), int(counter or 0)


def _check_packed(hashes: bytes) -> None:
    if len(hashes) % HASH_BYTES:
        raise ValueError(f"{len(hashes)} bytes are no whole number of block hashes")
