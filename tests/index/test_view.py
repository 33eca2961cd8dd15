"""The view as pure data: every event counts once, gaps and other lives void, and the compact table is exact."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable

from biphase.index.events import EventKind, IndexEvent, Snapshot
from biphase.index.view import Applied, IndexView, Span
from biphase.request import BlockHash, NodeId

A, B, C = NodeId("a"), NodeId("b"), NodeId("c")


def h(number: int) -> BlockHash:
    return BlockHash(hashlib.sha256(str(number).encode()).digest())


def pack(numbers: Iterable[int]) -> bytes:
    return b"".join(map(h, numbers))


def event(
    node: NodeId,
    sequence: int,
    stored: Iterable[int] = (),
    removed: Iterable[int] = (),
    incarnation: str = "one",
    kind: EventKind = EventKind.DELTA,
) -> IndexEvent:
    return IndexEvent(node, incarnation, sequence, kind, pack(stored), pack(removed))


def snapshot(sequence: int, held: Iterable[int], incarnation: str = "one") -> Snapshot:
    return Snapshot(incarnation, sequence, "0-0", pack(held))


def held(view: IndexView, node: NodeId, numbers: Iterable[int]) -> set[int]:
    return {number for number in numbers if node in view.holders_of(h(number))}


def test_an_event_counts_once() -> None:
    view = IndexView()
    first = event(A, 1, stored=[1, 2])
    assert view.apply(first) is Applied.CHANGED
    assert view.apply(event(A, 2, stored=[3], removed=[1])) is Applied.CHANGED
    assert view.apply(first) is Applied.IGNORED
    assert held(view, A, range(5)) == {2, 3}
    assert view.num_blocks(A) == 2
    view.check_integrity()


def test_a_gap_voids_until_a_snapshot() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=[1]))
    view.apply(event(B, 1, stored=[1]))
    assert view.apply(event(A, 3, stored=[3])) is Applied.GAP
    assert held(view, A, range(5)) == set()
    assert view.position(A) is None
    assert view.apply(event(A, 4, stored=[4])) is Applied.GAP
    view.load(A, snapshot(4, [3, 4]))
    assert view.apply(event(A, 4, stored=[9])) is Applied.IGNORED
    assert view.apply(event(A, 5, removed=[3])) is Applied.CHANGED
    assert held(view, A, range(10)) == {4}
    assert held(view, B, range(10)) == {1}
    view.check_integrity()


def test_another_life_voids_the_last_one_for_good() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=[1, 2]))
    view.apply(event(A, 1, stored=[3], incarnation="two"))
    assert held(view, A, range(5)) == {3}
    assert view.apply(event(A, 2, stored=[4])) is Applied.IGNORED
    assert held(view, A, range(5)) == {3}
    # Its first words missed: nothing is known of it.
    assert view.apply(event(A, 7, stored=[4], incarnation="three")) is Applied.GAP
    assert held(view, A, range(5)) == set()
    view.check_integrity()


def test_reload_and_gone() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=[1]))
    assert view.apply(event(A, 2, kind=EventKind.SNAPSHOT)) is Applied.CHANGED
    assert held(view, A, [1]) == {1}
    assert view.apply(event(A, 3, kind=EventKind.RELOAD)) is Applied.GAP
    assert held(view, A, [1]) == set()
    view.load(A, snapshot(3, [2]))
    assert view.apply(event(A, 4, kind=EventKind.GONE)) is Applied.CHANGED
    assert held(view, A, [1, 2]) == set()
    assert view.apply(event(A, 1, stored=[1])) is Applied.IGNORED


def test_a_holder_stays_in_force_while_its_snapshot_loads() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=[1, 2]))
    loading = view.start_load(A, snapshot(5, [2, 3]))
    assert not view.load_some(loading, 1)
    assert held(view, A, range(5)) == {1, 2}
    view.check_integrity()
    assert view.load_some(loading, 1)
    assert held(view, A, range(5)) == {2, 3}
    while view.sweep():
        view.check_integrity()
    assert view.num_entries == 2
    other = view.start_load(A, snapshot(6, [7, 8, 9]))
    view.load_some(other, 1)
    view.abandon_load(other)
    while view.sweep():
        pass
    view.check_integrity()
    assert view.num_entries == 2


def test_longest_chain_by_holder() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=range(100)))
    view.apply(event(B, 1, stored=[*range(70), *range(80, 200)]))
    view.apply(event(C, 1, stored=[5, 6]))
    chain = [h(n) for n in range(150)]
    assert view.longest_chain(chain) == [(A, 100), (B, 70)]
    assert view.longest_chain(chain, exclude={A}) == [(B, 70)]
    assert view.longest_chain(chain[:10]) == [(A, 10), (B, 10)]
    assert view.longest_chain(chain[5:]) == [(A, 95), (B, 65), (C, 2)]
    assert view.longest_chain([]) == []
    assert view.longest_chain([h(999), *chain]) == []
    view.void(A)
    assert view.longest_chain(chain) == [(B, 70)]
    view.void(B)
    assert view.longest_chain(chain) == []


def test_plan_covers_a_chain_that_is_spread_over_holders() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=range(10)))
    view.apply(event(B, 1, stored=range(5, 30)))
    view.apply(event(C, 1, stored=range(28, 31)))
    chain = [h(n) for n in range(40)]
    assert view.plan(chain) == [Span(A, 0, 10), Span(B, 10, 30), Span(C, 30, 31)]
    assert view.plan(chain, exclude=[A]) == []
    assert view.plan(chain[:8]) == [Span(A, 0, 8)]


def test_random_operations_against_plain_sets() -> None:
    for seed in range(20):
        rng = random.Random(seed)
        view = IndexView()
        truth: dict[NodeId, set[int]] = {}
        sequence = {A: 0, B: 0, C: 0}
        life = {A: 0, B: 0, C: 0}
        for _ in range(150):
            node = rng.choice([A, B, C])
            move = rng.random()
            if move < 0.75:
                stored = set(rng.sample(range(60), rng.randrange(8)))
                removed = set(rng.sample(range(60), rng.randrange(8))) - stored
                sequence[node] += 1
                said = event(node, sequence[node], stored, removed, incarnation=str(life[node]))
                outcome = view.apply(said)
                if node in truth or sequence[node] == 1:
                    assert outcome is Applied.CHANGED
                    truth[node] = (truth.get(node, set()) | stored) - removed
                    assert view.apply(said) is Applied.IGNORED
                else:
                    assert outcome is Applied.GAP
            elif move < 0.82:
                view.void(node)
                truth.pop(node, None)
            elif move < 0.88:
                life[node] += 1
                sequence[node] = 1
                view.apply(event(node, 1, incarnation=str(life[node])))
                truth[node] = set()
            elif move < 0.94:
                sequence[node] += 1
                everything = set(rng.sample(range(60), 20))
                view.load(node, snapshot(sequence[node], everything, str(life[node])))
                truth[node] = everything
            else:
                view.sweep(rng.randrange(1, 64))
            view.check_integrity()
            chain = [h(n) for n in rng.sample(range(60), 6)]
            for node in (A, B, C):
                assert view.num_blocks(node) == len(truth.get(node, ()))
                assert held(view, node, range(60)) == truth.get(node, set())
            lengths = dict(view.longest_chain(chain))
            for node in (A, B, C):
                expected = 0
                while expected < 6 and chain[expected] in map(h, truth.get(node, ())):
                    expected += 1
                assert lengths.get(node, 0) == expected
        while view.sweep():
            pass
        view.check_integrity()
        assert view.num_entries == len(set().union(*truth.values()))


def test_leading_blocks_by_life() -> None:
    view = IndexView()
    view.apply(event(A, 1, stored=range(100)))
    view.apply(event(B, 1, stored=range(70), incarnation="b1"))
    chain = [h(n) for n in range(150)]
    assert view.leading_blocks(chain) == {"one": 100, "b1": 70}
    assert view.leading_blocks(chain[:10]) == {"one": 10, "b1": 10}
    assert view.leading_blocks(chain[69:75]) == {"one": 6, "b1": 1}
    assert view.leading_blocks(chain[100:]) == view.leading_blocks([]) == {}
    view.apply(event(B, 1, stored=range(3), incarnation="b2"))
    assert view.leading_blocks(chain) == {"one": 100, "b2": 3}
    view.void(A)
    assert view.leading_blocks(chain) == {"b2": 3}


def test_leading_blocks_of_holders_without_gaps_are_exact() -> None:
    rng = random.Random(5)
    chain = [h(n) for n in range(1700)]
    # Where samples and parts begin, and just beside.
    edges = [1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 1535, 1536, 1537, 1698, 1699, 1700]
    for _ in range(60):
        view = IndexView()
        lengths = {f"n{n}": rng.choice([rng.choice(edges), rng.randrange(1, 1700)]) for n in range(rng.randrange(1, 9))}
        for name, length in lengths.items():
            view.apply(event(NodeId(name), 1, stored=range(length), incarnation=name))
        asked = rng.choice([1700, rng.randrange(1, 1700)])
        assert view.leading_blocks(chain[:asked]) == {name: min(length, asked) for name, length in lengths.items()}


def test_leading_blocks_end_at_a_gap_that_a_sample_meets() -> None:
    rng = random.Random(6)
    chain = [h(n) for n in range(1100)]
    for _ in range(40):
        view, start, width = IndexView(), rng.randrange(1, 900), rng.randrange(1, 150)
        view.apply(event(A, 1, stored=[n for n in range(1100) if not start <= n < start + width], incarnation="a"))
        view.apply(event(B, 1, stored=range(1100), incarnation="b"))
        found = view.leading_blocks(chain)
        assert found["b"] == 1100
        # Never less than the truth, and wrong only for gaps of fewer than 64 blocks.
        assert found["a"] == start or (width < 64 and found["a"] == 1100)
