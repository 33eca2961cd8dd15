"""Leases: each block referenced once per lease, each lease ended once."""

import random
import threading

import numpy as np
import pytest

from biphase.transfer.frames import Words
from biphase.transfer.leases import Lease, LeaseEnd, LeaseTable
from tests.transfer.fakes import FakePool


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def table(num_blocks: int = 8) -> tuple[LeaseTable, FakePool, Clock]:
    pool, clock = FakePool(num_blocks), Clock()
    return LeaseTable(pool, 10.0, clock), pool, clock


def test_a_lease_holds_one_reference_per_block() -> None:
    leases, pool, _ = table()
    lease = leases.open("d", "i", [1, 2, 2])
    assert pool.references[:4] == [0, 1, 1, 0]
    assert leases.extend(lease.lease_id, [2, 3])
    assert pool.references[:4] == [0, 1, 1, 1]
    assert leases.release([lease.lease_id]) == 1
    assert leases.release([lease.lease_id, "unknown"]) == 0
    assert not any(pool.references)
    assert not leases.extend(lease.lease_id, [4]) and not any(pool.references)


def test_adopted_references_become_the_leases_own() -> None:
    leases, pool, _ = table()
    pool.acquire([0, 1])
    lease = leases.open("d", "i", [0, 1], adopt=True)
    pool.acquire([1, 2])
    assert leases.extend(lease.lease_id, [1, 2], adopt=True)
    assert pool.references[:3] == [1, 1, 1]
    leases.release([lease.lease_id])
    assert not any(pool.references)


def test_references_meant_for_an_ended_lease_stay_the_callers() -> None:
    leases, pool, _ = table()
    pool.acquire([0])
    assert not leases.extend("gone", [0], adopt=True)
    assert pool.references[0] == 1


def test_expiry_and_renewal() -> None:
    leases, pool, clock = table()
    one, two = leases.open("d", "i", [0]), leases.open("d", "i", [0, 1])
    clock.now += 9.9
    assert leases.sweep() == 0
    assert leases.renew([two.lease_id, "gone"]) == ["gone"]
    clock.now += 0.1
    assert leases.sweep() == 1
    assert not leases.is_open(one.lease_id) and leases.is_open(two.lease_id)
    assert pool.references[:2] == [1, 1]
    clock.now += 10
    assert leases.sweep() == 1 and not any(pool.references)
    assert leases.counts().num_expired == 2 and leases.counts().num_leased_blocks == 0


def test_a_readers_death_ends_the_leases_of_that_life_only() -> None:
    leases, _, _ = table()
    old, new, other = leases.open("d0", "a", [0]), leases.open("d0", "b", [0]), leases.open("d1", "a", [0])
    assert leases.end_reader("d0", "a") == 1
    assert [leases.is_open(lease.lease_id) for lease in (old, new, other)] == [False, True, True]
    assert leases.end_reader("d0") == 1
    assert leases.counts().num_leases == 1 and leases.counts().num_reader_gone == 2


def test_on_end_is_called_once_without_the_lock() -> None:
    leases, pool, clock = table()
    seen: list[tuple[str, LeaseEnd]] = []

    def on_end(lease: Lease, why: LeaseEnd) -> None:
        def from_another_thread() -> None:
            with pool.lock:
                seen.append((lease.lease_id, why))

        other = threading.Thread(target=from_another_thread, daemon=True)
        other.start()
        other.join(5)
        assert not other.is_alive(), "the lock was held"

    lease = leases.open("d", "i", [0], on_end)
    clock.now += 11
    leases.sweep()
    leases.release([lease.lease_id])
    assert seen == [(lease.lease_id, LeaseEnd.EXPIRED)]


def words(*values: int) -> Words:
    return np.array(values, np.uint64)


def test_only_current_blocks_of_a_live_lease_may_be_sent() -> None:
    leases, pool, clock = table()
    opened = leases.open("d", "i", [0, 1])
    lease = leases.begin_io(opened.lease_id)
    assert lease is opened
    assert leases.current(lease, words(0, 1), words(0, 0)) is None
    pool.reuse(1)
    asked = words(0, 1, 2, 999, 2**64 - 1)
    assert leases.current(lease, asked, words(0, 0, 0, 0, 0)) == [True, False, False, False, False]
    assert leases.extend(opened.lease_id, [2])
    assert leases.current(lease, asked, words(0, 1, 0, 0, 0)) == [True, True, True, False, False]
    leases.end_io(lease)
    clock.now += 10
    assert leases.begin_io(opened.lease_id) is None, "expired, though not swept yet"
    assert leases.begin_io("unknown") is None


def test_blocks_being_sent_are_held_beyond_the_end_of_their_lease() -> None:
    leases, pool, _ = table()
    lease = leases.open("d", "i", [0, 1])
    assert leases.begin_io(lease.lease_id) and leases.begin_io(lease.lease_id)
    leases.release([lease.lease_id])
    leases.check_integrity()
    counts = leases.counts()
    assert (counts.num_leases, counts.num_leased_blocks, counts.num_draining_blocks) == (0, 0, 2)
    assert pool.references[:2] == [1, 1]
    leases.end_io(lease)
    assert pool.references[:2] == [1, 1]
    leases.end_io(lease)
    assert not any(pool.references) and leases.counts().num_draining_blocks == 0


@pytest.mark.parametrize("seed", range(5))
def test_random_operations_keep_every_reference(seed: int) -> None:
    rng = random.Random(seed)
    leases, pool, clock = table(6)
    ended: list[str] = []
    known: list[str] = []
    sending: list[Lease] = []
    for _ in range(400):
        blocks = [rng.randrange(6) for _ in range(rng.randrange(4))]
        choice = rng.randrange(8)
        if choice == 0:
            lease = leases.open(
                rng.choice("ab"), rng.choice("xy"), blocks, lambda lease, _: ended.append(lease.lease_id)
            )
            known.append(lease.lease_id)
        elif choice == 1 and known:
            adopt = rng.random() < 0.5
            if adopt:
                pool.acquire(blocks)
            if not leases.extend(rng.choice(known), blocks, adopt=adopt) and adopt:
                pool.release(blocks)
        elif choice == 2 and known:
            leases.renew(rng.sample(known, min(2, len(known))))
        elif choice == 3 and known:
            leases.release([rng.choice(known)])
        elif choice == 4:
            clock.now += rng.random() * 4
            leases.sweep()
        elif choice == 5 and known:
            sending += filter(None, [leases.begin_io(rng.choice(known))])
        elif choice == 6 and sending:
            leases.end_io(sending.pop(rng.randrange(len(sending))))
        elif rng.random() < 0.2:
            leases.end_reader(rng.choice("ab"), rng.choice(["x", "y", None]))
        leases.check_integrity()
        counts = leases.counts()
        held = sum(1 for count in pool.references if count)
        assert counts.num_leased_blocks <= held <= counts.num_leased_blocks + counts.num_draining_blocks
    clock.now += 100
    leases.sweep()
    for lease in sending:
        leases.end_io(lease)
    assert not any(pool.references) and sorted(ended) == sorted(known)
