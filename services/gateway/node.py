"""One worker process as this gateway sees it: who it is, how it is, and what this gateway has given it.

Pure state. Who asks the process, and when, is nodes.py. The numbers that routing reads at every decision are kept in
`view`, up to date at all times, so that a choice among hundreds of workers copies nothing.
"""

from __future__ import annotations

import math

from biphase.rpc.v1 import node_pb2
from services.gateway.routing.policy import NodeView

# So many probes may fail before a node gets no new work.
TOLERATED_PROBES = 2


class Node:
    """`info` is None until the process has answered once."""

    __slots__ = (
        "_failed_probes",
        "_info",
        "_leaving",
        "_refused",
        "_status",
        "address",
        "block_size",
        "family",
        "incarnation",
        "is_ready",
        "is_unlisted",
        "max_num_batched_tokens",
        "max_num_seqs",
        "namespace",
        "node_id",
        "num_in_flight",
        "num_prefill_tokens_in_flight",
        "num_prefill_tokens_waiting",
        "role",
        "suspended_until",
        "view",
    )

    def __init__(
        self, address: str, info: node_pb2.NodeInfo | None = None, status: node_pb2.NodeStatus | None = None
    ) -> None:
        self.address = address
        # What is asked of every node at every decision, kept when one of the next five changes.
        self.is_ready = False
        self._failed_probes = 0
        self._refused = ""
        self._leaving = False
        self._info: node_pb2.NodeInfo | None = None
        self._status = node_pb2.NodeStatus()
        self.suspended_until = 0.0
        # Whether the registry has forgotten it, while it answers.
        self.is_unlisted = False
        # Sequences this gateway has running there, and their uncached prompt tokens still to be computed there.
        self.num_in_flight = 0
        self.num_prefill_tokens_in_flight = 0
        # Of prompts that wait in this gateway for this node and no other, since it has their beginning.
        self.num_prefill_tokens_waiting = 0
        self.view = NodeView("")
        self.info = info
        self.status = status or node_pb2.NodeStatus()

    @property
    def info(self) -> node_pb2.NodeInfo | None:
        return self._info

    @info.setter
    def info(self, info: node_pb2.NodeInfo | None) -> None:
        self._info = info
        known = info or node_pb2.NodeInfo()
        self.node_id = known.node_id
        self.role = known.role
        self.incarnation = known.incarnation
        self.namespace = known.layout.namespace
        # Equal where nodes can read each other's blocks, however these are cut.
        self.family = known.layout.family or known.layout.namespace
        self.block_size = known.layout.block_size_tokens
        self.max_num_seqs = known.max_num_seqs or 1
        self.max_num_batched_tokens = known.max_num_batched_tokens or 1
        self.view.incarnation = known.incarnation
        self._judge()

    @property
    def status(self) -> node_pb2.NodeStatus:
        return self._status

    @status.setter
    def status(self, status: node_pb2.NodeStatus) -> None:
        self._status = status
        view = self.view
        view.num_waiting = status.num_waiting
        view.used_block_share = status.num_used_blocks / status.num_blocks if status.num_blocks else 0.0
        view.prefill_tokens_per_second = status.prefill_tokens_per_second
        self._count()
        self._judge()

    @property
    def failed_probes(self) -> int:
        """In a row."""
        return self._failed_probes

    @failed_probes.setter
    def failed_probes(self, count: int) -> None:
        self._failed_probes = count
        self._judge()

    @property
    def refused(self) -> str:
        """Why it gets no work whatever its state; "" when there is no reason."""
        return self._refused

    @refused.setter
    def refused(self, reason: str) -> None:
        self._refused = reason
        self._judge()

    @property
    def leaving(self) -> bool:
        """The registry says that it is on its way out."""
        return self._leaving

    @leaving.setter
    def leaving(self, leaving: bool) -> None:
        self._leaving = leaving
        self._judge()

    def _judge(self) -> None:
        self.is_ready = self._info is not None and self.state == "ready"

    def _count(self) -> None:
        # The status is up to a second old; what this gateway gave since then counts too.
        status, view = self._status, self.view
        view.num_running = max(status.num_running + status.num_waiting_for_remote_kv, self.num_in_flight)
        view.num_prefill_tokens_in_flight = self.num_prefill_tokens_in_flight
        view.num_queued_prefill_tokens = (
            max(status.num_queued_prefill_tokens, self.num_prefill_tokens_in_flight) + self.num_prefill_tokens_waiting
        )
        view.weigh()

    def give_sequence(self) -> None:
        """One more sequence of this gateway runs there."""
        self.num_in_flight += 1
        self._count()

    def take_sequence_back(self) -> None:
        self.num_in_flight -= 1
        self._count()

    def give_prefill(self, num_tokens: int, now: float = 0.0) -> None:
        """So many uncached prompt tokens more are to be computed there."""
        if not self.num_prefill_tokens_in_flight:
            self.view.prefill_since = now
        self.num_prefill_tokens_in_flight += num_tokens
        self.view.num_tokens_given += num_tokens
        self._count()

    def take_prefill_back(self, num_tokens: int, now: float = 0.0) -> None:
        self.view.prefill_since = now
        self.num_prefill_tokens_in_flight = max(0, self.num_prefill_tokens_in_flight - num_tokens)
        self._count()

    def fade_given(self, share: float) -> None:
        """Lets what it was given count for less."""
        self.view.num_tokens_given *= share
        self._count()

    def expect_prefill(self, num_tokens: int) -> None:
        """A prompt waits here for this node, with so many uncached tokens; negative: not any more."""
        self.num_prefill_tokens_waiting += num_tokens
        self._count()

    def forget_prefill(self) -> None:
        """Another life of the process: nothing that was given waits there."""
        self.num_prefill_tokens_in_flight = 0
        self._count()

    @property
    def state(self) -> str:
        if self._info is None or self.failed_probes > TOLERATED_PROBES:
            return "unreachable"
        if self.refused:
            return "refused"
        return "draining" if self.leaving else self._status.state or "starting"

    def is_usable(self, now: float) -> bool:
        """Whether new work may go there."""
        return self.is_ready and now >= self.suspended_until

    def suspend(self) -> None:
        """A call to it failed: leave it alone until it has answered a probe."""
        self.suspended_until = math.inf
        self.failed_probes = max(self.failed_probes, 1)
