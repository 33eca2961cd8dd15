"""A worker's place in the cluster: its heartbeats, whom it sees, what it publishes and what it hears of others' blocks.

Everything here is advisory: without Redis, or while it is away, a worker serves on with what it knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

from biphase.cache.block_pool import BlockPool
from biphase.index.connection import connect
from biphase.index.follower import IndexFollower
from biphase.index.publisher import IndexPublisher
from biphase.index.registry import NodeRecord, Registry, RegistryWatch, keep_alive
from biphase.index.view import IndexView
from biphase.request import BlockHash, NodeId
from biphase.telemetry.events import event_logger
from biphase.telemetry.metrics import Reading
from biphase.worker.identity import WorkerIdentity

log = event_logger(__name__)


class ClusterMembership:
    """One worker's connections to registry and index. `start` and `leave` frame its life.

    Args:
        redis_url: empty: the worker is alone.
        record: asked for the present record at each heartbeat.
    """

    def __init__(
        self,
        redis_url: str,
        cluster: str,
        identity: WorkerIdentity,
        pool: BlockPool,
        record: Callable[[], NodeRecord],
    ) -> None:
        self.view = IndexView()
        self._identity = identity
        self._record = record
        self._tasks: list[asyncio.Task[None]] = []
        self._store_ids: frozenset[NodeId] = frozenset()
        self._redis = connect(redis_url) if redis_url else None
        self._registry: Registry | None = None
        self._watch: RegistryWatch | None = None
        self._publisher: IndexPublisher | None = None
        if self._redis is None:
            return
        namespace = identity.layout.namespace
        self._registry = Registry(self._redis, cluster)
        self._watch = RegistryWatch(self._registry)
        self._publisher = IndexPublisher(
            self._redis, cluster, namespace, identity.node_id, identity.incarnation, pool.committed_hashes
        )
        self._publisher.attach(pool)
        self._follower = IndexFollower(self._redis, cluster, namespace, self.view, alive=self._alive)

    @property
    def nodes(self) -> Sequence[NodeRecord]:
        """Every node of the cluster, as last heard."""
        return self._watch.nodes if self._watch is not None else ()

    def node(self, node_id: NodeId) -> NodeRecord | None:
        return next((record for record in self.nodes if record.node_id == node_id), None)

    def is_gone(self, node_id: NodeId, incarnation: str) -> bool:
        """Whether the registry, which knows others, no longer knows this life of a node. False while it is away."""
        if self._registry is None or not self._registry.available or not self.nodes:
            return False
        record = self.node(node_id)
        return record is None or (bool(incarnation) and record.incarnation != incarnation)

    def stores(self) -> list[NodeRecord]:
        """Block stores that take offers now."""
        return [record for record in self.nodes if record.role == "kvstore" and record.state == "ready"]

    def is_stored(self, block_hash: BlockHash) -> bool:
        """Whether some block store holds this block, as far as the index knows."""
        return any(node_id in self._store_ids for node_id in self.view.holders_of(block_hash))

    def readings(self) -> Iterator[Reading]:
        """Numbers about the index, for /metrics; none without Redis."""
        if self._publisher is None:
            return
        published, followed = self._publisher.stats, self._follower.stats
        yield "biphase:index_published", published.num_events, {}
        yield "biphase:index_publish_failures", published.num_failures, {}
        yield "biphase:index_unpublished", self._publisher.num_unpublished, {}
        yield "biphase:index_applied", followed.num_events, {}
        yield "biphase:index_lag_seconds", followed.last_lag_seconds, {}

    def start(self, on_nodes: Callable[[list[NodeRecord]], None]) -> None:
        """
        Args:
            on_nodes: called with all nodes after each look at the registry.
        """
        if self._redis is None:
            return
        assert self._registry is not None and self._watch is not None and self._publisher is not None
        self._watch.subscribe(self._note_stores)
        self._watch.subscribe(on_nodes)
        self._spawn(keep_alive(self._registry, self._record))
        self._spawn(self._watch.run())
        self._spawn(self._publisher.run())
        self._spawn(self._follower.run())

    async def announce(self) -> None:
        """Tells the registry about a change of state now rather than with the next heartbeat."""
        if self._registry is not None:
            await self._registry.heartbeat(self._record())

    async def leave(self) -> None:
        """Takes the node and its blocks out of registry and index."""
        if self._publisher is not None:
            await self._publisher.close()
        pending = set(self._tasks)
        while pending:
            for task in pending:
                task.cancel()
            # Again where it had no effect: a cancellation that meets a time-out of the Redis client's is lost in it.
            _, pending = await asyncio.wait(pending, timeout=0.2)
        if self._redis is not None:
            await self._redis.aclose()

    def _note_stores(self, nodes: list[NodeRecord]) -> None:
        self._store_ids = frozenset(record.node_id for record in self.stores())

    def _alive(self) -> dict[NodeId, str] | None:
        nodes = self.nodes
        return {record.node_id: record.incarnation for record in nodes} if nodes else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        task.add_done_callback(_complain)
        self._tasks.append(task)


def _complain(task: asyncio.Task[None]) -> None:
    """A background task that ends by an exception is a bug that must not stay silent."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("cluster_task_failed", error=f"{type(error).__name__}: {error}")
