"""Turns the policy's choice into a placement: who may take work now, what each is known to hold, what it is given.

Owns the counts of what this gateway has in flight at each node (they are given back by `Placement`), the hash chains
of prompts, and the log line of every decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from biphase.cache.hashing import extend_block_hashes, root_hash
from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from services.gateway.node import Node
from services.gateway.routing.policies import MAX_PREFILL_CANDIDATES, work_tokens
from services.gateway.routing.policy import Decision, PrefixHolders, RouteRequest, RoutingPolicy
from services.gateway.routing.speculation import SpeculativeHolders

log = event_logger(__name__)

# Steps of work that a prefill worker may have waiting before no more is sent to it.
_BACKLOG_STEPS = 2
# What a node was given counts half as much after about a minute.
_FADE_SECONDS, _FADE = 5.0, 0.944
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
    # Block hashes by namespace and block size, made when first asked for.
    chains: dict[tuple[bytes, int], list[BlockHash]] = field(default_factory=dict)

    def hashes(self, namespace: bytes, block_size: int) -> list[BlockHash]:
        key = (namespace, block_size)
        if key not in self.chains:
            chain: list[BlockHash] = []
            if block_size:
                extend_block_hashes(chain, root_hash(namespace, self.cache_salt), self.token_ids, block_size)
            self.chains[key] = chain
        return self.chains[key]


class Placement:
    """A place given to a ticket. `prefilled` and `release` give back what it counts; only the first call of each does
    anything."""

    def __init__(
        self,
        decode: Node,
        prefills: Sequence[Node],
        decision: Decision,
        num_work_tokens: int,
        freed: Callable[[Node], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.decode = decode
        self.prefills = tuple(prefills)
        self.decision = decision
        self._num_work_tokens = num_work_tokens if prefills else 0
        self._freed = freed
        self._clock = clock
        self._held = True
        self._is_prefilled = False
        decode.give_sequence()
        if prefills:
            prefills[0].give_prefill(self._num_work_tokens, clock())

    def prefilled(self, silent: Collection[str] = ()) -> None:
        """The first token is there: nothing waits at the prefill worker any more.

        Args:
            silent: incarnations of prefill workers that decode heard nothing from; they get no work for a moment.
        """
        if self._is_prefilled:
            return
        # Said again with the last token, it is old: the node may have answered since.
        self._is_prefilled = True
        for node in self.prefills:
            if node.incarnation in silent:
                node.suspend()
        if self._num_work_tokens:
            self.prefills[0].take_prefill_back(self._num_work_tokens, self._clock())
            self._num_work_tokens = 0
            self._freed(self.prefills[0])

    def release(self) -> None:
        if self._held:
            self._held = False
            self.prefilled()
            self.decode.take_sequence_back()
            self._freed(self.decode)


@dataclass(frozen=True, slots=True)
class Detour:
    """No place yet: waiting for this busy node is quicker than any that is free, as it has the prompt's beginning."""

    node: Node
    num_uncached_tokens: int


class WorkerPools(Protocol):
    """Who there is; services.gateway.nodes.NodeDirectory is one."""

    def usable(self, role: str, *, namespace: bytes | None = None) -> list[Node]:
        """Nodes of a role that new work may go to now."""
        ...


class Router:
    """
    Args:
        index: what the index in Redis says; None without one.
        fetches: whether workers read from each other what they lack; without an index they cannot.
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
        fetches: bool = True,
        max_backlog_tokens: int = 0,
        max_busy_local_tokens: int = 0,
        observe: Callable[[Decision], None] = lambda decision: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._directory = directory
        self._policy = policy
        self._speculation = speculation
        self._index = index
        self._fetches = fetches and index is not None
        self._max_backlog_tokens = max_backlog_tokens
        self._max_busy_local_tokens = max_busy_local_tokens
        self._observe = observe
        self._clock = clock
        self._next_fade = 0.0
        # Called whenever a node can take more.
        self.on_freed: Callable[[Node], None] = lambda node: None

    def has_decode(self, ticket: Ticket | None = None) -> bool:
        """Whether any decode worker could take it, full or not."""
        excluded = ticket.excluded if ticket is not None else set()
        return any(node.incarnation not in excluded for node in self._directory.usable("decode"))

    def num_uncached_tokens(self, ticket: Ticket) -> tuple[int, int]:
        """The work this prompt makes, as far as caches are known: in a moment, and now, when some nodes only begin to
        compute what they will hold."""
        num_tokens = len(ticket.token_ids)
        decodes = self._directory.usable("decode")
        if not decodes:
            return num_tokens, num_tokens
        block_size = decodes[0].block_size
        held, fetchable = self._held(ticket, decodes[0].namespace, block_size)
        expected = num_tokens - max(held.values(), default=0) * block_size
        return expected, num_tokens - self._num_present(decodes, held, fetchable) * block_size

    def place(self, ticket: Ticket) -> Placement | Detour | None:
        """A place for the ticket now, or the node it had better wait for; None when all that could take it are full."""
        excluded = ticket.excluded
        decodes = [
            node
            for node in self._directory.usable("decode")
            if node.num_in_flight < node.max_num_seqs and node.incarnation not in excluded
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
        num_tokens = len(ticket.token_ids)
        held, fetchable = self._held(ticket, namespace, block_size)
        request = RouteRequest(
            ticket.request_id,
            num_tokens,
            held,
            block_size,
            fetchable * block_size if self._fetches else 0,
            self._clock(),
        )
        self._fade()
        present = self._num_present(decodes, held, fetchable)
        busy = self._is_quicker_on_decode(prefills, num_tokens - present * block_size)
        if busy:
            prefills = []
        if prefills and not any(map(self.is_ready, prefills)):
            return None
        decision = self._policy.choose(request, [node.view for node in decodes], [node.view for node in prefills])
        chosen = [_node(prefills, prefill) for prefill in decision.prefills]
        if chosen and not self.is_ready(chosen[0]):
            if self._policy.waits_for_best:
                return Detour(chosen[0], round(work_tokens(request, chosen[0].incarnation)))
            ready = [node.view for node in prefills if self.is_ready(node)]
            decision = self._policy.choose(request, [node.view for node in decodes], ready)
            chosen = [_node(prefills, prefill) for prefill in decision.prefills]
        if busy:
            decision = replace(decision, reason=PREFILL_BUSY)
        if len(chosen) < MAX_PREFILL_CANDIDATES:
            chosen += [node for node in prefills if node not in chosen]
        chosen = chosen[:MAX_PREFILL_CANDIDATES]
        decode = _node(decodes, decision.decode)
        self._note(ticket, decode, chosen, decision, namespace, block_size)
        work = round(work_tokens(request, chosen[0].incarnation)) if chosen else 0
        return Placement(decode, chosen, decision, work, self._free, self._clock)

    def _free(self, node: Node) -> None:
        self.on_freed(node)

    def is_ready(self, node: Node) -> bool:
        """Whether more may be sent there ahead."""
        limit = self._max_backlog_tokens or _BACKLOG_STEPS * node.max_num_batched_tokens
        return node.num_prefill_tokens_in_flight < limit

    def fits_decode(self, num_uncached: int) -> bool:
        """Whether a prompt is short enough for decode to prefill it while the prefill pool is busy."""
        return 0 < self._max_busy_local_tokens >= num_uncached

    def _is_quicker_on_decode(self, prefills: Sequence[Node], num_uncached: int) -> bool:
        """Whether a short prompt would wait behind longer ones in the whole prefill pool. A decode worker then computes
        it between its steps: the streams there feel a short prompt little, its own client would feel the wait."""
        if not prefills or not self.fits_decode(num_uncached):
            return False
        return min(node.num_prefill_tokens_in_flight for node in prefills) > num_uncached

    def _held(self, ticket: Ticket, namespace: bytes, block_size: int) -> tuple[Mapping[str, int], int]:
        """Leading blocks by holder, those expected in a moment included, and how many somebody holds already."""
        hashes = ticket.hashes(namespace, block_size)
        expected = self._speculation.num_leading_blocks(hashes)
        if self._index is None:
            return expected, 0
        known = self._index.num_leading_blocks(hashes)
        longest = max(known.values(), default=0)
        if not expected:
            return known, longest
        held = dict(known)
        get = held.get
        held.update([item for item in expected.items() if item[1] > get(item[0], 0)])
        return held, longest

    def _num_present(self, decodes: Sequence[Node], held: Mapping[str, int], fetchable: int) -> int:
        """Leading blocks that a decode worker need not compute. What is only on its way it would compute again."""
        if self._fetches:
            return fetchable
        return max((held.get(node.incarnation, 0) for node in decodes), default=0)

    def _fade(self) -> None:
        """Lets what was given longer ago count for less."""
        now = self._clock()
        if now < self._next_fade:
            return
        self._next_fade = now + _FADE_SECONDS
        for node in self._directory.usable("prefill"):
            node.fade_given(_FADE)

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
        self._speculation.add(hashes, decode.incarnation, *(node.incarnation for node in prefills[:1]))
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


def _node(nodes: Sequence[Node], incarnation: str) -> Node:
    return next(node for node in nodes if node.incarnation == incarnation)
