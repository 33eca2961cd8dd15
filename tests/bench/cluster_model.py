"""A cluster in virtual time: prefill and decode workers, a block store and an index, under the gateway's own routing.

The router, its policies, nodes and their directory, expected prefixes, the waiting line and the index view are the very
classes that serve. What is modelled is what lies behind them: how long workers compute, read and decode, and which
blocks their LRU caches hold. A prefill worker takes its prompts in turn. It reads what others hold and it does not,
where the index says so, and computes the rest at a fixed rate. Decode steps take longer the more sequences run. Owns no
trace and no figures.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from biphase.errors import UnavailableError
from biphase.index.events import IndexEvent
from biphase.index.view import IndexView
from biphase.request import BlockHash, NodeId
from biphase.rpc.client import ChannelPool
from biphase.rpc.v1 import common_pb2, node_pb2
from services.gateway.node import Node
from services.gateway.nodes import NodeDirectory
from services.gateway.routing.policies import policy_named
from services.gateway.routing.router import Placement, Router, Ticket
from services.gateway.routing.speculation import SpeculativeHolders
from services.gateway.routing.waiting import WaitingLine

NAMESPACE = b"n" * 32


@dataclass(frozen=True)
class Sizes:
    """Of the modelled cluster. Tokens, seconds."""

    num_prefills: int
    num_decodes: int
    block_size: int = 512
    prefill_tokens_per_second: float = 8000.0
    # Of KV read from another node.
    fetch_tokens_per_second: float = 160_000.0
    # Per request, beside compute: calls, hand-overs.
    overhead_seconds: float = 0.01
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    decode_step_seconds: float = 0.015
    decode_step_seconds_per_sequence: float = 0.0002
    prefill_cache_tokens: int = 2_000_000
    decode_cache_tokens: int = 2_000_000
    # 0: no block store.
    store_tokens: int = 0
    fetch: bool = True
    # From a change of a cache until gateways and workers know.
    index_delay_seconds: float = 0.05


@dataclass(slots=True)
class Job:
    """One request of a trace, and what became of it. Times on the virtual clock."""

    arrival: float
    num_tokens: int
    num_output_tokens: int
    hashes: list[BlockHash]
    request_id: str = ""
    num_cached_tokens: int = 0
    num_fetched_tokens: int = 0
    ttft_seconds: float = -1.0


class _Cache:
    """LRU over blocks, known to the index with a delay."""

    def __init__(self, cluster: ClusterModel, name: str, num_blocks: int) -> None:
        self._cluster = cluster
        self._name = name
        self._num_blocks = num_blocks
        self._sequence = 0
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def num_leading(self, hashes: Sequence[BlockHash]) -> int:
        for place, block_hash in enumerate(hashes):
            if block_hash not in self._blocks:
                return place
        return len(hashes)

    def put(self, hashes: Sequence[BlockHash]) -> None:
        """The end of a chain goes before its beginning."""
        stored = [block_hash for block_hash in hashes if block_hash not in self._blocks]
        for block_hash in reversed(hashes):
            self._blocks[block_hash] = None
            self._blocks.move_to_end(block_hash)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._num_blocks)]
        fresh = set(removed)
        stored = [block_hash for block_hash in stored if block_hash not in fresh]
        if stored or removed:
            self._sequence += 1
            event = IndexEvent(
                NodeId(self._name), self._name, self._sequence, stored=b"".join(stored), removed=b"".join(removed)
            )
            self._cluster.after(self._cluster.sizes.index_delay_seconds, lambda: self._cluster.hear(event))


@dataclass(slots=True, eq=False)
class _Worker:
    node: Node
    cache: _Cache
    queue: deque[tuple[Job, Placement]] = field(default_factory=deque)
    is_busy: bool = False
    busy_seconds: float = 0.0
    num_running: int = 0


class _Pools(NodeDirectory):
    """The gateway's own directory. Nobody is probed: everybody is always well."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__(ChannelPool())
        self._nodes = {node.incarnation: node for node in nodes}


class _Index:
    """PrefixHolders over the one view, as the gateway's connection to the cluster is over its own."""

    def __init__(self, view: IndexView) -> None:
        self._view = view

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> dict[str, int]:
        return self._view.leading_blocks(hashes)


class ClusterModel:
    """Build, `run` once, read the jobs and the workers."""

    def __init__(self, sizes: Sizes, policy: str, *, max_busy_local_tokens: int = 0) -> None:
        self.sizes = sizes
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self.view = IndexView()
        self.prefills = [self._worker("prefill", place) for place in range(sizes.num_prefills)]
        self.decodes = [self._worker("decode", place) for place in range(sizes.num_decodes)]
        self._by_name = {worker.node.incarnation: worker for worker in (*self.prefills, *self.decodes)}
        self.store = _Cache(self, "store", sizes.store_tokens // sizes.block_size) if sizes.store_tokens else None
        self.router = Router(
            _Pools(worker.node for worker in self._by_name.values()),
            policy_named(policy),
            speculation=SpeculativeHolders(lifetime_seconds=10.0, clock=lambda: self.now),
            index=_Index(self.view),
            fetches=sizes.fetch,
            max_busy_local_tokens=max_busy_local_tokens,
            clock=lambda: self.now,
        )
        self.line = WaitingLine(self.router, max_waiting=10**9)

    def _worker(self, role: str, place: int) -> _Worker:
        sizes, name = self.sizes, f"{role}-{place}"
        info = node_pb2.NodeInfo(
            node_id=name,
            role=role,
            incarnation=name,
            layout=common_pb2.KVLayout(namespace=NAMESPACE, block_size_tokens=sizes.block_size),
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        status = node_pb2.NodeStatus(state="ready", prefill_tokens_per_second=sizes.prefill_tokens_per_second)
        tokens = sizes.prefill_cache_tokens if role == "prefill" else sizes.decode_cache_tokens
        return _Worker(Node(name, info, status), _Cache(self, name, tokens // sizes.block_size))

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def hear(self, event: IndexEvent) -> None:
        self.view.apply(event)

    def run(self, jobs: Sequence[Job]) -> None:
        """Until all have had their last token."""
        for job in jobs:
            self.after(job.arrival, lambda job=job: self._arrive(job))  # type: ignore[misc]
        while self._events:
            self.now, _, what = heapq.heappop(self._events)
            what()

    def _arrive(self, job: Job) -> None:
        ticket = Ticket(
            job.request_id,
            range(job.num_tokens),
            "",
            arrival=self.now,
            chains={(NAMESPACE, self.sizes.block_size): job.hashes},
        )

        def answered(answer: Placement | UnavailableError) -> None:
            assert isinstance(answer, Placement)
            worker = self._by_name[answer.prefills[0].incarnation]
            worker.queue.append((job, answer))
            self._work(worker)

        self.line.enter(ticket, answered)

    def _work(self, worker: _Worker) -> None:
        if worker.is_busy or not worker.queue:
            return
        job, placement = worker.queue.popleft()
        sizes = self.sizes
        worker.is_busy = True
        # The last token has to be computed for its logits.
        usable = job.hashes[: (job.num_tokens - 1) // sizes.block_size]
        own = worker.cache.num_leading(usable)
        fetched = self._num_fetched(worker, usable, own) if sizes.fetch else 0
        job.num_cached_tokens, job.num_fetched_tokens = own * sizes.block_size, fetched * sizes.block_size
        computed = job.num_tokens - job.num_cached_tokens - job.num_fetched_tokens
        seconds = computed / sizes.prefill_tokens_per_second + job.num_fetched_tokens / sizes.fetch_tokens_per_second
        worker.busy_seconds += seconds
        self.after(seconds + sizes.overhead_seconds, lambda: self._prefilled(worker, job, placement))

    def _num_fetched(self, worker: _Worker, hashes: Sequence[BlockHash], own: int) -> int:
        """What the holders that the index names really have: it is behind by a moment."""
        stop = own
        for span in self.view.plan(hashes[own:], {NodeId(worker.node.incarnation)}):
            holder = self._by_name.get(span.node_id)
            cache = holder.cache if holder is not None else self.store
            assert cache is not None
            stop += cache.num_leading(hashes[stop : own + span.stop])
            if stop < own + span.stop:
                break
        return stop - own

    def _prefilled(self, worker: _Worker, job: Job, placement: Placement) -> None:
        job.ttft_seconds = self.now - job.arrival
        worker.is_busy = False
        worker.cache.put(job.hashes)
        decode = self._by_name[placement.decode.incarnation]
        decode.cache.put(job.hashes)
        if self.store is not None:
            self.store.put(job.hashes)
        decode.num_running += 1
        step = self.sizes.decode_step_seconds + self.sizes.decode_step_seconds_per_sequence * decode.num_running
        self.after(job.num_output_tokens * step, lambda: self._finished(decode, placement))
        placement.prefilled()
        self._work(worker)

    def _finished(self, decode: _Worker, placement: Placement) -> None:
        decode.num_running -= 1
        placement.release()
