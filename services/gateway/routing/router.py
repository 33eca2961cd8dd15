"""Turns the policy's choice into a placement: who may take work now, what each is known to hold, what it is given.

Owns the counts of what this gateway has in flight at each node (they are given back by `Placement`), the hash chains
of prompts, and the log line of every decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from biphase.cache.hashing import extend_block_hashes, root_hash
from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from services.gateway.nodes import Node, NodeDirectory
from services.gateway.routing.policy import Decision, NodeView, PrefixHolders, RouteRequest, RoutingPolicy
from services.gateway.routing.speculation import SpeculativeHolders

log = event_logger(__name__)

# Steps of work that a prefill worker may have waiting before no more is sent to it.
_BACKLOG_STEPS = 2
# Decision.reason, and with it RequestReport.reason, of a prompt that decode prefills as no prefill worker was free.
PREFILL_BUSY = "prefill_busy"


@dataclass(slots=True, eq=False)
class Ticket:
    """One sequence that wants a place; kept over retries."""

    request_id: str
    token_ids: Sequence[int]
    cache_salt: str
    priority: int = 0
    # Prefer this node (the other choices of the same prompt are there).
    preferred: str = ""
    # Nodes that failed it, by incarnation.
    excluded: set[str] = field(default_factory=set)
    arrival: float = field(default_factory=time.monotonic)
    # A stream that lost its worker goes before what has not begun.
    moved: bool = False
    _hashes: dict[tuple[bytes, int], list[BlockHash]] = field(default_factory=dict)

    def hashes(self, namespace: bytes, block_size: int) -> list[BlockHash]:
        key = (namespace, block_size)
        if key not in self._hashes:
            chain: list[BlockHash] = []
            if block_size:
                extend_block_hashes(chain, root_hash(namespace, self.cache_salt), self.token_ids, block_size)
            self._hashes[key] = chain
        return self._hashes[key]


class Placement:
    """A place given to a ticket. `prefilled` and `release` give back what it counts; both may be called twice."""

    def __init__(
        self, decode: Node, prefills: Sequence[Node], decision: Decision, num_uncached: int, freed: Callable[[], None]
    ) -> None:
        self.decode = decode
        self.prefills = tuple(prefills)
        self.decision = decision
        self._num_uncached = num_uncached if prefills else 0
        self._freed = freed
        self._held = True
        decode.num_in_flight += 1
        if prefills:
            prefills[0].num_prefill_tokens_in_flight += self._num_uncached

    def prefilled(self) -> None:
        """The first token is there: nothing waits at the prefill worker any more."""
        if self._num_uncached:
            first = self.prefills[0]
            first.num_prefill_tokens_in_flight = max(0, first.num_prefill_tokens_in_flight - self._num_uncached)
            self._num_uncached = 0
            self._freed()

    def release(self) -> None:
        if self._held:
            self._held = False
            self.prefilled()
            self.decode.num_in_flight -= 1
            self._freed()


class Router:
    """
    Args:
        index: what the index in Redis says; None without one.
        max_backlog_tokens: uncached tokens sent ahead to one prefill worker; 0 takes two of its steps.
        max_busy_local_tokens: prompts with so many uncached tokens at most go to decode alone when all prefill workers
            have more than that to do.
    """

    def __init__(
        self,
        directory: NodeDirectory,
        policy: RoutingPolicy,
        *,
        speculation: SpeculativeHolders,
        index: PrefixHolders | None = None,
        max_backlog_tokens: int = 0,
        max_busy_local_tokens: int = 0,
        observe: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._speculation = speculation
        self._index = index
        self._max_backlog_tokens = max_backlog_tokens
        self._max_busy_local_tokens = max_busy_local_tokens
        self._observe = observe
        # Called whenever a place becomes free.
        self.on_freed: Callable[[], None] = lambda: None

    def has_decode(self, ticket: Ticket | None = None) -> bool:
        """Whether any decode worker could take it, full or not."""
        excluded = ticket.excluded if ticket is not None else set()
        return any(node.incarnation not in excluded for node in self._directory.usable("decode"))

    def num_uncached_tokens(self, ticket: Ticket) -> int:
        """The work this prompt makes, as far as caches are known."""
        for node in self._directory.usable("decode"):
            held = self._held(ticket, node.namespace, node.block_size)
            return len(ticket.token_ids) - max(held.values(), default=0) * node.block_size
        return len(ticket.token_ids)

    def place(self, ticket: Ticket) -> Placement | None:
        """A place for the ticket now, or None when everything that could take it is full."""
        decodes = [
            node
            for node in self._directory.usable("decode")
            if node.incarnation not in ticket.excluded and node.num_in_flight < _max_sequences(node)
        ]
        if not decodes:
            return None
        if ticket.preferred:
            decodes = [node for node in decodes if node.incarnation == ticket.preferred] or decodes
        # Workers of several versions side by side: one choice is made among nodes of one namespace.
        namespace = decodes[0].namespace
        decodes = [node for node in decodes if node.namespace == namespace]
        block_size = decodes[0].block_size
        prefills = self._directory.usable("prefill", namespace=namespace)
        held = self._held(ticket, namespace, block_size)
        num_tokens = len(ticket.token_ids)
        busy = self._is_quicker_on_decode(prefills, num_tokens - max(held.values(), default=0) * block_size)
        if busy:
            prefills = []
        ready = [node for node in prefills if node.num_prefill_tokens_in_flight < self._backlog_limit(node)]
        if prefills and not ready:
            return None
        request = RouteRequest(ticket.request_id, num_tokens, max(held.values(), default=0) * block_size)
        decision = self._policy.choose(
            request,
            [_view(node, held, block_size) for node in decodes],
            [_view(node, held, block_size) for node in ready],
        )
        if busy:
            decision = replace(decision, reason=PREFILL_BUSY)
        decode = next(node for node in decodes if node.node_id == decision.decode_id)
        by_id = {node.node_id: node for node in ready}
        chosen = [by_id[node_id] for node_id in decision.prefill_ids]
        chosen += [node for node in prefills if node not in chosen]
        self._note(ticket, decode, chosen, decision, namespace, block_size)
        best = max((held.get(node.incarnation, 0) for node in (decode, *chosen[:1])), default=0) * block_size
        return Placement(decode, chosen[:3], decision, max(0, num_tokens - best), lambda: self.on_freed())

    def fits_decode(self, num_uncached: int) -> bool:
        """Whether a prompt is short enough for decode to prefill it while the prefill pool is busy."""
        return num_uncached <= self._max_busy_local_tokens

    def _is_quicker_on_decode(self, prefills: Sequence[Node], num_uncached: int) -> bool:
        """Whether a short prompt would wait behind longer ones in the whole prefill pool. A decode worker then computes
        it between its steps: the streams there feel a short prompt little, its own client would feel the wait."""
        if not prefills or not self.fits_decode(num_uncached):
            return False
        return min(node.num_prefill_tokens_in_flight for node in prefills) > num_uncached

    def _backlog_limit(self, node: Node) -> int:
        steps = node.info.max_num_batched_tokens if node.info is not None else 0
        return self._max_backlog_tokens or _BACKLOG_STEPS * max(steps, 1)

    def _held(self, ticket: Ticket, namespace: bytes, block_size: int) -> Mapping[str, int]:
        hashes = ticket.hashes(namespace, block_size)
        expected = self._speculation.num_leading_blocks(hashes)
        if self._index is None:
            return expected
        known = self._index.num_leading_blocks(hashes)
        return {holder: max(expected.get(holder, 0), known.get(holder, 0)) for holder in {*expected, *known}}

    def _note(
        self,
        ticket: Ticket,
        decode: Node,
        prefills: Sequence[Node],
        decision: Decision,
        namespace: bytes,
        block_size: int,
    ) -> None:
        hashes = ticket.hashes(namespace, block_size)
        self._speculation.add(decode.incarnation, hashes)
        if prefills:
            self._speculation.add(prefills[0].incarnation, hashes)
        self._observe(decision)
        log.info(
            "routed",
            request_id=ticket.request_id,
            policy=self._policy.name,
            reason=decision.reason,
            decode=decode.node_id,
            prefill=",".join(node.node_id for node in prefills[:3]) or "none",
            num_tokens=len(ticket.token_ids),
            waited_seconds=round(time.monotonic() - ticket.arrival, 4),
            **{name: round(value, 4) for name, value in decision.numbers.items()},
        )


def _max_sequences(node: Node) -> int:
    return (node.info.max_num_seqs if node.info is not None else 0) or 1


def _view(node: Node, held: Mapping[str, int], block_size: int) -> NodeView:
    status = node.status
    running = status.num_running + status.num_waiting_for_remote_kv
    return NodeView(
        node_id=node.node_id,
        # The status is up to a second old; what this gateway gave since then counts too.
        num_running=max(running, node.num_in_flight),
        num_waiting=status.num_waiting,
        used_block_share=status.num_used_blocks / status.num_blocks if status.num_blocks else 0.0,
        num_queued_prefill_tokens=max(status.num_queued_prefill_tokens, node.num_prefill_tokens_in_flight),
        prefill_tokens_per_second=status.prefill_tokens_per_second,
        num_cached_tokens=held.get(node.incarnation, 0) * block_size,
    )
