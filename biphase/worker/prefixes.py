"""Prefixes that other nodes hold: found in the index, leased, read into a request's reserved blocks.

Owns the decision whether reading beats computing, and the reads. A prefix that cannot be had costs nothing but the
attempt: the engine computes what did not arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import grpc

from biphase.cache.manager import KVCacheManager
from biphase.engine import Engine, Reserved
from biphase.errors import BiphaseError, CorruptBlockError
from biphase.index.registry import NodeRecord
from biphase.index.view import Span
from biphase.request import BlockHash, NodeId, Request
from biphase.rpc.client import ChannelPool
from biphase.rpc.errors import from_rpc_error
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import ReadRequest
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.peer import PeerStats
from biphase.transfer.reader import BlockReader
from biphase.worker.identity import WorkerIdentity
from biphase.worker.reads import HeldLease, reads_ended

log = event_logger(__name__)

_LEASE_CALL_SECONDS = 2.0
# What a fetch costs beside the bytes: two calls and a few hand-overs between threads.
_FETCH_OVERHEAD_SECONDS = 0.005
# Assumed until a peer's speed has been measured.
_ASSUMED_BYTES_PER_SECOND = 1e9
# Less says more about the overhead than about the speed.
_TELLING_BYTES = 8 * 2**20


def reading_seconds(num_bytes: Mapping[str, int], peers: Iterable[PeerStats]) -> float:
    """What reading so much from each of these nodes will take, one after the other, by what is known of their speed.

    That is what they delivered so far, if it was enough to tell; else what the handshake measured.
    """
    speeds: dict[str, float] = {}
    for peer in peers:
        if peer.num_bytes >= _TELLING_BYTES and peer.seconds:
            speeds[peer.node_id] = peer.num_bytes / peer.seconds
        elif peer.gigabytes_per_second:
            speeds.setdefault(peer.node_id, peer.gigabytes_per_second * 1e9)
    return sum(
        size / speeds.get(node_id, _ASSUMED_BYTES_PER_SECOND) + _FETCH_OVERHEAD_SECONDS
        for node_id, size in num_bytes.items()
    )


class PrefixIndex(Protocol):
    """Who holds which blocks; biphase.index.view.IndexView is one."""

    def plan(self, hashes: Sequence[BlockHash], exclude: Collection[NodeId] = ()) -> Sequence[Span]:
        """Who holds which part of the longest leading part of the chain that can be had, in order."""
        ...


@dataclass(frozen=True, slots=True)
class PrefixPart:
    """The request's blocks up to `end_block`, from where the part before ends, are at `node`."""

    node: NodeRecord
    end_block: int


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """What to read where, in order. Where the first part starts is known at the reservation.

    More than one part when several block stores share the chain.
    """

    parts: tuple[PrefixPart, ...]


@dataclass(slots=True)
class PrefixCounts:
    num_fetches: int = 0
    num_failed: int = 0
    num_fetched_blocks: int = 0
    num_not_worth_it: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class PrefixFetcher:
    """One per worker, on its event loop.

    Args:
        node_of: current record of a node, None when it is not there any more.
        timeout_seconds: of one read.
    """

    identity: WorkerIdentity
    engine: Engine
    manager: KVCacheManager
    index: PrefixIndex
    node_of: Callable[[NodeId], NodeRecord | None]
    channels: ChannelPool
    reader: BlockReader
    timeout_seconds: float
    enabled: bool = True
    counts: PrefixCounts = field(default_factory=PrefixCounts)

    def plan(self, request: Request) -> PrefixPlan | None:
        """Whether another node holds more of the request than this one, and reading that is the faster way.

        Hashes the request (KVCacheManager.prepare) if that has not happened yet.
        """
        if not self.enabled or request.sampling.prompt_logprobs is not None:
            return None
        self.manager.prepare(request)
        block_size = self.manager.block_size
        # The last token has to be computed here for its logits.
        usable = (request.num_tokens - 1) // block_size
        num_own = (request.num_tokens - request.num_uncached_tokens) // block_size
        if usable <= num_own:
            return None
        parts = self._parts(request.block_hashes[num_own:usable], num_own)
        if not parts:
            return None
        if not self._is_faster(parts, num_own):
            self.counts.num_not_worth_it += 1
            return None
        return PrefixPlan(parts)

    def _parts(self, hashes: Sequence[BlockHash], first: int) -> tuple[PrefixPart, ...]:
        """Who holds what of the leading part of `hashes`, which start at block `first` of the request."""
        exclude = {self.identity.node_id}
        while True:
            parts: list[PrefixPart] = []
            for span in self.index.plan(hashes, exclude):
                node = self.node_of(span.node_id)
                if node is None:
                    # The index has not heard yet that it is gone.
                    exclude.add(span.node_id)
                    break
                parts.append(PrefixPart(node, first + span.stop))
            else:
                return tuple(parts)

    def _is_faster(self, parts: Sequence[PrefixPart], first: int) -> bool:
        """Whether reading blocks from `first` to the end of the parts takes less time than computing them."""
        rate = self.engine.stats().prefill_tokens_per_second
        if not rate:
            return True
        num_bytes: dict[str, int] = {}
        start = first
        for part in parts:
            size = (part.end_block - start) * self.identity.layout.block_bytes
            num_bytes[part.node.node_id] = num_bytes.get(part.node.node_id, 0) + size
            start = part.end_block
        return reading_seconds(num_bytes, self.reader.peers()) < (start - first) * self.manager.block_size / rate

    async def load(self, request: Request, plan: PrefixPlan, reserved: Reserved) -> None:
        """Fills the reserved blocks as far as the plan's nodes deliver, and lets the engine run the request.

        The caller holds references to the reserved blocks until this returns. Cancelled: returns when no read is
        posted any more, and the engine is not told.
        """
        first = reserved.num_cached_tokens // self.manager.block_size
        num_read = 0
        for part in plan.parts:
            try:
                num_read += await self._fetch(request, part, first + num_read, reserved.block_ids)
            except BiphaseError as error:
                self.counts.num_failed += 1
                log.warning(
                    "prefix_fetch_failed", request_id=request.request_id, node=part.node.node_id,
                    code=error.code.value, error=error.message,
                )  # fmt: skip
            if first + num_read < part.end_block:
                # What follows a missing block is of no use.
                break
        self.engine.kv_ready(
            request.request_id,
            num_valid_tokens=(first + num_read) * self.manager.block_size,
            num_external_tokens=num_read * self.manager.block_size,
        )

    async def _fetch(self, request: Request, part: PrefixPart, first: int, block_ids: Sequence[int]) -> int:
        """Returns how many blocks from `first` on are here and verified."""
        if part.end_block <= first:
            return 0
        self.counts.num_fetches += 1
        channel = self.channels.get(part.node.address)
        stub = blocks_pb2_grpc.BlockHolderStub(channel)
        wanted = request.block_hashes[first : part.end_block]
        try:
            answer: blocks_pb2.LeaseResponse = await stub.Lease(
                blocks_pb2.LeaseRequest(
                    block_hashes=wanted,
                    layout=self.identity.layout.to_proto(),
                    reader_node_id=self.identity.node_id,
                    reader_incarnation=self.identity.incarnation,
                    first_index=first,
                ),
                timeout=_LEASE_CALL_SECONDS,
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, part.node.node_id) from error
        if not answer.blocks:
            # The index was behind: a miss.
            return 0
        async with HeldLease(channel, answer.lease_id, answer.lease_seconds):
            for handle, block_hash in zip(answer.blocks, wanted, strict=False):
                if handle.block_hash != block_hash:
                    raise CorruptBlockError(f"{part.node.node_id} leased another block than the one asked for")
            return await self._read(request, answer, block_ids)

    async def _read(self, request: Request, answer: blocks_pb2.LeaseResponse, block_ids: Sequence[int]) -> int:
        future = self.reader.read(
            Endpoint.from_proto(answer.endpoint),
            answer.lease_id,
            [ReadRequest.from_handle(handle, block_ids[handle.index]) for handle in answer.blocks],
            deadline_seconds=self.timeout_seconds,
        )
        read = asyncio.wrap_future(future)
        await reads_ended([read])
        result = read.result()
        if result.error is not None:
            self.counts.num_failed += 1
            log.warning("prefix_read_failed", request_id=request.request_id, error=result.error.message)
        verified = set(result.verified)
        num_read = 0
        while num_read < len(answer.blocks) and answer.blocks[num_read].index in verified:
            num_read += 1
        self.counts.num_fetched_blocks += num_read
        self.counts.num_bytes += result.num_bytes
        self.counts.seconds += result.seconds
        log.info(
            "prefix_fetched",
            request_id=request.request_id,
            node=answer.endpoint.node_id,
            num_blocks=num_read,
            transport=result.transport,
            seconds=result.seconds,
        )
        return num_read
