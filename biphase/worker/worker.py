"""One worker, prefill or decode: an engine, its KV memory, its transfers, its place in the cluster.

Owns what both roles need and the order in which it comes up and goes down. Owns no RPC of a role: services/prefill
and services/decode add theirs. Nothing listens before the model is loaded, so a bad model never opens a port.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Iterator
from dataclasses import replace

from biphase.cache.hashing import root_hash
from biphase.engine import Engine
from biphase.errors import BiphaseError, UnavailableError
from biphase.index.registry import NodeRecord, default_node_id, new_incarnation
from biphase.request import BlockHash, NodeId, Request, RequestId
from biphase.rpc.client import ChannelPool
from biphase.rpc.node import NodeServicer
from biphase.rpc.server import Registration, RpcServer, reachable_host
from biphase.rpc.trust import trust_of
from biphase.rpc.v1 import blocks_pb2_grpc, node_pb2, node_pb2_grpc
from biphase.telemetry.events import event_logger
from biphase.telemetry.exposition import MetricsServer, serve_metrics
from biphase.telemetry.holder_metrics import WorkerMetrics
from biphase.transfer.holder import BlockHolderServicer
from biphase.transfer.leases import LeaseTable
from biphase.transfer.reader import BlockReader
from biphase.transfer.server import BlockServer
from biphase.worker.bridge import EngineBridge
from biphase.worker.cluster import ClusterMembership
from biphase.worker.core import WorkerCore
from biphase.worker.identity import WorkerIdentity
from biphase.worker.metrics import readings
from biphase.worker.numbers import block_counters, node_load, node_status
from biphase.worker.offers import BlockOffers
from biphase.worker.prefixes import PrefixFetcher
from biphase.worker.reads import finish_background
from biphase.worker.settings import WorkerSettings

log = event_logger(__name__)

# How late the end of a lease may be noticed.
_SWEEP_SECONDS = 0.25
# A node that is missing from the registry for so many looks in a row is gone; its leases end.
_MISSED_LOOKS = 4


class Worker:
    """Built inside a running event loop; `start`, then `run_until_stopped`.

    Raises:
        ConfigError: a service token or certificates that cannot be used.
    """

    def __init__(self, role: str, settings: WorkerSettings, core: WorkerCore) -> None:
        self.role = role
        self.settings = settings
        self.core = core
        self.node_id = NodeId(settings.node_id) if settings.node_id else default_node_id(role)
        self.incarnation = new_incarnation()
        self.pool = core.pool
        self.manager = core.manager
        self.layout = core.layout
        self._trust = trust_of(settings)
        self.channels = ChannelPool(self._trust)
        self.leases = LeaseTable(core.pool, settings.lease_seconds)
        self.bridge = EngineBridge(asyncio.get_running_loop())
        self.metrics = WorkerMetrics(role, self.node_id, _model_label(core), lambda: readings(self))
        self.engine = Engine(core.runner, core.manager, core.scheduler_config, blocks_arrived=core.blocks_arrived,
                             stepped=self.metrics.stepped)  # fmt: skip
        self._transports = (settings.require_transport,) if settings.require_transport else settings.transports
        self.reader = BlockReader(
            core.memory,
            core.layout,
            self.node_id,
            self.incarnation,
            transports=self._transports,
            allow_fallback=not settings.require_transport,
            by_speed=settings.transport_choice == "speed",
            trust=self._trust,
        )
        self.reader.observe = self.metrics.read_ended
        self._metrics_server: MetricsServer | None = None
        # What made this worker stop by itself; None while it is well.
        self.failure: BiphaseError | None = None
        self._state = "starting"
        self._active: set[str] = set()
        self._calls = itertools.count()
        self._stop = asyncio.Event()
        self._drain_seconds = settings.drain_timeout
        self._started = time.monotonic()
        self._missed: dict[tuple[NodeId, str], int] = {}

    # ---- coming up

    async def start(self, role_servicer: Registration) -> None:
        """Opens the data plane and the gRPC port, and joins the cluster.

        Raises:
            ConfigError: a port is taken.
        """
        core = self.core
        self.server = BlockServer(
            core.memory,
            core.pool,
            core.layout,
            self.node_id,
            self.incarnation,
            self.leases,
            host=self.settings.host,
            port=self.settings.transfer_port,
            advertise_host=reachable_host(self.settings.host),
            generations=core.generations,
            transports=self._transports,
            trust=self._trust,
        )
        endpoint = self.server.endpoint
        if self.settings.advertised_transfer_address and endpoint.tcp_address:
            endpoint = replace(endpoint, tcp_address=self.settings.advertised_transfer_address)
        self.endpoint = endpoint.to_proto()
        holder = BlockHolderServicer(core.pool, self.leases, core.layout, self.endpoint)
        node = NodeServicer(lambda: self.identity.info(), self.status, self.request_stop, self._reset_cache)
        self._rpc = await RpcServer.start(
            self.settings.host,
            self.settings.port,
            [
                role_servicer,
                lambda server: blocks_pb2_grpc.add_BlockHolderServicer_to_server(holder, server),
                lambda server: node_pb2_grpc.add_NodeServicer_to_server(node, server),
            ],
            trust=self._trust,
        )
        self._metrics_server = serve_metrics(self.metrics.registry, self.settings)
        self.identity = WorkerIdentity(
            node_id=self.node_id,
            role=self.role,
            incarnation=self.incarnation,
            address=self.settings.advertised_address or self._rpc.address,
            layout=core.layout,
            model=core.model,
            endpoint=self.endpoint,
            num_blocks=core.pool.num_blocks,
            max_num_seqs=core.scheduler_config.max_num_seqs,
            max_num_batched_tokens=core.scheduler_config.max_num_batched_tokens,
            metrics_address="" if self._metrics_server is None else self._metrics_server.address,
        )
        self.cluster = ClusterMembership(
            self.settings.redis_url, self.settings.cluster, self.identity, core.pool, self._record
        )
        self.prefixes = PrefixFetcher(
            identity=self.identity,
            engine=self.engine,
            manager=core.manager,
            index=self.cluster.view,
            node_of=self.cluster.node,
            channels=self.channels,
            reader=self.reader,
            timeout_seconds=self.settings.transfer_timeout_seconds,
            enabled=self.settings.fetch_prefixes and self.settings.enable_prefix_caching,
        )
        self.offers = BlockOffers(
            endpoint=self.endpoint,
            pool=core.pool,
            leases=self.leases,
            channels=self.channels,
            stores=self.cluster.stores if self.settings.offer_blocks else lambda: [],
            is_stored=self.cluster.is_stored,
            waits=lambda: self.engine.num_waiting > 0,
        )
        self.engine.start()
        self._state = "ready"
        self.cluster.start(self._on_nodes)
        self._tasks = [asyncio.create_task(self._sweep_forever()), asyncio.create_task(self.offers.run())]
        await self._rpc.set_serving(True)

    # ---- serving

    def own_id(self, request_id: str) -> RequestId:
        """An id for one call's work, which nothing else here has or will have.

        The same request may come again while an earlier call for it has not ended: after a freeze, a lost connection,
        or by way of two decode workers. What belongs to the one call must never reach the other.
        """
        return RequestId(f"{request_id}~{next(self._calls)}")

    @contextlib.contextmanager
    def accept(self, request: Request) -> Iterator[None]:
        """Frames the work on one request; a draining worker takes none.

        Raises:
            UnavailableError: the worker is going down.
        """
        if self._state != "ready":
            raise UnavailableError(f"{self.node_id} is {self._state} and takes no new requests")
        self._active.add(request.request_id)
        try:
            yield
        finally:
            self._active.discard(request.request_id)

    async def prepare(self, request: Request) -> None:
        """Makes ready what the engine's thread would have to wait for: the grammar of a structured request.

        Raises:
            InvalidRequestError: it does not compile.
        """
        if request.sampling.structured_output is not None:
            await self.core.grammars.prepare(request.sampling.structured_output)

    def root_hash(self, cache_salt: str) -> BlockHash:
        return root_hash(self.layout.namespace, cache_salt)

    def offer(self, request: Request, num_seen_tokens: int) -> None:
        """Offers what the request left in this worker's cache to the block store.

        Args:
            num_seen_tokens: of its prompt, what was found, here or elsewhere, instead of computed.
        """
        self.offers.put(request.block_hashes, request.cache_salt, num_seen_tokens // self.settings.block_size)

    def has_prefill_nodes(self) -> bool:
        """Whether the cluster has a prefill pool at all."""
        return any(record.role == "prefill" for record in self.cluster.nodes)

    def status(self) -> node_pb2.NodeStatus:
        return node_status(
            self._state,
            time.monotonic() - self._started,
            self.engine.stats(),
            self.leases.counts(),
            self.reader.peers(),
            block_counters(self.offers, self.prefixes.counts),
        )

    def _record(self) -> NodeRecord:
        return self.identity.record(self._state, node_load(self.engine.stats()))

    def _on_nodes(self, nodes: list[NodeRecord]) -> None:
        """Ends the leases of readers that are gone, sooner than by expiry."""
        lives = {record.node_id: record.incarnation for record in nodes}
        missed: dict[tuple[NodeId, str], int] = {}
        for node_id, incarnation in self.leases.readers():
            life = lives.get(NodeId(node_id))
            if life == incarnation:
                continue
            looks = self._missed.get((NodeId(node_id), incarnation), 0) + 1
            # Incarnations begin with the time. One that is younger is proof: this life is over.
            if looks >= _MISSED_LOOKS or (life is not None and life > incarnation):
                self.leases.end_reader(node_id, incarnation)
            else:
                missed[NodeId(node_id), incarnation] = looks
        self._missed = missed

    async def _sweep_forever(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_SECONDS)
            self.leases.sweep()
            if self.engine.failure is not None and self.failure is None:
                # Nothing more can be computed here: leave, and let a fresh process take the place.
                self.failure = self.engine.failure
                self.request_stop(0.0)

    # ---- going down

    def request_stop(self, drain_seconds: float | None = None) -> None:
        """Starts the drain. Safe to call again."""
        if drain_seconds is not None:
            self._drain_seconds = drain_seconds
        self._stop.set()

    def _reset_cache(self) -> bool:
        self.core.pool.drop_cached()
        return not self.core.pool.num_used

    async def run_until_stopped(self) -> None:
        """Returns when the worker was told to stop, running requests have ended and everything is closed."""
        await self._stop.wait()
        self._state = "draining"
        log.info("draining", num_active=len(self._active), timeout_seconds=self._drain_seconds)
        await self._rpc.set_serving(False)
        await self.cluster.announce()
        deadline = time.monotonic() + self._drain_seconds
        # Readers may still fetch the last blocks of a prefill that has ended here.
        while (self._active or self.leases.counts().num_leases) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        if self._active:
            log.warning("drain_timed_out", num_cancelled=len(self._active))
        await self.cluster.leave()
        await self._rpc.stop(0.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await finish_background(1.0)
        await asyncio.to_thread(self._close)
        await self.channels.close()
        log.info("stopped")

    def _close(self) -> None:
        if self._metrics_server is not None:
            self._metrics_server.close()
        self.engine.shutdown()
        self.core.grammars.close()
        self.reader.close()
        self.server.close()


def _model_label(core: WorkerCore) -> str:
    """What clients call the model, as the gateway's metrics do."""
    return core.model.served_names[0] if core.model.served_names else core.model.model
