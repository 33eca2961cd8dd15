"""Keeps a view current from Redis: reads events from where it stopped, and checks what it knows against each holder's
own position.

Owns the order of reading (positions, then events, then snapshots of whoever is still behind) and what happens when
Redis is away: the view stays as it is. Being advisory it may be late; being checked it is not wrong for long. Owns no
rule about events (view.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from biphase.index.connection import REDIS_FAILURES, Client, heed_cancellation, tell_refusal
from biphase.index.events import START_ID, IndexEvent, IndexKeys, Position, Snapshot, id_order
from biphase.index.view import Applied, IndexView
from biphase.request import NodeId
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

# Entries taken in before other tasks get their turn.
_READ_COUNT = 64
# A holder that the registry does not list in so many checks in a row is void. One may be a race at its start.
_MISSED_CHECKS = 2


@dataclass(slots=True)
class FollowerStats:
    num_events: int = 0
    num_gaps: int = 0
    num_snapshots: int = 0
    num_unreadable: int = 0
    num_failures: int = 0
    # Age of the last entry read, by Redis's clock when it was written and this machine's; 0 before the first.
    last_lag_seconds: float = 0.0


class IndexFollower:
    """Feeds one namespace's events into `view`, for one event loop.

    Args:
        alive: incarnation of each node that lives, from the registry; None while nobody knows. Holders that are not
            in it are void.
        check_seconds: how often positions are compared; what was lost is made up for within this time.
    """

    def __init__(
        self,
        redis: Client,
        cluster: str,
        namespace: bytes,
        view: IndexView,
        *,
        alive: Callable[[], Mapping[NodeId, str] | None] = lambda: None,
        check_seconds: float = 1.0,
        block_seconds: float = 0.25,
    ) -> None:
        self._redis = redis
        self._keys = IndexKeys.of(cluster, namespace)
        self._view = view
        self._alive = alive
        self._check_seconds = check_seconds
        self._block_seconds = block_seconds
        self._last_id = START_ID
        # Incarnation that Redis says is each holder's present one.
        self._present: dict[NodeId, str] = {}
        self._missed: dict[NodeId, int] = {}
        self._check_now = True
        self._first = asyncio.Event()
        self.available = True
        self.stats = FollowerStats()

    async def wait_first(self) -> None:
        """Returns after the view was brought up to date for the first time."""
        await self._first.wait()

    async def run(self) -> None:
        """Follows until cancelled. Raises nothing for Redis's sake."""
        failures = 0
        next_check = 0.0
        while True:
            heed_cancellation()
            try:
                if self._check_now or time.monotonic() >= next_check:
                    self._check_now = False
                    await self.check()
                    next_check = time.monotonic() + self._check_seconds
                    self._first.set()
                await self._read(block=True)
                if not self.available:
                    log.info("index_followed", num_holders=len(self._view.holders()))
                self.available, failures = True, 0
            except REDIS_FAILURES as error:
                tell_refusal(error)
                if self.available:
                    log.warning("index_unavailable", error=str(error) or type(error).__name__)
                self.available = False
                self.stats.num_failures += 1
                self._check_now = True
                failures += 1
                await asyncio.sleep(min(0.1 * 2**failures, 2.0))

    async def check(self) -> None:
        """Brings the view to where all holders are now, or voids those for whom that is not possible.

        Raises:
            One of REDIS_FAILURES.
        """
        positions, tail = await self._positions()
        self._present = {node_id: position.incarnation for node_id, position in positions.items()}
        if tail is not None and id_order(tail) < id_order(self._last_id):
            # Redis came back with another stream. What is in it and known already is ignored.
            self._last_id = START_ID
        await self._read_to(tail)
        alive = self._void_the_dead()
        behind = [n for n, position in positions.items() if self._is_behind(n, position) and _lives(n, position, alive)]
        if behind:
            fences = [
                fence for node_id in behind if (fence := await self._load(node_id, positions[node_id])) is not None
            ]
            if fences:
                self._last_id = min(self._last_id, *fences, key=id_order)
                await self._read_to(tail)
            for node_id in behind:
                if self._is_behind(node_id, positions[node_id]) and self._view.void(node_id):
                    log.info("index_holder_behind", node_id=node_id)
        while self._view.sweep():
            await asyncio.sleep(0)

    async def _positions(self) -> tuple[dict[NodeId, Position], bytes | None]:
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hgetall(self._keys.holders)
            pipe.xrevrange(self._keys.events, count=1)
            raw, last = await pipe.execute()
        positions = {}
        for name, text in raw.items():
            try:
                positions[NodeId(name.decode())] = Position.from_bytes(text)
            except ValueError as error:
                self._unreadable(error)
        return positions, last[0][0] if last else None

    def _is_behind(self, node_id: NodeId, wanted: Position) -> bool:
        known = self._view.position(node_id)
        return known is None or known.incarnation != wanted.incarnation or known.sequence < wanted.sequence

    def _void_the_dead(self) -> Mapping[NodeId, str] | None:
        alive = self._alive()
        if alive is None:
            return None
        for node_id, position in self._view.holders().items():
            if alive.get(node_id) == position.incarnation:
                self._missed.pop(node_id, None)
                continue
            self._missed[node_id] = self._missed.get(node_id, 0) + 1
            if self._missed[node_id] >= _MISSED_CHECKS:
                del self._missed[node_id]
                self._view.void(node_id)
                log.info("index_holder_dead", node_id=node_id, incarnation=position.incarnation)
        return alive

    async def _load(self, node_id: NodeId, wanted: Position) -> str | None:
        """Takes a holder's snapshot into the view. Returns its fence, or None when there is none to take."""
        raw: Any = await self._redis.get(self._keys.snapshot(node_id))
        if raw is None:
            return None
        try:
            snapshot = Snapshot.from_bytes(raw)
        except ValueError as error:
            self._unreadable(error)
            return None
        if snapshot.incarnation != wanted.incarnation:
            return None
        loading = self._view.start_load(node_id, snapshot)
        try:
            while not self._view.load_some(loading):
                await asyncio.sleep(0)
        except BaseException:
            self._view.abandon_load(loading)
            raise
        self.stats.num_snapshots += 1
        return snapshot.fence

    async def _read_to(self, tail: bytes | None) -> None:
        while tail is not None and id_order(self._last_id) < id_order(tail):
            if not await self._read(block=False):
                return

    async def _read(self, *, block: bool) -> bool:
        """Applies the next events. Returns whether there were any."""
        streams: Any = {self._keys.events: self._last_id}
        milliseconds = int(self._block_seconds * 1000) if block else None
        answer: Any = await self._redis.xread(streams, count=_READ_COUNT, block=milliseconds)
        # RESP2 answers with a list of pairs, RESP3 with a map.
        batches = answer.values() if isinstance(answer, dict) else [entries for _, entries in answer or ()]
        entries = [entry for batch in batches for entry in _flat(batch)]
        for entry_id, fields in entries:
            self._last_id = entry_id.decode()
            try:
                event = IndexEvent.from_fields(fields)
            except ValueError as error:
                self._unreadable(error)
                continue
            self._take(event)
        if entries:
            self.stats.last_lag_seconds = max(0.0, time.time() - id_order(self._last_id)[0] / 1000)
        # Others' turn: a reader that caught up after hours reads thousands of events.
        await asyncio.sleep(0)
        return bool(entries)

    def _take(self, event: IndexEvent) -> None:
        self.stats.num_events += 1
        present = self._present.get(event.node_id)
        if present != event.incarnation:
            if self._view.position(event.node_id) is None and present is None:
                # A holder not heard of before: what it says first is complete in itself.
                self._present[event.node_id] = event.incarnation
            else:
                # One of two lives is over. Redis knows which one spoke last.
                self._check_now = True
                return
        if self._view.apply(event) is Applied.GAP:
            self.stats.num_gaps += 1
            self._check_now = True

    def _unreadable(self, error: ValueError) -> None:
        self.stats.num_unreadable += 1
        log.warning("index_entry_unreadable", error=str(error))


def _lives(node_id: NodeId, position: Position, alive: Mapping[NodeId, str] | None) -> bool:
    return alive is None or alive.get(node_id) == position.incarnation


def _flat(batch: list[Any]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [entry for part in batch for entry in part] if batch and isinstance(batch[0], list) else batch
