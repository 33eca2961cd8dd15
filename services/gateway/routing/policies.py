"""The policies: cost (by what is cached where, queues and load), round_robin and least_loaded."""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest

from services.gateway.routing.policy import Decision, NodeView, RouteRequest, RoutingPolicy

# Tokens' worth of KV read from another node per second, as seen by a request: transfer hides under compute.
_FETCH_RATE_FACTOR = 20.0
# A second of work counts as so many of waiting.
_WORK_WEIGHT = 1.25
# Costs that differ by less are equal.
_SAME_SECONDS = 1e-6
# Prefill workers a request is given to try.
MAX_PREFILL_CANDIDATES = 3


def work_tokens(request: RouteRequest, incarnation: str) -> float:
    """What the prompt costs a node, in tokens to compute: reading one counts as a small part of computing it."""
    own, readable = request.num_cached_tokens(incarnation), request.num_fetchable_tokens
    return request.num_tokens - max(own, readable - (readable - own) / _FETCH_RATE_FACTOR)


def prefill_costs_seconds(nodes: Sequence[NodeView], request: RouteRequest) -> list[float]:
    """Computing what is cached nowhere, behind what is queued, and reading what others hold; and a little for having
    been given much lately, so that of nodes that are nearly as good none is chosen for ever.

    Work counts for more than the time it takes, as it keeps the node from others: rather than to compute a second time
    what a node is just computing, a prompt waits for that node a little longer than it would have to elsewhere.
    """
    held, now, num_tokens = request.num_cached_blocks.get, request.now, request.num_tokens
    # Of `work_tokens`, what is the same for all, worked out once.
    size, readable = request.block_size, request.num_fetchable_tokens
    read = readable - readable / _FETCH_RATE_FACTOR
    return [
        (
            num_tokens
            - (own if (own := held(node.incarnation, 0) * size) >= readable else read + own / _FETCH_RATE_FACTOR)
        )
        * node.seconds_per_token
        * _WORK_WEIGHT
        + (node.least_wait_seconds if (wait := node.prefilled_at - now) < node.least_wait_seconds else wait)
        for node in nodes
    ]


def decode_costs_seconds(nodes: Sequence[NodeView], request: RouteRequest) -> list[float]:
    """Load in running and waiting requests and in blocks, and the tokens that must be moved there."""
    held, num_tokens = request.num_cached_blocks.get, request.num_tokens / _FETCH_RATE_FACTOR
    size = request.block_size / _FETCH_RATE_FACTOR
    return [
        node.load_seconds + (num_tokens - held(node.incarnation, 0) * size) * node.seconds_per_token for node in nodes
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
        queues = [node.num_queued_prefill_tokens * node.seconds_per_token for node in prefills]
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
