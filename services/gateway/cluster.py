"""The gateway's connection to the cluster: who is there, and which blocks they hold, from Redis.

Everything here is advisory. While Redis is away, or when there is none, serving goes on with the nodes last known.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from biphase.index.connection import connect
from biphase.index.follower import IndexFollower
from biphase.index.registry import NodeRecord, Registry, RegistryWatch, keep_alive
from biphase.index.view import IndexView
from biphase.request import BlockHash, NodeId

# Nodes of more namespaces than this are not followed: two versions side by side are two.
_MAX_NAMESPACES = 8


class Cluster:
    """Implements PrefixHolders. For one event loop.

    Args:
        redis_url: where registry and index are.
        record: asked for the gateway's own record at each heartbeat.

    Raises:
        ConfigError: not a URL of a known scheme.
    """

    def __init__(self, redis_url: str, cluster: str, record: Callable[[], NodeRecord]) -> None:
        self._redis = connect(redis_url)
        self._cluster = cluster
        self._record = record
        self._registry = Registry(self._redis, cluster)
        self._watch = RegistryWatch(self._registry)
        self._views: dict[str, IndexView] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._has_answered = False

    def start(self, on_nodes: Callable[[Sequence[NodeRecord]], None]) -> None:
        """
        Args:
            on_nodes: called with all nodes after each look at the registry.
        """
        self._watch.subscribe(on_nodes)
        # After the nodes are watched: what it lists is known from then on.
        self._watch.subscribe(self._note_answer)
        self._watch.subscribe(self._follow_namespaces)
        self._spawn(self._watch.run())
        self._spawn(keep_alive(self._registry, self._record))

    async def close(self) -> None:
        """Leaves the registry."""
        pending = set(self._tasks)
        while pending:
            for task in pending:
                task.cancel()
            # Again where it had no effect: a cancellation that meets a time-out of the Redis client's is lost in it.
            _, pending = await asyncio.wait(pending, timeout=0.2)
        with contextlib.suppress(Exception):
            await self._redis.aclose()

    @property
    def has_answered(self) -> bool:
        """Whether the registry has said once who is there."""
        return self._has_answered

    @property
    def nodes(self) -> Sequence[NodeRecord]:
        return self._watch.nodes

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        found: dict[str, int] = {}
        for view in self._views.values():
            found |= view.leading_blocks(hashes)
        return found

    def _follow_namespaces(self, records: Sequence[NodeRecord]) -> None:
        for namespace in {record.namespace for record in records if record.namespace} - self._views.keys():
            if len(self._views) >= _MAX_NAMESPACES:
                return
            try:
                raw = bytes.fromhex(namespace)
            except ValueError:
                continue
            view = self._views[namespace] = IndexView()
            self._spawn(IndexFollower(self._redis, self._cluster, raw, view, alive=self._alive).run())

    def _note_answer(self, records: Sequence[NodeRecord]) -> None:
        self._has_answered = self._has_answered or self._registry.available

    def _alive(self) -> Mapping[NodeId, str] | None:
        nodes = self._watch.nodes
        return {record.node_id: record.incarnation for record in nodes} if nodes else None

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(work))
