"""Tells the index what this node holds, without ever slowing what it tells about.

Owns the way from the block pool's listeners to Redis: a bounded buffer that the listeners append to, one task that
folds it into events of a gapless sequence, and the snapshot. Redis away, hanging, back empty or back with old data
costs this node's share of hits for a while and nothing else: what cannot be sent in time is dropped as a whole, and a
snapshot of the pool makes up for it. Owns no knowledge of who reads.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from biphase.index.connection import REDIS_FAILURES, Client, heed_cancellation, tell_refusal
from biphase.index.events import (
    MAX_STREAM_ENTRIES,
    START_ID,
    EventKind,
    IndexEvent,
    IndexKeys,
    Position,
    Snapshot,
    id_order,
)
from biphase.request import BlockHash, NodeId
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

# A snapshot nobody refreshed is forgotten: its holder is long gone.
_SNAPSHOT_TTL_SECONDS = 3600
_HASHES_PER_EVENT = 256
_EVENTS_PER_FLUSH = 32


class ListenedPool(Protocol):
    """What is needed of a BlockPool."""

    def add_listener(
        self,
        *,
        stored: Callable[[list[tuple[BlockHash, int]]], None] | None = None,
        removed: Callable[[list[BlockHash]], None] | None = None,
    ) -> None: ...

    def committed_hashes(self) -> Sequence[BlockHash]: ...


@dataclass(frozen=True, slots=True)
class PublisherStats:
    num_events: int = 0
    num_stored: int = 0
    num_removed: int = 0
    num_snapshots: int = 0
    # Times that changes were dropped, to be made up for by a snapshot.
    num_overflows: int = 0
    num_failures: int = 0


class IndexPublisher:
    """One holder's voice in one namespace.

    Args:
        held: all hashes held now. Called in a thread; must include every change that listeners were told before.
        max_buffered: changes kept while Redis does not take them.
        flush_seconds: changes are sent at most this much later.
        check_seconds: how often it is checked that Redis still has what was written.
    """

    def __init__(
        self,
        redis: Client,
        cluster: str,
        namespace: bytes,
        node_id: NodeId,
        incarnation: str,
        held: Callable[[], Sequence[BlockHash]],
        *,
        max_buffered: int = 200_000,
        flush_seconds: float = 0.05,
        check_seconds: float = 1.0,
        max_stream_entries: int = MAX_STREAM_ENTRIES,
    ) -> None:
        self._redis = redis
        self._keys = IndexKeys.of(cluster, namespace)
        self._node_id = node_id
        self._incarnation = incarnation
        self._held = held
        self._max_buffered = max_buffered
        self._flush_seconds = flush_seconds
        self._check_seconds = check_seconds
        self._max_stream_entries = max_stream_entries
        # (True: stored, hashes) in the order of the pool's changes. Appended to by any thread, emptied by the task.
        self._heard: deque[tuple[bool, Sequence[BlockHash]]] = deque()
        self._overflowed = False
        # Hash -> stored or removed: the net change not yet put into an event.
        self._pending: dict[BlockHash, bool] = {}
        # Events with a sequence that Redis did not acknowledge yet. Sent again unchanged: they may have arrived.
        self._unacknowledged: deque[IndexEvent] = deque()
        self._sequence = 0
        self._acknowledged = 0
        # What was written last, without its hashes, and the stream id of the event that said so.
        self._snapshot: Snapshot | None = None
        self._snapshot_event = START_ID
        self._needs_snapshot: EventKind | None = EventKind.SNAPSHOT
        self._closed = False
        # One sender at a time, be it the task or whoever wants a change out at once.
        self._sending = asyncio.Lock()
        self.available = True
        self.stats = PublisherStats()

    def attach(self, pool: ListenedPool) -> None:
        """Listens to a pool from now on. `held` must be that pool's `committed_hashes`."""
        pool.add_listener(stored=self.on_stored, removed=self.on_removed)

    @property
    def num_unpublished(self) -> int:
        """Changes and events that Redis does not have yet."""
        return len(self._heard) + len(self._pending) + len(self._unacknowledged)

    # ---- called under the pool's lock, by any thread

    def on_stored(self, blocks: Sequence[tuple[BlockHash, int]]) -> None:
        self._hear(True, [block_hash for block_hash, _ in blocks])

    def on_removed(self, hashes: Sequence[BlockHash]) -> None:
        self._hear(False, list(hashes))

    def _hear(self, stored: bool, hashes: Sequence[BlockHash]) -> None:
        if self._overflowed or self._closed:
            return
        if len(self._heard) >= self._max_buffered:
            self._overflowed = True
            return
        self._heard.append((stored, hashes))

    # ---- the task

    async def run(self) -> None:
        """Publishes until cancelled or closed. Raises nothing for Redis's sake."""
        next_check = 0.0
        failures = 0
        while not self._closed:
            heed_cancellation()
            try:
                await self.flush()
                if time.monotonic() >= next_check:
                    await self._check()
                    next_check = time.monotonic() + self._check_seconds
                if not self.available:
                    log.info("index_publishing", node_id=self._node_id, sequence=self._sequence)
                self.available, failures = True, 0
                await asyncio.sleep(self._flush_seconds)
            except REDIS_FAILURES as error:
                tell_refusal(error)
                if self.available:
                    log.warning("index_unavailable", node_id=self._node_id, error=str(error) or type(error).__name__)
                self.available = False
                self._count(num_failures=1)
                # What Redis has when it is back is to be looked at before anything is built on it.
                next_check = 0.0
                failures += 1
                await asyncio.sleep(min(0.1 * 2**failures, 2.0))

    async def flush(self) -> None:
        """Sends what was heard so far.

        Raises:
            One of REDIS_FAILURES: nothing is lost, call again.
        """
        async with self._sending:
            while not self._closed:
                self._fold()
                if self._needs_snapshot is not None:
                    await self._write_snapshot(self._needs_snapshot)
                if not self._pending and not self._unacknowledged:
                    return
                await self._send()

    async def close(self, timeout_seconds: float = 1.0) -> None:
        """Says that this holder holds nothing any more. `run` ends by itself."""
        self._closed = True
        self._heard.clear()
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._sending,
                self._redis.pipeline(transaction=True) as pipe,
            ):
                self._sequence += 1
                self._add(pipe, IndexEvent(self._node_id, self._incarnation, self._sequence, EventKind.GONE))
                pipe.hdel(self._keys.holders, self._node_id)
                pipe.delete(self._keys.snapshot(self._node_id))
                await pipe.execute()
        except REDIS_FAILURES as error:
            tell_refusal(error)
            log.info("index_farewell_failed", node_id=self._node_id, error=str(error) or type(error).__name__)

    def _fold(self) -> None:
        """Takes what the listeners left into the net change."""
        if self._needs_snapshot is EventKind.RELOAD:
            # Nobody will see a change between what was dropped and the snapshot: what was heard so far is in it.
            self._heard.clear()
            self._pending.clear()
        if self._overflowed:
            # In this order: a change between the lines is dropped, and is in the snapshot, which is taken later.
            self._heard.clear()
            self._drop_changes()
            self._overflowed = False
        for _ in range(len(self._heard)):
            stored, hashes = self._heard.popleft()
            for block_hash in hashes:
                # The latest change goes last, so that events keep the order in which the pool came to its state.
                self._pending.pop(block_hash, None)
                self._pending[block_hash] = stored
        unsent = len(self._pending) + _HASHES_PER_EVENT * len(self._unacknowledged)
        if unsent > self._max_buffered:
            self._drop_changes()

    def _drop_changes(self) -> None:
        self._pending.clear()
        self._unacknowledged.clear()
        self._needs_snapshot = EventKind.RELOAD
        self._count(num_overflows=1)

    async def _send(self) -> None:
        while self._pending and len(self._unacknowledged) < _EVENTS_PER_FLUSH:
            self._unacknowledged.append(self._next_event())
        batch = list(islice(self._unacknowledged, _EVENTS_PER_FLUSH))
        async with self._redis.pipeline(transaction=True) as pipe:
            for event in batch:
                self._add(pipe, event)
            pipe.hset(self._keys.holders, self._node_id, Position(self._incarnation, batch[-1].sequence).to_text())
            await pipe.execute()
        self._acknowledged = batch[-1].sequence
        for _ in batch:
            self._unacknowledged.popleft()
        self._count(
            num_events=len(batch),
            num_stored=sum(len(event.stored) for event in batch) // 32,
            num_removed=sum(len(event.removed) for event in batch) // 32,
        )

    def _next_event(self) -> IndexEvent:
        changes = list(islice(self._pending.items(), _HASHES_PER_EVENT))
        for block_hash, _ in changes:
            del self._pending[block_hash]
        self._sequence += 1
        return IndexEvent(
            self._node_id,
            self._incarnation,
            self._sequence,
            stored=b"".join(block_hash for block_hash, stored in changes if stored),
            removed=b"".join(block_hash for block_hash, stored in changes if not stored),
        )

    async def _write_snapshot(self, kind: EventKind) -> None:
        """Writes everything held, and an event with the next sequence that says so.

        Changes heard but not sent yet may be in the snapshot already. Sent later, they come to the same end.
        """
        last: Any = await self._redis.xrevrange(self._keys.events, count=1)
        fence = last[0][0].decode() if last else START_ID
        hashes = await asyncio.to_thread(lambda: b"".join(self._held()))
        # Never sent with another meaning, even when this attempt fails half way.
        self._sequence += 1
        self._unacknowledged.clear()
        snapshot = Snapshot(self._incarnation, self._sequence, fence, hashes)
        if self._sequence == 1 and hashes:
            kind = EventKind.RELOAD
        event = IndexEvent(self._node_id, self._incarnation, self._sequence, kind)
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.set(self._keys.snapshot(self._node_id), snapshot.to_bytes(), ex=_SNAPSHOT_TTL_SECONDS)
            pipe.hset(self._keys.holders, self._node_id, Position(self._incarnation, self._sequence).to_text())
            self._add(pipe, event)
            event_id: bytes = (await pipe.execute())[-1]
        # The hashes are not kept: the pool has them.
        self._snapshot = Snapshot(self._incarnation, self._sequence, fence)
        self._snapshot_event = event_id.decode()
        self._acknowledged = self._sequence
        self._needs_snapshot = None
        self._count(num_snapshots=1, num_events=1)
        log.debug("index_snapshot", node_id=self._node_id, sequence=self._sequence, num_blocks=len(hashes) // 32)

    def _add(self, pipe: Any, event: IndexEvent) -> None:
        pipe.xadd(self._keys.events, event.to_fields(), maxlen=self._max_stream_entries, approximate=True)

    async def _check(self) -> None:
        """Writes a new snapshot when Redis lost the old one, or the events after it."""
        async with self._sending:
            await self._compare()

    async def _compare(self) -> None:
        snapshot = self._snapshot
        if snapshot is None or self._closed:
            return
        snapshot_key = self._keys.snapshot(self._node_id)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.getrange(snapshot_key, 0, len(snapshot.header) - 1)
            pipe.hget(self._keys.holders, self._node_id)
            pipe.xrange(self._keys.events, count=1)
            pipe.expire(snapshot_key, _SNAPSHOT_TTL_SECONDS)
            header, position, first, _ = await pipe.execute()
        expected = Position(self._incarnation, self._acknowledged).to_text().encode()
        if header != snapshot.header or position != expected:
            log.info("index_lost", node_id=self._node_id, cluster_position=position)
            self._needs_snapshot = EventKind.RELOAD
        elif self._acknowledged > snapshot.sequence and (
            not first or id_order(first[0][0]) > id_order(self._snapshot_event)
        ):
            # Events after the snapshot were trimmed: a new reader could not get from it to the present.
            self._needs_snapshot = EventKind.SNAPSHOT

    def _count(self, **more: int) -> None:
        old = self.stats
        self.stats = PublisherStats(
            **{name: getattr(old, name) + more.get(name, 0) for name in PublisherStats.__dataclass_fields__}
        )
