"""Turns the policy's choice into a placement: who may take work now, what each is known to hold, what it is given.

Owns the counts of what this gateway has in flight at each node (they are given back by `Placement`), the hash chains
of prompts, and the log line of every decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from biphase.cache.hashing import extend_block_hashes, root_hash
from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from services.gateway.node import Node
from services.gateway.routing.policies import MAX_PREFILL_CANDIDATES
from services.gateway.routing.policy import Decision, PrefixHolders, RouteRequest, RoutingPolicy
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
        decode.give_sequence()
        if prefills:
            prefills[0].give_prefill(self._num_uncached)

    def prefilled(self) -> None:
        """The first token is there: nothing waits at the prefill worker any more."""
        if self._num_uncached:
            self.prefills[0].take_prefill_back(self._num_uncached)
            self._num_uncached = 0
            self._freed()

    def release(self) -> None:
        if self._held:
            self._held = False
            self.prefilled()
            self.decode.take_sequence_back()
            self._freed()


class WorkerPools(Protocol):
    """Who there is; services.gateway.nodes.NodeDirectory is one."""

    def usable(self, role: str, *, namespace: bytes | None = None) -> list[Node]:
        """Nodes of a role that new work may go to now."""
        ...


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
        directory: WorkerPools,
        policy: RoutingPolicy,
        *,
        speculation: SpeculativeHolders,
        index: PrefixHolders | None = None,
        max_backlog_tokens: int = 0,
        max_busy_local_tokens: int = 0,
        observe: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._speculation = speculation
        self._index = index
        self._max_backlog_tokens = max_backlog_tokens
        self._max_busy_local_tokens = max_busy_local_tokens
        self._observe = observe
        self._clock = clock
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
            if node.incarnation not in ticket.excluded and node.num_in_flight < node.max_num_seqs
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
        cached = {holder: min(length * block_size, num_tokens) for holder, length in held.items()}
        request = RouteRequest(ticket.request_id, num_tokens, cached, max(cached.values(), default=0))
        decision = self._policy.choose(request, [node.view for node in decodes], [node.view for node in ready])
        if busy:
            decision = replace(decision, reason=PREFILL_BUSY)
        decode = next(node for node in decodes if node.incarnation == decision.decode)
        chosen = [next(node for node in ready if node.incarnation == prefill) for prefill in decision.prefills]
        if len(chosen) < MAX_PREFILL_CANDIDATES:
            chosen += [node for node in prefills if node not in chosen]
        self._note(ticket, decode, chosen, decision, namespace, block_size)
        best = max((held.get(node.incarnation, 0) for node in (decode, *chosen[:1])), default=0) * block_size
        return Placement(
            decode, chosen[:MAX_PREFILL_CANDIDATES], decision, max(0, num_tokens - best), lambda: self.on_freed()
        )

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
        return self._max_backlog_tokens or _BACKLOG_STEPS * node.max_num_batched_tokens

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
            prefill=",".join(node.node_id for node in prefills[:MAX_PREFILL_CANDIDATES]) or "none",
            num_tokens=len(ticket.token_ids),
            waited_seconds=round(self._clock() - ticket.arrival, 4),
            **{name: round(value, 4) for name, value in decision.numbers.items()},
        )
