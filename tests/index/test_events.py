"""Events, snapshots and positions survive the wire and refuse what is none."""

from __future__ import annotations

import pytest

from biphase.index.events import EventKind, IndexEvent, IndexKeys, Position, Snapshot, id_order
from biphase.request import NodeId


def on_the_wire(event: IndexEvent) -> dict[bytes, bytes]:
    return {
        name.encode(): value if isinstance(value, bytes) else value.encode()
        for name, value in event.to_fields().items()
    }


@pytest.mark.parametrize("kind", list(EventKind))
def test_event_round_trip(kind: EventKind) -> None:
    event = IndexEvent(NodeId("prefill-0"), "one", 7, kind, b"\x00" * 64, b"\xff" * 32)
    assert IndexEvent.from_fields(on_the_wire(event)) == event
    empty = IndexEvent(NodeId("prefill-0"), "one", 7, kind)
    assert IndexEvent.from_fields(on_the_wire(empty)) == empty


@pytest.mark.parametrize("change", [{b"n": None}, {b"s": b"x"}, {b"k": b"what"}, {b"+": b"short"}, {b"n": b"\xff"}])
def test_event_refuses_what_is_none(change: dict[bytes, bytes | None]) -> None:
    fields = on_the_wire(IndexEvent(NodeId("a"), "one", 1)) | change
    with pytest.raises(ValueError):
        IndexEvent.from_fields({name: value for name, value in fields.items() if value is not None})


def test_snapshot_round_trip() -> None:
    snapshot = Snapshot("one", 3, "12-3", b"\n" * 64)
    assert Snapshot.from_bytes(snapshot.to_bytes()) == snapshot
    for bad in (b"", b"[]\n", b'["a",1,"0-0"]', b'["a",1,"0-0"]\nshort', b'["a",1,"x"]\n'):
        with pytest.raises(ValueError):
            Snapshot.from_bytes(bad)


def test_positions_ids_and_keys() -> None:
    assert Position.from_bytes(Position("a b", 3).to_text().encode()) == Position("a b", 3)
    assert id_order("9-1") < id_order(b"10-0") < id_order("10-2") < id_order("10-10")
    keys = IndexKeys.of("c", b"\x01")
    assert keys.events == "biphase:{c}:events:01"
    assert keys.snapshot("n") == "biphase:{c}:snapshot:01:n"
