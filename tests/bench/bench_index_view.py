"""Measures the index view: bytes a block, and time of one lookup, with a million blocks indexed.

Run by hand: `python tests/bench/bench_index_view.py [num_blocks]`. Prints one line per figure.
"""

from __future__ import annotations

import os
import sys
import time

from biphase.index.events import HASH_BYTES, IndexEvent
from biphase.index.view import IndexView
from biphase.request import BlockHash, NodeId

_CHAIN = 2000
_HASHES_PER_EVENT = 256


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def main(num_blocks: int = 1_000_000) -> None:
    chain = [BlockHash(os.urandom(HASH_BYTES)) for _ in range(_CHAIN)]
    view = IndexView()
    before = resident_bytes()
    start = time.perf_counter()
    events = 0
    for number in range(num_blocks // _HASHES_PER_EVENT):
        node = NodeId(f"prefill-{number % 8}")
        view.apply(IndexEvent(node, "one", number // 8 + 1, stored=os.urandom(HASH_BYTES * _HASHES_PER_EVENT)))
        events += 1
    seconds = time.perf_counter() - start
    print(f"{view.num_entries} blocks: {(resident_bytes() - before) / view.num_entries:.1f} bytes a block")
    print(f"event of {_HASHES_PER_EVENT} hashes: {seconds / events * 1e6:.0f} us")
    for name, length in (("a", _CHAIN), ("b", _CHAIN * 3 // 4), ("c", 7)):
        view.apply(IndexEvent(NodeId(name), "one", 1, stored=b"".join(chain[:length])))
    times = []
    for _ in range(300):
        # Other blocks in the processor's caches, as between two requests.
        view.longest_chain([BlockHash(os.urandom(HASH_BYTES)) for _ in range(50)])
        start = time.perf_counter()
        found = view.longest_chain(chain)
        times.append(time.perf_counter() - start)
    assert found == [("a", _CHAIN), ("b", _CHAIN * 3 // 4), ("c", 7)]
    times.sort()
    print(f"longest_chain of {_CHAIN} hashes: p50 {times[150] * 1e6:.0f} us, p99 {times[297] * 1e6:.0f} us")
    start = time.perf_counter()
    view.void(NodeId("prefill-0"))
    print(f"void: {(time.perf_counter() - start) * 1e6:.0f} us", end=", ")
    steps = []
    remaining = 1
    while remaining:
        start = time.perf_counter()
        remaining = view.sweep()
        steps.append(time.perf_counter() - start)
    print(f"longest step of its sweep {max(steps) * 1e3:.1f} ms")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
