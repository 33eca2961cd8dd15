from __future__ import annotations

from biphase.request import BlockHash
from services.gateway.routing.speculation import SpeculativeHolders

CHAIN = [BlockHash(bytes([place]) * 32) for place in range(6)]


def test_leading_blocks_by_holder() -> None:
    holders = SpeculativeHolders(lifetime_seconds=10, clock=lambda: 0.0)
    holders.add("a", CHAIN[:4])
    holders.add("b", CHAIN[:2])
    holders.add("c", CHAIN[1:])
    assert holders.num_leading_blocks(CHAIN) == {"a": 4, "b": 2}
    assert holders.num_leading_blocks(CHAIN[1:]) == {"a": 3, "b": 1, "c": 5}
    assert holders.num_leading_blocks([]) == {}


def test_entries_expire_and_the_oldest_go_first() -> None:
    now = 0.0
    holders = SpeculativeHolders(lifetime_seconds=10, max_blocks=4, clock=lambda: now)
    holders.add("a", CHAIN[:2])
    now = 6.0
    holders.add("b", CHAIN[:1])
    now = 11.0
    assert holders.num_leading_blocks(CHAIN) == {"b": 1}
    holders.add("d", CHAIN[2:])
    assert holders.num_leading_blocks(CHAIN) == {}
    assert holders.num_leading_blocks(CHAIN[2:]) == {"d": 4}
