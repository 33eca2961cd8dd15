from __future__ import annotations

import random

from biphase.request import BlockHash
from services.gateway.routing.speculation import SpeculativeHolders

CHAIN = [BlockHash(bytes([place]) * 32) for place in range(6)]


def test_leading_blocks_by_holder() -> None:
    holders = SpeculativeHolders(lifetime_seconds=10, clock=lambda: 0.0)
    holders.add(CHAIN[:4], "a")
    holders.add(CHAIN[:2], "b")
    holders.add(CHAIN, "c")
    holders.add(CHAIN[:1], "c")
    assert holders.num_leading_blocks(CHAIN) == {"a": 4, "b": 2, "c": 6}
    assert holders.num_leading_blocks([*CHAIN[:3], BlockHash(b"x" * 32)]) == {"a": 3, "b": 2, "c": 3}
    assert holders.num_leading_blocks([]) == {}


def test_entries_live_for_their_time_and_half_as_long_again_at_most() -> None:
    now = 0.0
    holders = SpeculativeHolders(lifetime_seconds=10, clock=lambda: now)
    holders.add(CHAIN[:2], "a")
    now = 6.0
    holders.add(CHAIN[:1], "b")
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
        holders.add(chain, str(number))
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
        holders.add(given, holder)
        for block_hash in given:
            plain.setdefault(block_hash, set()).add(holder)
        asked = draw.choice(chains)
        expected: dict[str, int] = {}
        for place, block_hash in enumerate(asked):
            for name in plain.get(block_hash, ()):
                if expected.get(name, 0) == place:
                    expected[name] = place + 1
        assert holders.num_leading_blocks(asked) == expected


def test_long_chains_are_known_to_within_a_few_blocks() -> None:
    draw = random.Random(7)
    for _ in range(50):
        holders = SpeculativeHolders(lifetime_seconds=10, max_blocks=10**6, clock=lambda: 0.0)
        chain = [BlockHash(draw.randbytes(32)) for _ in range(draw.randint(60, 400))]
        lengths = {name: draw.randint(1, len(chain)) for name in draw.sample("abcdefgh", draw.randint(1, 8))}
        for name, length in lengths.items():
            holders.add(chain[:length], name)
        # Whole chains that were given are known exactly.
        assert holders.num_leading_blocks(chain) == lengths
        # One that goes its own way somewhere: never more than what is shared, and hardly less.
        fork = draw.randint(1, len(chain))
        other = [*chain[:fork], *(BlockHash(draw.randbytes(32)) for _ in range(20))]
        found = holders.num_leading_blocks(other)
        for name, length in lengths.items():
            shared = min(length, fork)
            assert shared - 8 < found.get(name, 0) <= shared
            assert fork > 64 or found[name] == shared


def test_two_holders_are_given_a_chain_at_once() -> None:
    holders = SpeculativeHolders(lifetime_seconds=10, clock=lambda: 0.0)
    holders.add(CHAIN, "a", "b")
    holders.add(CHAIN[:3], "b", "c")
    assert holders.num_leading_blocks(CHAIN) == {"a": 6, "b": 6, "c": 3}
