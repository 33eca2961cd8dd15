from __future__ import annotations

import random

from biphase.request import BlockHash
from services.gateway.routing.speculation import SpeculativeHolders

CHAIN = [BlockHash(bytes([place]) * 32) for place in range(6)]


def test_leading_blocks_by_holder() -> None:
    holders = SpeculativeHolders(lifetime_seconds=10, clock=lambda: 0.0)
    holders.add("a", CHAIN[:4])
    holders.add("b", CHAIN[:2])
    holders.add("c", CHAIN)
    holders.add("c", CHAIN[:1])
    assert holders.num_leading_blocks(CHAIN) == {"a": 4, "b": 2, "c": 6}
    assert holders.num_leading_blocks([*CHAIN[:3], BlockHash(b"x" * 32)]) == {"a": 3, "b": 2, "c": 3}
    assert holders.num_leading_blocks([]) == {}


def test_entries_live_for_their_time_and_half_as_long_again_at_most() -> None:
    now = 0.0
    holders = SpeculativeHolders(lifetime_seconds=10, clock=lambda: now)
    holders.add("a", CHAIN[:2])
    now = 6.0
    holders.add("b", CHAIN[:1])
    now = 9.9
    assert holders.num_leading_blocks(CHAIN) == {"a": 2, "b": 1}
    now = 15.0
    assert holders.num_leading_blocks(CHAIN) == {"b": 1}
    now = 100.0
    assert holders.num_leading_blocks(CHAIN) == {}


def test_the_oldest_go_when_there_are_too_many() -> None:
    holders = SpeculativeHolders(lifetime_seconds=10, max_blocks=6, clock=lambda: 0.0)
    chains = [[BlockHash(bytes([number, place]) * 16) for place in range(3)] for number in range(6)]
    for number, chain in enumerate(chains):
        holders.add(str(number), chain)
    known = [number for number, chain in enumerate(chains) if holders.num_leading_blocks(chain)]
    assert 0 < len(known) < 6 and known[-1] == 5


def test_the_same_as_a_plain_table() -> None:
    draw = random.Random(5)
    holders = SpeculativeHolders(lifetime_seconds=10, max_blocks=10**6, clock=lambda: 0.0)
    plain: dict[BlockHash, set[str]] = {}
    chains: list[list[BlockHash]] = [[]]
    for _ in range(400):
        parent = draw.choice(chains)
        stem = parent[: draw.randint(0, len(parent))]
        chain = stem + [BlockHash(draw.randbytes(32)) for _ in range(draw.randint(1, 12))]
        chains.append(chain)
        holder = draw.choice("abcde")
        given = chain[: draw.randint(1, len(chain))]
        holders.add(holder, given)
        for block_hash in given:
            plain.setdefault(block_hash, set()).add(holder)
        asked = draw.choice(chains)
        expected: dict[str, int] = {}
        for place, block_hash in enumerate(asked):
            for name in plain.get(block_hash, ()):
                if expected.get(name, 0) == place:
                    expected[name] = place + 1
        assert holders.num_leading_blocks(asked) == expected
