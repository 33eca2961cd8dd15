"""The gateway's parts, put together: what a request needs is reached from here. Owns their start and end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry

from biphase import __version__
from biphase.errors import OverloadedError, UnavailableError
from biphase.index.connection import REDIS_FAILURES, connect
from biphase.index.registry import NodeRecord, default_node_id, new_incarnation
from biphase.request import NodeId
from biphase.rpc.client import ChannelPool
from biphase.rpc.trust import trust_of
from biphase.telemetry.events import event_logger
from biphase.telemetry.metrics import GatewayMetrics
from biphase.tokenizer.loader import LoadedTokenizer
from services.gateway.admission import AdmissionQueue
from services.gateway.auth import ApiKeys
from services.gateway.bodies import BodyReader
from services.gateway.cluster import Cluster
from services.gateway.dispatch import Dispatcher
from services.gateway.domain import Limits
from services.gateway.key_file import KeyGrant, digest_of
from services.gateway.model import ServedModel
from services.gateway.nodes import NodeDirectory
from services.gateway.rate_limits import RateLimits
from services.gateway.recorder import Recorder
from services.gateway.responding import BackgroundResponses
from services.gateway.response_store import ResponseStore
from services.gateway.routing.policies import policy_named
from services.gateway.routing.router import Router
from services.gateway.routing.speculation import SpeculativeHolders
from services.gateway.routing.waiting import WaitingLine
from services.gateway.settings import GatewaySettings
from services.gateway.sse import SlowReaders

log = event_logger(__name__)

# What was sent is believed to be cached for so long: until the index tells, or without one for a few minutes.
_EXPECTED_WITH_INDEX_SECONDS = 10.0
_EXPECTED_ALONE_SECONDS = 300.0
_REDIS_SECONDS = 0.5
# So long after its start, at most, a gateway lets requests wait for the workers it has not found yet.
_YOUTH_SECONDS = 5.0
_YOUTH_POLL_SECONDS = 0.02


class Gateway:
    """One per process. `start` and `close` run in the event loop that serves.

    Args:
        loaded: the model's tokenizer.
        names: what clients may call the model.
        root: what it is called in --model.
        tokenizer_digest: as its workers must have it; empty: any will do.

    Raises:
        ConfigError: a Redis URL, key file, service token or certificates that cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        loaded: LoadedTokenizer,
        names: tuple[str, ...],
        root: str,
        tokenizer_digest: str = "",
    ) -> None:
        self.settings = settings
        self.incarnation = new_incarnation()
        self.node_id = settings.node_id or default_node_id("gateway")
        self.model = ServedModel(
            loaded,
            names,
            root,
            tool_call_parser=settings.tool_call_parser,
            reasoning_parser=settings.reasoning_parser,
        )
        defaults = KeyGrant(
            digest_of(""),
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )
        self.keys = ApiKeys(settings.api_key, settings.api_key_file, defaults=defaults)
        self.metrics = GatewayMetrics(CollectorRegistry(), names[0])
        # Requests wait for these answers, unlike for the registry's.
        redis = connect(settings.redis_url, timeout_seconds=_REDIS_SECONDS) if settings.redis_url else None
        self._redis = redis
        self.rate_limits = RateLimits(redis, settings.cluster, on_failure=self.metrics.rate_limit_skipped)
        self.responses = ResponseStore(redis, settings.cluster, seconds=settings.response_store_seconds)
        self.background = BackgroundResponses(self.rate_limits)
        self.recorder = Recorder(self.metrics, settings.routing_policy)
        self.channels = ChannelPool(trust_of(settings))
        self.nodes = NodeDirectory(
            self.channels,
            max_model_len=settings.max_model_len,
            tokenizer_digest=tokenizer_digest if settings.check_tokenizer else "",
        )
        policy = policy_named(settings.routing_policy)
        self._cluster = Cluster(settings.redis_url, settings.cluster, self._record) if settings.redis_url else None
        lifetime = _EXPECTED_ALONE_SECONDS if self._cluster is None else _EXPECTED_WITH_INDEX_SECONDS
        self.router = Router(
            self.nodes,
            policy,
            speculation=SpeculativeHolders(lifetime_seconds=lifetime),
            index=self._cluster,
            max_backlog_tokens=settings.max_prefill_backlog_tokens,
            max_busy_local_tokens=settings.max_busy_local_tokens,
            observe=self.recorder.routed,
        )
        line = WaitingLine(self.router, max_waiting=settings.max_queue, prefill_rate=self._prefill_rate)
        self.queue = AdmissionQueue(line)
        self.nodes.on_change = self.queue.wake
        self.dispatcher = Dispatcher(
            self.channels,
            self.queue,
            max_retries=settings.max_retries,
            expects_decode=lambda: bool(self.nodes.ready_lately("decode")),
            on_move=self.metrics.moved,
        )
        self.bodies = BodyReader(settings.max_request_bytes)
        self.slow_readers = SlowReaders(settings.slow_reader_seconds)
        self.fingerprint = f"biphase-{__version__}-{secrets.token_hex(4)}"
        self.started = time.time()
        self._grown_up = time.monotonic() + _YOUTH_SECONDS
        self._num_early = 0
        self.draining = False
        # Starts the drain of this process; the server that runs it puts its own here.
        self.begin_drain: Callable[[], None] = lambda: None
        # "host:port", once it listens.
        self.address = ""
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begins to look for workers, and returns at once.

        Requests wait until they are found, or it is known that there are none, which is answered 503.
        """
        self._grown_up = time.monotonic() + _YOUTH_SECONDS
        self.nodes.add_static((*self.settings.decode_nodes, *self.settings.prefill_nodes))
        self._tasks.append(asyncio.create_task(self.slow_readers.run()))
        if self._cluster is not None:
            self._cluster.start(self.nodes.on_registry)

    async def close(self) -> None:
        await self.background.close()
        if self._cluster is not None:
            await self._cluster.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.nodes.close()
        await self.channels.close()
        if self._redis is not None:
            with contextlib.suppress(*REDIS_FAILURES):
                await self._redis.aclose()
        await self.model.close()

    def _record(self) -> NodeRecord:
        return NodeRecord(
            node_id=NodeId(self.node_id),
            role="gateway",
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=self.address,
            state="draining" if self.draining else "ready",
            model=self.model.root,
            served_names=self.model.names,
            version=__version__,
        )

    @property
    def registered_nodes(self) -> Sequence[NodeRecord]:
        """Everybody in the registry, as last heard."""
        return () if self._cluster is None else self._cluster.nodes

    async def limits(self) -> Limits:
        """What the workers can do. A gateway that has just started waits until it has found them.

        Raises:
            UnavailableError: no decode worker is there to say.
            OverloadedError: too many wait for this gateway to find its workers.
        """
        if self._is_looking():
            await self._look_around()
        limits = self.nodes.limits(max_logprobs=self.settings.max_logprobs, max_sequences=self.settings.max_n)
        if limits is None:
            raise UnavailableError(self.nodes.why_none("decode"))
        return limits

    def _is_looking(self) -> bool:
        """Whether workers may be there that this gateway has not found yet."""
        if time.monotonic() >= self._grown_up:
            return False
        listed = self._cluster is None or self._cluster.has_answered
        if self.nodes.usable("decode") or (listed and not self.nodes.num_unknown):
            self._grown_up = 0.0
            return False
        return True

    async def _look_around(self) -> None:
        if self._num_early >= self.settings.max_queue:
            raise OverloadedError(f"The server is starting and {self._num_early} requests are waiting.", 1.0)
        self._num_early += 1
        try:
            while self._is_looking():
                await asyncio.sleep(_YOUTH_POLL_SECONDS)
        finally:
            self._num_early -= 1

    def max_model_len(self) -> int | None:
        limits = self.nodes.limits(max_logprobs=0, max_sequences=1)
        return limits.max_model_len if limits is not None else self.settings.max_model_len or None

    @property
    def is_serving(self) -> bool:
        return not self.draining and bool(self.nodes.usable("decode"))

    def _prefill_rate(self) -> float:
        pool = self.nodes.usable("prefill") or self.nodes.usable("decode")
        return sum(node.status.prefill_tokens_per_second for node in pool)
