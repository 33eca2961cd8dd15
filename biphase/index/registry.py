"""Who is there: one key per node with a time to live, written by its heartbeats.

Owns the record's form and its keys in Redis, and the rule for what an absent record means. Losing Redis kills nobody:
while it is away, and for one time to live after it is back, the last known nodes stay listed, since nobody could have
renewed them. Owns no opinion on who is healthy: whoever calls a node finds out.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from biphase.index.connection import REDIS_FAILURES, Client, heed_cancellation, key, tell_refusal
from biphase.request import NodeId
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

HEARTBEAT_SECONDS = 1.0
TTL_SECONDS = 5.0
_LEFT = "left"
_HOST_AND_PORT = re.compile(r"(\[[0-9A-Fa-f:.%\w]+\]|[\w.-]+):\d{1,5}", re.ASCII)
# Ids of nodes that never said goodbye are forgotten after this long.
_FORGET_SECONDS = 3600.0


def default_node_id(role: str) -> NodeId:
    """A name that no other process of the cluster has. In containers each is process 1, so the host's name is in it."""
    return NodeId(f"{role}-{socket.gethostname()}-{os.getpid()}")


def new_incarnation() -> str:
    """Names one life of a process. Handles and index entries of another life are void."""
    return f"{time.time_ns():016x}{secrets.token_hex(4)}"


@dataclass(frozen=True, slots=True)
class NodeLoad:
    """What changes from heartbeat to heartbeat; the words are those of NodeStatus."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_for_remote_kv: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    num_cached_blocks: int = 0
    num_queued_prefill_tokens: int = 0
    prefill_tokens_per_second: float = 0.0
    decode_step_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TransferAddress:
    """Where a block holder serves reads; the words are those of TransferEndpoint."""

    tcp_address: str = ""
    transports: tuple[str, ...] = ()
    shm_address: str = ""
    host_id: str = ""


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node as others see it. Fields that do not apply to a role are empty."""

    node_id: NodeId
    role: str  # "prefill", "decode", "kvstore", "gateway"
    incarnation: str
    pid: int
    address: str  # gRPC "host:port"
    state: str = "ready"  # "starting", "ready", "draining"
    namespace: str = ""  # hex
    block_size: int = 0
    model: str = ""
    served_names: tuple[str, ...] = ()
    max_model_len: int = 0
    vocab_size: int = 0
    version: str = ""
    load: NodeLoad = field(default_factory=NodeLoad)
    transfer: TransferAddress = field(default_factory=TransferAddress)
    metrics_address: str = ""  # "host:port" of /metrics; empty: none of its own

    def to_json(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> NodeRecord:
        """Reads a record of this or a neighbouring version: unknown fields are skipped, missing ones get defaults.

        Raises:
            ValueError: not a record, or its address is no "host:port": gRPC would take names of sockets and files too.
        """
        try:
            raw = json.loads(text)
        except RecursionError as error:
            raise ValueError("a node record that is nested too deeply") from error
        if not isinstance(raw, dict):
            raise ValueError("a node record is a JSON object")
        nested = {
            "load": _parsed(NodeLoad, raw.get("load") or {}),
            "transfer": _parsed(TransferAddress, raw.get("transfer") or {}),
        }
        record = _parsed(NodeRecord, {**raw, **nested})
        for address in (record.address, record.metrics_address):
            if address and not _HOST_AND_PORT.fullmatch(address):
                raise ValueError(f"a node record whose address is no host:port: {address[:100]!r}")
        return record


_R = TypeVar("_R", NodeLoad, TransferAddress, NodeRecord)


# What a field of a dataclass may be, by its annotation.
_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "str": str,
    "NodeId": str,
    "int": int,
    "float": (int, float),
    "tuple[str, ...]": tuple,
    "NodeLoad": NodeLoad,
    "TransferAddress": TransferAddress,
}


def _parsed(kind: type[_R], raw: Any) -> _R:
    if not isinstance(raw, Mapping):
        raise ValueError(f"{kind.__name__} is a JSON object")
    known = [f.name for f in fields(kind) if f.name in raw]
    values: dict[str, Any] = {name: tuple(raw[name]) if isinstance(raw[name], list) else raw[name] for name in known}
    for f in fields(kind):
        value = values.get(f.name)
        if f.name in values and not isinstance(value, _TYPES[str(f.type)]):
            raise ValueError(f"{f.name} of a node record is of the wrong type")
        if isinstance(value, tuple) and not all(isinstance(item, str) for item in value):
            raise ValueError(f"{f.name} of a node record is no list of texts")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(str(error)) from error


class Registry:
    """The nodes of one cluster. No method raises for Redis's sake; `available` says whether the last call got through.

    Use from one event loop.
    """

    def __init__(
        self,
        redis: Client,
        cluster: str = "default",
        *,
        ttl_seconds: float = TTL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._redis = redis
        self._cluster = cluster
        self._ttl_seconds = ttl_seconds
        self._clock = clock
        self._members_key = key(cluster, "nodes")
        self._epoch_key = key(cluster, "epoch")
        self._epoch: bytes | None = None
        self._known: dict[NodeId, NodeRecord] = {}
        self._read_failed = False
        self._grace_until = 0.0
        self.available = True

    async def heartbeat(self, record: NodeRecord) -> bool:
        """Says that the node is alive, for one time to live. Returns whether Redis took it."""
        milliseconds = int(self._ttl_seconds * 1000)
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.set(self._node_key(record.node_id), record.to_json(), px=milliseconds)
            pipe.zadd(self._members_key, {record.node_id: time.time()})
            return await self._through("heartbeat", pipe.execute()) is not None

    async def leave(self, node_id: NodeId, incarnation: str) -> bool:
        """Takes the node out at once. A successor with another incarnation is left alone."""
        held = await self._through("leave", self._redis.get(self._node_key(node_id)))
        current = _record(held)
        if current is None or current.incarnation != incarnation:
            return self.available
        # A farewell instead of a deletion: whoever is inside a grace period learns that this absence is meant.
        farewell = replace(current, state=_LEFT).to_json()
        milliseconds = int(self._ttl_seconds * 1000)
        done = await self._through("leave", self._redis.set(self._node_key(node_id), farewell, px=milliseconds))
        return done is not None

    async def list(self) -> list[NodeRecord]:
        """All nodes alive, by id. While Redis is away, and one time to live after, the last known ones as well."""
        found = await self._read()
        now = self._clock()
        if found is None:
            self._read_failed = True
        else:
            if self._read_failed:
                self._read_failed, self._grace_until = False, now + self._ttl_seconds
            alive = {node_id: record for node_id, record in found.items() if record.state != _LEFT}
            if now < self._grace_until:
                alive = {n: r for n, r in self._known.items() if n not in found} | alive
            self._known = alive
        return sorted(self._known.values(), key=lambda record: record.node_id)

    async def _read(self) -> dict[NodeId, NodeRecord] | None:
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.zrange(self._members_key, 0, -1, withscores=True)
            pipe.set(self._epoch_key, secrets.token_hex(8), nx=True)
            pipe.get(self._epoch_key)
            answer = await self._through("list", pipe.execute())
        if answer is None:
            return None
        members, _, epoch = answer
        if self._epoch is not None and epoch != self._epoch:
            # Redis came back without its data: the nodes need a heartbeat's time to say that they are still there.
            self._grace_until = self._clock() + self._ttl_seconds
        self._epoch = epoch
        names = [name.decode() for name, _ in members]
        texts = await self._through("list", self._redis.mget([self._node_key(n) for n in names])) if names else []
        if texts is None:
            return None
        records = (_record(text) for text in texts)
        found = {record.node_id: record for record in records if record is not None}
        gone = [n for n, (_, seen) in zip(names, members, strict=True) if n not in found and _long_ago(seen)]
        if gone:
            await self._through("list", self._redis.zrem(self._members_key, *gone))
        return found

    async def _through(self, what: str, call: Awaitable[Any]) -> Any:
        """The answer of Redis, or None when it gave none."""
        try:
            answer = await call
        except REDIS_FAILURES as error:
            tell_refusal(error)
            if self.available:
                log.warning("registry_unavailable", during=what, error=str(error) or type(error).__name__)
            self.available = False
            return None
        if not self.available:
            log.info("registry_available", cluster=self._cluster)
        self.available = True
        return answer

    def _node_key(self, node_id: str) -> str:
        return key(self._cluster, "node", node_id)


def _long_ago(seen: float) -> bool:
    return time.time() - seen > _FORGET_SECONDS


def _record(text: bytes | None) -> NodeRecord | None:
    if text is None:
        return None
    try:
        return NodeRecord.from_json(text)
    except ValueError as error:
        log.warning("registry_record_unreadable", error=str(error))
        return None


async def keep_alive(
    registry: Registry, record: Callable[[], NodeRecord], *, interval_seconds: float = HEARTBEAT_SECONDS
) -> None:
    """Heartbeats until cancelled, then leaves. `record()` is asked anew each time, and must be quick."""
    last = record()
    try:
        while True:
            heed_cancellation()
            last = record()
            await registry.heartbeat(last)
            await asyncio.sleep(interval_seconds)
    finally:
        await registry.leave(last.node_id, last.incarnation)


class RegistryWatch:
    """The current nodes at hand without a wait: polls the registry and tells whoever subscribed.

    `nodes` is empty before the first answer. Callbacks run in the event loop with the full list, after each poll that
    brought an answer or a change; they must be quick and must not raise.
    """

    def __init__(self, registry: Registry, *, interval_seconds: float = HEARTBEAT_SECONDS / 2) -> None:
        self._registry = registry
        self._interval_seconds = interval_seconds
        self._subscribers: list[Callable[[list[NodeRecord]], None]] = []
        self._first = asyncio.Event()
        self.nodes: list[NodeRecord] = []

    def subscribe(self, callback: Callable[[list[NodeRecord]], None]) -> None:
        self._subscribers.append(callback)

    async def wait_first(self) -> None:
        """Returns after the first poll, whether or not Redis answered."""
        await self._first.wait()

    async def run(self) -> None:
        """Polls until cancelled."""
        while True:
            heed_cancellation()
            self.nodes = await self._registry.list()
            for callback in self._subscribers:
                callback(self.nodes)
            self._first.set()
            await asyncio.sleep(self._interval_seconds)
