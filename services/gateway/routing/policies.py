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
# Prefill workers a request is given to try.
MAX_PREFILL_CANDIDATES = 3


def prefill_cost_seconds(node: NodeView, request: RouteRequest) -> float:
    """Computing what is cached nowhere, behind what is queued, and reading what others hold."""
    cached = request.num_cached_tokens.get(node.incarnation, 0)
    fetched = request.num_fetchable_tokens - cached
    rate = node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE
    if fetched <= 0:
        return (request.num_tokens - cached + node.num_queued_prefill_tokens) / rate
    uncached = request.num_tokens - request.num_fetchable_tokens
    return (uncached + node.num_queued_prefill_tokens + fetched / _FETCH_RATE_FACTOR) / rate


def decode_cost_seconds(node: NodeView, request: RouteRequest) -> float:
    """Load in running and waiting requests and in blocks, and the tokens that must be moved there."""
    moved = request.num_tokens - request.num_cached_tokens.get(node.incarnation, 0)
    rate = node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE
    return (
        node.num_running * _RUNNING_SECONDS
        + node.num_waiting * _WAITING_SECONDS
        # A pool that is nearly full will preempt; half full is no reason to avoid it.
        + node.used_block_share**4 * _FULL_POOL_SECONDS
        + moved / (rate * _FETCH_RATE_FACTOR)
    )


class _Spread:
    """Orders nodes by cost. Equals: by what they were given so far, then in turn, so that each gets its share."""

    def __init__(self) -> None:
        self._turn = 0

    def cheapest(self, nodes: Sequence[NodeView], costs: Sequence[float], count: int) -> list[int]:
        """Places of the `count` cheapest, cheapest first."""
        self._turn += 1
        turn, total = self._turn, len(nodes)
        ranks = [
            (round(cost, 6), node.num_tokens_given, (place - turn) % total, place)
            for place, (node, cost) in enumerate(zip(nodes, costs, strict=True))
        ]
        if count == 1:
            return [min(ranks)[-1]]
        return [rank[-1] for rank in nsmallest(count, ranks)]


class CostPolicy:
    """Cheapest decode worker, then prefill workers by cost; see DESIGN section 6 of the project's design."""

    name = "cost"

    def __init__(self) -> None:
        self._decode_ties, self._prefill_ties = _Spread(), _Spread()

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        cached = request.num_cached_tokens
        decode_costs = [decode_cost_seconds(node, request) for node in decodes]
        (best,) = self._decode_ties.cheapest(decodes, decode_costs, 1)
        decode = decodes[best].incarnation
        numbers = {"decode_cost_seconds": decode_costs[best], "decode_cached_tokens": cached.get(decode, 0)}
        if not prefills:
            return Decision(decode, (), "no_prefill_worker", numbers)
        prefill_costs = [prefill_cost_seconds(node, request) for node in prefills]
        order = self._prefill_ties.cheapest(prefills, prefill_costs, MAX_PREFILL_CANDIDATES)
        chosen = tuple(prefills[place].incarnation for place in order)
        numbers |= {
            "prefill_cost_seconds": prefill_costs[order[0]],
            "prefill_cached_tokens": cached.get(chosen[0], 0),
            "fetchable_tokens": request.num_fetchable_tokens,
        }
        if len(order) > 1:
            numbers["next_prefill_cost_seconds"] = prefill_costs[order[1]]
        return Decision(decode, chosen, "cached" if chosen[0] in cached else "cheapest", numbers)


class RoundRobinPolicy:
    """Each in turn, whatever its load."""

    name = "round_robin"

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

    def __init__(self) -> None:
        self._decode_ties, self._prefill_ties = _Spread(), _Spread()

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        loads = [float(node.num_running + node.num_waiting) for node in decodes]
        (best,) = self._decode_ties.cheapest(decodes, loads, 1)
        queues = [
            node.num_queued_prefill_tokens / (node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE)
            for node in prefills
        ]
        order = self._prefill_ties.cheapest(prefills, queues, MAX_PREFILL_CANDIDATES)
        chosen = tuple(prefills[place].incarnation for place in order)
        return Decision(decodes[best].incarnation, chosen, "least_loaded", {"decode_load": loads[best]})


def policy_named(name: str) -> RoutingPolicy:
    policies: dict[str, type[CostPolicy] | type[RoundRobinPolicy] | type[LeastLoadedPolicy]] = {
        "cost": CostPolicy,
        "round_robin": RoundRobinPolicy,
        "least_loaded": LeastLoadedPolicy,
    }
    return policies[name]()
