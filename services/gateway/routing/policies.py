"""The policies: cost (by what is cached where, queues and load), round_robin and least_loaded."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from services.gateway.routing.policy import Decision, NodeView, RouteRequest, RoutingPolicy

# Before a node has measured itself. Only ratios between nodes matter then, and these are equal for all.
_DEFAULT_PREFILL_RATE = 2000.0
# Tokens' worth of KV read from another node per second, as seen by a request: transfer hides under compute.
_FETCH_RATE_FACTOR = 20.0
# What one more running sequence costs a decode worker, and a full block pool, in seconds.
_RUNNING_SECONDS = 0.002
_WAITING_SECONDS = 0.05
_FULL_POOL_SECONDS = 2.0
# Costs that differ by less are equal.
_SAME_SECONDS = 1e-6
# Prefill workers a request is given to try.
MAX_PREFILL_CANDIDATES = 3


def prefill_costs_seconds(nodes: Sequence[NodeView], request: RouteRequest) -> list[float]:
    """Computing what is cached nowhere, behind what is queued, and reading what others hold."""
    held, size, fetchable = request.num_cached_blocks.get, request.block_size, request.num_fetchable_tokens
    if not fetchable:
        num_tokens = request.num_tokens
        return [
            (num_tokens - held(node.incarnation, 0) * size + node.num_queued_prefill_tokens)
            / (node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE)
            for node in nodes
        ]
    # Nobody holds more than what can be fetched.
    work = request.num_tokens - fetchable + fetchable / _FETCH_RATE_FACTOR
    own = size / _FETCH_RATE_FACTOR
    return [
        (work - held(node.incarnation, 0) * own + node.num_queued_prefill_tokens)
        / (node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE)
        for node in nodes
    ]


def decode_costs_seconds(nodes: Sequence[NodeView], request: RouteRequest) -> list[float]:
    """Load in running and waiting requests and in blocks, and the tokens that must be moved there."""
    held, size, num_tokens = request.num_cached_blocks.get, request.block_size, request.num_tokens
    return [
        node.num_running * _RUNNING_SECONDS
        + node.num_waiting * _WAITING_SECONDS
        # A pool that is nearly full will preempt; half full is no reason to avoid it.
        + node.used_block_share**4 * _FULL_POOL_SECONDS
        + (num_tokens - held(node.incarnation, 0) * size)
        / ((node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE) * _FETCH_RATE_FACTOR)
        for node in nodes
    ]


class _Spread:
    """Orders nodes by cost. Equals: by what they were given so far, then in turn, so that each gets its share."""

    def __init__(self) -> None:
        self._turn = 0

    def cheapest(self, nodes: Sequence[NodeView], costs: Sequence[float]) -> int:
        """Place of the cheapest."""
        self._turn += 1
        turn, total = self._turn, len(nodes)
        limit = min(costs) + _SAME_SECONDS
        equals = [place for place, cost in enumerate(costs) if cost <= limit]
        if len(equals) == 1:
            return equals[0]
        return min(equals, key=lambda place: (nodes[place].num_tokens_given, (place - turn) % total))

    def candidates(self, nodes: Sequence[NodeView], costs: Sequence[float]) -> list[int]:
        """Places of the few cheapest, cheapest first."""
        if not nodes:
            return []
        first = self.cheapest(nodes, costs)
        few = nsmallest(MAX_PREFILL_CANDIDATES, range(len(nodes)), key=costs.__getitem__)
        return [first, *(place for place in few if place != first)][:MAX_PREFILL_CANDIDATES]


class CostPolicy:
    """Cheapest decode worker, then prefill workers by cost; see DESIGN section 6 of the project's design."""

    name = "cost"
    waits_for_best = True

    def __init__(self) -> None:
        self._decode_ties, self._prefill_ties = _Spread(), _Spread()

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        decode_costs = decode_costs_seconds(decodes, request)
        best = self._decode_ties.cheapest(decodes, decode_costs)
        decode = decodes[best].incarnation
        numbers = {
            "decode_cost_seconds": decode_costs[best],
            "decode_cached_tokens": request.num_cached_tokens(decode),
        }
        if not prefills:
            return Decision(decode, (), "no_prefill_worker", numbers)
        prefill_costs = prefill_costs_seconds(prefills, request)
        order = self._prefill_ties.candidates(prefills, prefill_costs)
        chosen = tuple(prefills[place].incarnation for place in order)
        numbers |= {
            "prefill_cost_seconds": prefill_costs[order[0]],
            "prefill_cached_tokens": request.num_cached_tokens(chosen[0]),
            "fetchable_tokens": request.num_fetchable_tokens,
        }
        if len(order) > 1:
            numbers["next_prefill_cost_seconds"] = prefill_costs[order[1]]
        reason = "cached" if numbers["prefill_cached_tokens"] else "cheapest"
        return Decision(decode, chosen, reason, numbers)


class RoundRobinPolicy:
    """Each in turn, whatever its load."""

    name = "round_robin"
    waits_for_best = False

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        self._turn += 1
        count = min(len(prefills), MAX_PREFILL_CANDIDATES)
        chosen = tuple(prefills[(self._turn + place) % len(prefills)].incarnation for place in range(count))
        return Decision(decodes[self._turn % len(decodes)].incarnation, chosen, "round_robin")


class LeastLoadedPolicy:
    """Fewest sequences on decode, shortest queue on prefill; caches do not count."""

    name = "least_loaded"
    waits_for_best = False

    def __init__(self) -> None:
        self._decode_ties, self._prefill_ties = _Spread(), _Spread()

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        loads = [float(node.num_running + node.num_waiting) for node in decodes]
        best = self._decode_ties.cheapest(decodes, loads)
        queues = [
            node.num_queued_prefill_tokens / (node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE)
            for node in prefills
        ]
        order = self._prefill_ties.candidates(prefills, queues)
        chosen = tuple(prefills[place].incarnation for place in order)
        return Decision(decodes[best].incarnation, chosen, "least_loaded", {"decode_load": loads[best]})


def policy_named(name: str) -> RoutingPolicy:
    policies: dict[str, type[CostPolicy] | type[RoundRobinPolicy] | type[LeastLoadedPolicy]] = {
        "cost": CostPolicy,
        "round_robin": RoundRobinPolicy,
        "least_loaded": LeastLoadedPolicy,
    }
    return policies[name]()
