"""Every node places alike, evenly, and a lost store moves its own share only."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter

from biphase.index.placement import Run, place, rank
from biphase.request import BlockHash, NodeId

STORES = [NodeId(f"kvstore-{n}") for n in range(5)]


def chain(name: str, length: int) -> list[BlockHash]:
    return [BlockHash(hashlib.sha256(f"{name}-{n}".encode()).digest()) for n in range(length)]


def test_the_order_of_the_list_does_not_matter() -> None:
    (block_hash,) = chain("a", 1)
    shuffled = STORES[:]
    for seed in range(10):
        random.Random(seed).shuffle(shuffled)
        assert rank(block_hash, shuffled) == rank(block_hash, STORES)
    # Across processes and versions too.
    assert rank(block_hash, STORES)[0] == "kvstore-4"


def test_shares_are_even() -> None:
    owners = Counter(rank(block_hash, STORES)[0] for block_hash in chain("a", 5000))
    assert min(owners.values()) > 850 and max(owners.values()) < 1150


def test_a_lost_store_moves_its_own_share_to_the_next_in_rank() -> None:
    left = STORES[1:]
    for block_hash in chain("a", 500):
        before = rank(block_hash, STORES)
        assert rank(block_hash, left) == [store for store in before if store != STORES[0]]


def test_runs_cover_the_chain_and_stay_together() -> None:
    hashes = chain("a", 300)
    runs = place(hashes, STORES)
    assert runs[0].start == 0 and runs[-1].stop == 300
    assert all(run.stop == after.start and run.store != after.store for run, after in itertools.pairwise(runs))
    # A prefix is placed as it was in the longer chain.
    assert place(hashes[:130], STORES)[0] == (
        runs[0] if runs[0].stop <= 128 else Run(runs[0].store, 0, min(runs[0].stop, 130))
    )
    assert place(hashes, STORES[:1]) == [Run(STORES[0], 0, 300)]
    assert place([], STORES) == []
