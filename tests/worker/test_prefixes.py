"""Whether a prefix is read or computed: by the speeds that were measured."""

from __future__ import annotations

import pytest

from biphase.transfer.peer import PeerStats
from biphase.worker.prefixes import reading_seconds

MIB = 2**20


def peer(name: str, *, handshake: float = 0.0, num_bytes: int = 0, seconds: float = 0.0) -> PeerStats:
    return PeerStats(name, "one", "tcp", handshake, num_bytes, num_bytes // 65536, 0, seconds)


def test_reading_is_reckoned_by_what_came_then_by_the_handshake_then_by_a_guess() -> None:
    peers = [
        peer("slow", handshake=5.0, num_bytes=100 * MIB, seconds=10.0),
        peer("young", handshake=2.0, num_bytes=MIB, seconds=10.0),
        peer("silent"),
    ]
    (slow, young, silent, unknown) = (
        reading_seconds({name: 10 * MIB}, peers) for name in ("slow", "young", "silent", "unknown")
    )
    assert slow == pytest.approx(1.0, rel=0.05)
    assert young == pytest.approx(10 * MIB / 2e9, abs=0.006)
    assert silent == unknown > young
    assert reading_seconds({"slow": 10 * MIB, "young": 10 * MIB}, peers) == pytest.approx(slow + young)
    assert reading_seconds({}, peers) == 0.0


def test_what_an_earlier_life_delivered_counts_until_the_next_has_delivered() -> None:
    old = peer("store", handshake=9.0, num_bytes=100 * MIB, seconds=1.0)
    assert reading_seconds({"store": 100 * MIB}, [old, peer("store", handshake=9.0)]) == pytest.approx(1.0, rel=0.01)
