"""Leases: the promise a holder makes to a reader that blocks stay as they are for a while.

Owns who may read which blocks until when, and holds one pool reference per block and lease. Owns no clock task: the
worker calls `sweep()` about once a second. Thread-safe: gRPC, engine and transfer threads all come here, and
everything happens under the pool's own lock, so no order of locks can go wrong.

    open -> extend* -> renew* -> release | end_reader | sweep (expired)     each lease ends exactly once
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType, Protocol, cast

import numpy as np
import numpy.typing as npt

from biphase.telemetry.events import event_logger
from biphase.transfer.frames import Words

log = event_logger(__name__)

LeaseId = NewType("LeaseId", str)


class GenerationTable(Protocol):
    """`array('Q')` or the table of SharedGenerations."""

    def __len__(self) -> int: ...
    def __getitem__(self, block_id: int, /) -> int: ...


def generations_of(table: GenerationTable, block_ids: Words) -> Words:
    """The current generations of several blocks, in one step, as this is done for every block that is sent."""
    values: Words = np.frombuffer(cast(Any, table), np.uint64)[block_ids]
    return values


class HolderPool(Protocol):
    """What leases and transfers need of a BlockPool."""

    @property
    def lock(self) -> AbstractContextManager[object]: ...
    @property
    def generations(self) -> GenerationTable: ...
    def acquire(self, block_ids: Sequence[int], /) -> None: ...
    def release(self, block_ids: Sequence[int], /) -> None: ...


class LeaseEnd(StrEnum):
    """Why a lease ended."""

    RELEASED = "released"
    READER_GONE = "reader_gone"
    EXPIRED = "expired"


@dataclass(slots=True, eq=False)
class Lease:
    """One reader's hold on some blocks. Mutated by the LeaseTable only."""

    lease_id: LeaseId
    reader_node_id: str
    reader_incarnation: str
    # Monotonic seconds.
    expires_at: float
    on_end: Callable[[Lease, LeaseEnd], None] | None = None
    # In the order they came: that of the chain.
    block_ids: list[int] = field(default_factory=list)
    # The same blocks.
    covered: set[int] = field(default_factory=set)
    # And again, by block id, once somebody reads through this process: bool [num_blocks].
    mask: npt.NDArray[np.bool_] | None = None
    # Batches of its blocks that are being sent. The references are kept until there is none, ended or not.
    num_io: int = 0
    is_ended: bool = False


@dataclass(frozen=True, slots=True)
class LeaseCounts:
    num_leases: int
    # Blocks under at least one lease.
    num_leased_blocks: int
    # Blocks of ended leases that are still being sent.
    num_draining_blocks: int
    num_opened: int
    num_released: int
    num_reader_gone: int
    num_expired: int


class LeaseTable:
    """All leases on one pool.

    Args:
        pool: gives references and its lock.
        default_seconds: a lease ends this long after its last renewal.
        clock: monotonic seconds.
    """

    def __init__(
        self, pool: HolderPool, default_seconds: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._seconds = default_seconds
        self._clock = clock
        self._leases: dict[LeaseId, Lease] = {}
        self._holds: dict[int, int] = {}
        # Ended, but with I/O on their blocks.
        self._draining: set[Lease] = set()
        self._num_opened = 0
        self._num_ended = dict.fromkeys(LeaseEnd, 0)

    @property
    def lease_seconds(self) -> float:
        return self._seconds

    def open(
        self,
        reader_node_id: str,
        reader_incarnation: str,
        block_ids: Iterable[int] = (),
        on_end: Callable[[Lease, LeaseEnd], None] | None = None,
        *,
        adopt: bool = False,
    ) -> Lease:
        """Starts a lease on blocks that somebody holds a reference to at this moment.

        Args:
            block_ids: each gets one reference for as long as the lease lasts.
            on_end: called once, without the lock, in the thread that ended the lease.
            adopt: the caller's own references (BlockPool.lease_chain) become the lease's.
        """
        lease = Lease(
            LeaseId(uuid.uuid4().hex), reader_node_id, reader_incarnation, self._clock() + self._seconds, on_end
        )
        with self._pool.lock:
            self._add(lease, block_ids, adopt)
            self._leases[lease.lease_id] = lease
            self._num_opened += 1
        return lease

    def extend(self, lease_id: str, block_ids: Iterable[int], *, adopt: bool = False) -> bool:
        """Puts more blocks under a lease, and renews it. False when it ended already: then nothing was taken, and
        references meant to be adopted are still the caller's."""
        with self._pool.lock:
            lease = self._leases.get(LeaseId(lease_id))
            if lease is None:
                return False
            self._add(lease, block_ids, adopt)
            lease.expires_at = self._clock() + self._seconds
        return True

    def renew(self, lease_ids: Iterable[str]) -> list[LeaseId]:
        """Makes leases last `lease_seconds` from now. Returns those that no longer exist."""
        expires_at = self._clock() + self._seconds
        ended = []
        with self._pool.lock:
            for lease_id in map(LeaseId, lease_ids):
                lease = self._leases.get(lease_id)
                if lease is None:
                    ended.append(lease_id)
                else:
                    lease.expires_at = expires_at
        return ended

    def release(self, lease_ids: Iterable[str]) -> int:
        """Ends leases; unknown ids are ignored. Returns how many ended."""
        return self._end(lambda: [LeaseId(lease_id) for lease_id in lease_ids], LeaseEnd.RELEASED)

    def end_reader(self, node_id: str, incarnation: str | None = None) -> int:
        """Ends the leases of a reader that is gone. Without an incarnation: of all its lives. Returns how many."""
        return self._end(
            lambda: [
                lease.lease_id
                for lease in self._leases.values()
                if lease.reader_node_id == node_id and incarnation in (None, lease.reader_incarnation)
            ],
            LeaseEnd.READER_GONE,
        )

    def sweep(self) -> int:
        """Ends expired leases. Returns how many."""
        now = self._clock()
        return self._end(
            lambda: [lease.lease_id for lease in self._leases.values() if lease.expires_at <= now], LeaseEnd.EXPIRED
        )

    def begin_io(self, lease_id: str) -> Lease | None:
        """Keeps a lease's blocks from being reused while some of them are sent, whatever becomes of the lease.

        Returns:
            The lease, to be given to `end_io` exactly once; None when it has ended.
        """
        with self._pool.lock:
            lease = self._leases.get(LeaseId(lease_id))
            if lease is None or lease.expires_at <= self._clock():
                return None
            lease.num_io += 1
            return lease

    def end_io(self, lease: Lease) -> None:
        with self._pool.lock:
            lease.num_io -= 1
            assert lease.num_io >= 0, "an I/O that never began"
            if lease.is_ended and not lease.num_io:
                self._draining.remove(lease)
                self._pool.release(lease.block_ids)

    def current(self, lease: Lease, block_ids: Words, generations: Words) -> list[bool] | None:
        """Which blocks the lease covers and still have that generation; None for all of them, the usual case.

        Between `begin_io` and `end_io` only, so that the answer stays true.
        """
        table = self._pool.generations
        if lease.mask is None:
            with self._pool.lock:
                lease.mask = np.zeros(len(table), np.bool_)
                lease.mask[lease.block_ids] = True
        known = block_ids < len(table)
        # What there is no block for is asked of block 0, and refused.
        places = np.where(known, block_ids, np.uint64(0))
        current = known & lease.mask[places] & (generations_of(table, places) == generations)
        return None if current.all() else list(map(bool, current))

    def is_open(self, lease_id: str) -> bool:
        with self._pool.lock:
            return LeaseId(lease_id) in self._leases

    def readers(self) -> set[tuple[str, str]]:
        """(node id, incarnation) of everyone who holds a lease."""
        with self._pool.lock:
            return {(lease.reader_node_id, lease.reader_incarnation) for lease in self._leases.values()}

    def counts(self) -> LeaseCounts:
        with self._pool.lock:
            return LeaseCounts(
                num_leases=len(self._leases),
                num_leased_blocks=len(self._holds),
                num_draining_blocks=sum(len(lease.block_ids) for lease in self._draining),
                num_opened=self._num_opened,
                num_released=self._num_ended[LeaseEnd.RELEASED],
                num_reader_gone=self._num_ended[LeaseEnd.READER_GONE],
                num_expired=self._num_ended[LeaseEnd.EXPIRED],
            )

    def check_integrity(self) -> None:
        """Asserts that the per-block counts are what the leases say."""
        with self._pool.lock:
            holds: dict[int, int] = {}
            for lease in self._leases.values():
                for block_id in lease.block_ids:
                    holds[block_id] = holds.get(block_id, 0) + 1
            assert holds == self._holds, f"lease counts differ: {holds} and {self._holds}"
            ended = sum(self._num_ended.values())
            assert all(lease.is_ended and lease.num_io for lease in self._draining)
            assert self._num_opened == ended + len(self._leases), "a lease was lost"

    def _add(self, lease: Lease, block_ids: Iterable[int], adopt: bool) -> None:
        given = list(block_ids)
        fresh: list[int] = []
        surplus: list[int] = []
        seen = set(lease.covered)
        for block_id in given:
            (surplus if block_id in seen else fresh).append(block_id)
            seen.add(block_id)
        if not adopt:
            self._pool.acquire(fresh)
        elif surplus:
            self._pool.release(surplus)
        lease.block_ids.extend(fresh)
        lease.covered.update(fresh)
        if lease.mask is not None:
            lease.mask[fresh] = True
        for block_id in fresh:
            self._holds[block_id] = self._holds.get(block_id, 0) + 1

    def _end(self, choose: Callable[[], list[LeaseId]], why: LeaseEnd) -> int:
        ended: list[Lease] = []
        with self._pool.lock:
            for lease_id in choose():
                lease = self._leases.pop(lease_id, None)
                if lease is None:
                    continue
                ended.append(lease)
                for block_id in lease.block_ids:
                    self._holds[block_id] -= 1
                    if not self._holds[block_id]:
                        del self._holds[block_id]
                lease.is_ended = True
                if lease.num_io:
                    self._draining.add(lease)
                else:
                    self._pool.release(lease.block_ids)
            self._num_ended[why] += len(ended)
        for lease in ended:
            if why is not LeaseEnd.RELEASED:
                log.warning("lease_ended", why=why.value, reader=lease.reader_node_id, num_blocks=len(lease.block_ids))
            if lease.on_end is not None:
                lease.on_end(lease, why)
        return len(ended)
