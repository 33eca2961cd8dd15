"""The life of a block store process: ports, registry, ready, drain, end.

Owns the order in which it comes up and goes down, and what it says about itself. Exit codes: 0 after a drain; 2 when
the settings cannot be used (one sentence on stderr, no port opened); 1 for anything else.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from biphase import __version__
from biphase.errors import ConfigError
from biphase.index.connection import connect
from biphase.index.publisher import IndexPublisher
from biphase.index.registry import (
    NodeLoad,
    NodeRecord,
    Registry,
    RegistryWatch,
    TransferAddress,
    default_node_id,
    keep_alive,
    new_incarnation,
)
from biphase.request import BlockHash, NodeId
from biphase.rpc.node import NodeServicer
from biphase.rpc.server import RpcServer
from biphase.rpc.trust import require_fence, trust_of
from biphase.rpc.v1 import blocks_pb2_grpc, node_pb2, node_pb2_grpc
from biphase.telemetry.events import event_logger
from biphase.telemetry.exposition import MetricsServer, serve_metrics
from biphase.telemetry.holder_metrics import HolderMetrics
from services.kvstore.metrics import readings
from services.kvstore.region import Identity, cancel
from services.kvstore.servicer import StoreServicer
from services.kvstore.settings import KvstoreSettings
from services.kvstore.store import BlockStore

log = event_logger(__name__)

_SWEEP_SECONDS = 1.0
# A reader that is missing from the registry in so many looks in a row is gone; its leases end.
_MISSED_LOOKS = 4
# What is still to be written at the end gets this share of the drain time.
_DISK_SHARE = 0.5


class StoreProcess:
    """Built inside a running event loop; `start`, then `run_until_stopped`.

    Raises:
        ConfigError: a Redis URL, token or certificates that cannot be used, or no fence where others could come in.
    """

    def __init__(self, settings: KvstoreSettings) -> None:
        self._settings = settings
        self.node_id = NodeId(settings.node_id) if settings.node_id else default_node_id("kvstore")
        self.incarnation = new_incarnation()
        self._trust = trust_of(settings)
        require_fence(self._trust, settings.host, settings.insecure)
        self._redis = connect(settings.redis_url) if settings.redis_url else None
        self._registry = Registry(self._redis, settings.cluster) if self._redis is not None else None
        self.store = BlockStore(settings, Identity(self.node_id, self.incarnation, self._trust), self._publisher)
        self._servicer = StoreServicer(self.store, lambda: self._state == "ready", settings.max_offers)
        self.metrics = HolderMetrics("kvstore", self.node_id, lambda: readings(self.store, self._servicer))
        self.store.observe_read = self.metrics.read_ended
        self._metrics_server: MetricsServer | None = None
        self._state = "starting"
        self._started = time.monotonic()
        self._stop = asyncio.Event()
        self._drain_seconds = settings.drain_timeout
        self._tasks: set[asyncio.Task[None]] = set()
        self._missed: dict[tuple[str, str], int] = {}
        self._folder_lock: int | None = None

    async def start(self) -> None:
        """
        Raises:
            ConfigError: a port is taken, or the disk folder cannot be used.
        """
        if self._settings.disk_path:
            self._folder_lock = _lock_folder(Path(self._settings.disk_path))
        node = NodeServicer(self.info, self.status, self.request_stop, self.store.reset)
        self._rpc = await RpcServer.start(
            self._settings.host,
            self._settings.port,
            [
                lambda server: blocks_pb2_grpc.add_BlockHolderServicer_to_server(self._servicer, server),
                lambda server: node_pb2_grpc.add_NodeServicer_to_server(node, server),
            ],
            trust=self._trust,
        )
        self._metrics_server = serve_metrics(self.metrics.registry, self._settings)
        self.store.start()
        self._state = "ready"
        self._tasks.add(asyncio.create_task(self._sweep_forever()))
        if self._registry is not None:
            watch = RegistryWatch(self._registry)
            watch.subscribe(self._on_nodes)
            self._tasks.add(asyncio.create_task(watch.run()))
            self._tasks.add(asyncio.create_task(keep_alive(self._registry, self._record)))
        await self._rpc.set_serving(True)
        self._announce_ready()

    def request_stop(self, drain_seconds: float | None = None) -> None:
        """Starts the drain. Told a second time: ends it now."""
        if self._stop.is_set():
            self._drain_seconds = 0.0
        elif drain_seconds is not None:
            self._drain_seconds = drain_seconds
        self._stop.set()

    async def run_until_stopped(self) -> None:
        """Returns when the store was told to stop, readers have finished and everything is closed."""
        await self._stop.wait()
        self._state = "draining"
        began = time.monotonic()
        log.info("draining", num_leases=self._num_leases(), timeout_seconds=self._drain_seconds)
        await self._rpc.set_serving(False)
        if self._registry is not None:
            await self._registry.heartbeat(self._record())
        while (self._num_leases() or self._servicer.num_offers_running) and self._left(began) > 0:
            await asyncio.sleep(0.05)
        # Leaves the registry.
        await cancel(self._tasks)
        await self._rpc.stop(0.0)
        if self._metrics_server is not None:
            await asyncio.to_thread(self._metrics_server.close)
        await self.store.close(max(1.0, self._left(began) * _DISK_SHARE))
        if self._redis is not None:
            await self._redis.aclose()
        if self._folder_lock is not None:
            os.close(self._folder_lock)
        log.info("stopped")

    # ---- what it says about itself

    def info(self) -> node_pb2.NodeInfo:
        regions = self.store.regions
        return node_pb2.NodeInfo(
            node_id=self.node_id,
            role="kvstore",
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=self._rpc.address,
            version=__version__,
            num_blocks=sum(region.pool.num_blocks for region in regions),
            endpoint=regions[0].endpoint if regions else None,
        )

    def status(self) -> node_pb2.NodeStatus:
        regions = self.store.regions
        leased = [region.leases.counts().num_leased_blocks for region in regions]
        return node_pb2.NodeStatus(
            state=self._state,
            num_blocks=sum(region.pool.num_blocks for region in regions),
            num_used_blocks=sum(region.pool.num_used for region in regions),
            num_cached_blocks=sum(region.pool.num_cached for region in regions),
            num_leased_blocks=sum(leased),
            num_running=self._servicer.num_offers_running,
            uptime_seconds=time.monotonic() - self._started,
            peers=[
                node_pb2.PeerTransport(
                    node_id=peer.node_id,
                    transport=peer.transport,
                    gigabytes_per_second=peer.gigabytes_per_second,
                    bytes_read=peer.num_bytes,
                )
                for region in regions
                for peer in region.reader.peers()
            ],
            counters={
                **self.store.counters(),
                "num_offers": self._servicer.num_offers,
                "num_offers_refused": self._servicer.num_offers_refused,
                "num_leases": self._servicer.num_leases,
            },
        )

    def _record(self) -> NodeRecord:
        regions = self.store.regions
        endpoint = regions[0].server.endpoint if regions else None
        return NodeRecord(
            node_id=self.node_id,
            role="kvstore",
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=self._rpc.address,
            state=self._state,
            namespace=regions[0].layout.namespace.hex() if regions else "",
            block_size=regions[0].layout.block_size_tokens if regions else 0,
            version=__version__,
            metrics_address="" if self._metrics_server is None else self._metrics_server.address,
            load=NodeLoad(
                num_running=self._servicer.num_offers_running,
                num_blocks=sum(region.pool.num_blocks for region in regions),
                num_used_blocks=sum(region.pool.num_used for region in regions),
                num_cached_blocks=sum(region.pool.num_cached for region in regions),
            ),
            transfer=TransferAddress()
            if endpoint is None
            else TransferAddress(endpoint.tcp_address, endpoint.transports, endpoint.shm_address, endpoint.host_id),
        )

    def _announce_ready(self) -> None:
        line = {
            "node_id": self.node_id,
            "role": "kvstore",
            "pid": os.getpid(),
            "address": self._rpc.address,
            "incarnation": self.incarnation,
            "capacity_bytes": self._settings.capacity,
            "disk_path": self._settings.disk_path,
            "transports": list(self._settings.transports),
        }
        log.info("ready", **line)
        if self._settings.ready_fd is not None:
            os.write(self._settings.ready_fd, json.dumps(line).encode() + b"\n")
            os.close(self._settings.ready_fd)

    # ---- in the background

    def _publisher(self, namespace: bytes, held: Callable[[], Sequence[BlockHash]]) -> IndexPublisher | None:
        if self._redis is None:
            return None
        return IndexPublisher(self._redis, self._settings.cluster, namespace, self.node_id, self.incarnation, held)

    def _on_nodes(self, nodes: list[NodeRecord]) -> None:
        """Ends the leases of readers that are gone, sooner than by expiry."""
        alive = {(record.node_id, record.incarnation) for record in nodes}
        readers = {reader for region in self.store.regions for reader in region.leases.readers()}
        self._missed = {reader: self._missed.get(reader, 0) + 1 for reader in readers if reader not in alive}
        for reader, missed in self._missed.items():
            if missed >= _MISSED_LOOKS:
                for region in self.store.regions:
                    region.leases.end_reader(*reader)

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            for region in self.store.regions:
                region.leases.sweep()

    def _num_leases(self) -> int:
        return sum(region.leases.counts().num_leases for region in self.store.regions)

    def _left(self, began: float) -> float:
        return began + self._drain_seconds - time.monotonic()


def _lock_folder(folder: Path) -> int:
    """Makes sure that no other store writes there. Returns the descriptor that holds the lock.

    Raises:
        ConfigError: the folder cannot be made or written, or is another store's.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--disk-path {folder} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"--disk-path {folder} is used by another store") from error
    return fd


async def serve(settings: KvstoreSettings) -> None:
    """Runs a store until SIGTERM, SIGINT or a Drain call has ended it."""
    process = StoreProcess(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.request_stop)
    await process.start()
    await process.run_until_stopped()
