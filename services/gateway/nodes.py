"""The worker processes the gateway can use: who they are, how they are, and what it has given them.

Owns one monitor per address that asks GetInfo once and GetStatus every second, and this gateway's own count of what is
in flight. Addresses come from the registry or from flags; when the registry is away the last known ones are still
probed, so losing it takes nobody out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import grpc

from biphase.index.registry import NodeRecord
from biphase.rpc.client import ChannelPool
from biphase.rpc.v1 import node_pb2, node_pb2_grpc
from biphase.telemetry.events import event_logger
from services.gateway.domain import Limits
from services.gateway.node import TOLERATED_PROBES, Node

log = event_logger(__name__)

PROBE_SECONDS = 1.0
_PROBE_TIMEOUT_SECONDS = 2.0
_RESET_TIMEOUT_SECONDS = 10.0
# A node that was ready this recently is expected back.
_LATELY_SECONDS = 5.0


class NodeDirectory:
    """All nodes, kept current by one task per address. For one event loop."""

    def __init__(
        self,
        channels: ChannelPool,
        *,
        max_model_len: int = 0,
        tokenizer_digest: str = "",
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        self._channels = channels
        self._max_model_len = max_model_len
        self._tokenizer_digest = tokenizer_digest
        self._probe_seconds = probe_seconds
        self._nodes: dict[str, Node] = {}
        self._monitors: dict[str, asyncio.Task[None]] = {}
        self._static: list[str] = []
        # By address: when a node last said that it is ready, and who it was then.
        self._ready: dict[str, tuple[float, node_pb2.NodeInfo]] = {}
        # Called when a node becomes usable or free; the admission queue looks again then.
        self.on_change: Callable[[], None] = lambda: None

    def add_static(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._static.append(address)
            self._watch(address)

    def on_registry(self, records: Sequence[NodeRecord]) -> None:
        """Takes the registry's list: new addresses are watched, new incarnations asked anew, absent ones dropped.

        One that is absent and answers as ready all the same is kept: what is lost is its way to Redis, which costs hits
        and no answers. Who leaves says so first, and who dies does not answer.
        """
        listed = {record.address: record for record in records if record.role != "gateway" and record.address}
        for address, record in listed.items():
            node = self._watch(address)
            node.leaving = record.state == "draining"
            node.is_unlisted = False
            if node.info is not None and node.incarnation != record.incarnation:
                node.info = None
        for address in set(self._nodes) - set(listed) - set(self._static):
            node = self._nodes[address]
            if not node.is_ready:
                self._drop(address)
            elif not node.is_unlisted:
                node.is_unlisted = True
                log.warning("node_unlisted", node=node.node_id, address=address)

    def _watch(self, address: str) -> Node:
        node = self._nodes.get(address)
        if node is None:
            node = self._nodes[address] = Node(address)
            self._monitors[address] = asyncio.get_running_loop().create_task(self._monitor(node))
        return node

    def _drop(self, address: str) -> None:
        node = self._nodes.pop(address)
        self._ready.pop(address, None)
        self._monitors.pop(address).cancel()
        log.info("node_gone", node=node.node_id, address=address)

    async def close(self) -> None:
        monitors = list(self._monitors.values())
        for task in monitors:
            task.cancel()
        await asyncio.gather(*monitors, return_exceptions=True)
        self._monitors.clear()
        self._nodes.clear()

    async def _monitor(self, node: Node) -> None:
        stub: Any = node_pb2_grpc.NodeStub(self._channels.get(node.address))
        while True:
            before = node.state, node.suspended_until
            try:
                await self._probe(node, stub)
            except grpc.aio.AioRpcError as error:
                node.failed_probes += 1
                if node.failed_probes == TOLERATED_PROBES + 1:
                    reason = error.code().name
                    log.warning("node_unreachable", node=node.node_id, address=node.address, reason=reason)
                    # Whoever answers here next may be another process.
                    node.info = None
            if (node.state, node.suspended_until) != before:
                self.on_change()
            # Nodes that are not there, or in doubt, are asked more often: requests may be waiting for the answer.
            well = node.info is not None and not node.failed_probes
            await asyncio.sleep(self._probe_seconds if well else self._probe_seconds / 4)

    async def reset_caches(self, roles: Collection[str]) -> bool:
        """Has all nodes of some roles forget their cached blocks. Whether every one did, and has none left."""
        stubs: list[Any] = [
            node_pb2_grpc.NodeStub(self._channels.get(node.address)) for node in self.nodes if node.role in roles
        ]
        calls = [stub.ResetCache(node_pb2.ResetCacheRequest(), timeout=_RESET_TIMEOUT_SECONDS) for stub in stubs]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                log.warning("cache_not_reset", error=str(answer)[:300])
        return all(not isinstance(answer, BaseException) and answer.is_empty for answer in answers)

    async def _probe(self, node: Node, stub: Any) -> None:
        if node.info is None or node.failed_probes or node.is_unlisted:
            info = await stub.GetInfo(node_pb2.GetInfoRequest(), timeout=_PROBE_TIMEOUT_SECONDS)
            if info.incarnation != node.incarnation:
                if node.is_unlisted:
                    # Somebody else at that address, whom the registry has not told of.
                    node.info = None
                    return
                log.info("node_found", node=info.node_id, role=info.role, address=node.address,
                         incarnation=info.incarnation)  # fmt: skip
                node.forget_prefill()
                node.refused = self._difference(info)
                if node.refused:
                    log.error("node_refused", node=info.node_id, role=info.role, address=node.address,
                              reason=node.refused)  # fmt: skip
            node.info = info
        node.status = await stub.GetStatus(node_pb2.GetStatusRequest(), timeout=_PROBE_TIMEOUT_SECONDS)
        node.failed_probes = 0
        node.suspended_until = 0.0
        if node.info is not None and node.state == "ready" and not node.refused:
            self._ready[node.address] = time.monotonic(), node.info

    def _difference(self, info: node_pb2.NodeInfo) -> str:
        """What makes the node useless to this gateway; "" when nothing does."""
        theirs = info.model.tokenizer_digest
        if not theirs or not self._tokenizer_digest or theirs == self._tokenizer_digest:
            return ""
        return (
            f"its tokenizer ({theirs[:12]}) is not this gateway's ({self._tokenizer_digest[:12]}): "
            "give both the same --model"
        )

    def why_none(self, role: str) -> str:
        """One sentence for clients when no node of the role is usable."""
        refused = [node for node in self.nodes if node.role == role and node.refused]
        if not refused:
            return f"No {role} worker is available."
        return f"No {role} worker is available: {refused[0].node_id} is refused, since {refused[0].refused}."

    @property
    def nodes(self) -> list[Node]:
        return sorted(self._nodes.values(), key=lambda node: (node.role, node.node_id, node.address))

    @property
    def num_unknown(self) -> int:
        """Nodes that were told of and have not yet said who they are, nor shown that they cannot."""
        return sum(
            # Who it is comes first, how it is with the next answer: only then is it known whether it can be used.
            (node.info is None or not node.status.state) and node.failed_probes <= TOLERATED_PROBES
            for node in self._nodes.values()
        )

    def usable(self, role: str, *, namespace: bytes | None = None) -> list[Node]:
        """Nodes of a role that new work may go to now.

        Args:
            namespace: only those that can work with nodes of this one: with blocks of any size, of the same KV.
        """
        now = time.monotonic()
        # At every decision, of every node: `is_usable`, without the calls.
        usable = [
            node for node in self._nodes.values() if node.role == role and node.is_ready and node.suspended_until <= now
        ]
        if namespace is None:
            return usable
        families = {node.family for node in self._nodes.values() if node.namespace == namespace}
        return [node for node in usable if node.family in families]

    def ready_lately(self, role: str) -> list[node_pb2.NodeInfo]:
        """Nodes that were ready a moment ago, and may be again in another: a lost connection says little about them."""
        since = time.monotonic() - _LATELY_SECONDS
        return [info for at, info in self._ready.values() if info.role == role and at >= since]

    def served_names(self) -> tuple[str, ...]:
        """Names that the decode workers were started with."""
        for node in self.usable("decode"):
            if node.info is not None and node.info.model.served_names:
                return tuple(node.info.model.served_names)
        return ()

    def limits(self, *, max_logprobs: int, max_sequences: int) -> Limits | None:
        """What every usable decode worker can do; None when there is none, and was none a moment ago."""
        infos = [node.info for node in self.usable("decode") if node.info is not None] or self.ready_lately("decode")
        if not infos:
            return None
        lengths = [info.model.max_model_len_tokens for info in infos]
        if self._max_model_len:
            lengths.append(self._max_model_len)
        return Limits(
            max_model_len=min(lengths),
            vocab_size=min(info.model.vocab_size for info in infos),
            max_logprobs=max_logprobs,
            max_sequences=max_sequences,
        )
