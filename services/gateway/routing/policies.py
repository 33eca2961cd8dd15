"""The policies: cost (by what is cached where, queues and load), round_robin and least_loaded."""

from __future__ import annotations

from collections.abc import Sequence

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


def _rate(node: NodeView) -> float:
    return node.prefill_tokens_per_second or _DEFAULT_PREFILL_RATE


def prefill_cost_seconds(node: NodeView, request: RouteRequest) -> float:
    """Computing what is cached nowhere, behind what is queued, and reading what others hold."""
    cached = min(node.num_cached_tokens, request.num_tokens)
    fetched = max(0, min(request.num_fetchable_tokens, request.num_tokens) - cached)
    rate = _rate(node)
    uncached = request.num_tokens - cached - fetched
    return (uncached + node.num_queued_prefill_tokens) / rate + fetched / (rate * _FETCH_RATE_FACTOR)


def decode_cost_seconds(node: NodeView, request: RouteRequest) -> float:
    """Load in running and waiting requests and in blocks, and the tokens that must be moved there."""
    moved = request.num_tokens - min(node.num_cached_tokens, request.num_tokens)
    share = node.used_block_share
    return (
        node.num_running * _RUNNING_SECONDS
        + node.num_waiting * _WAITING_SECONDS
        # A pool that is nearly full will preempt; half full is no reason to avoid it.
        + share**4 * _FULL_POOL_SECONDS
        + moved / (_rate(node) * _FETCH_RATE_FACTOR)
    )


class _Spread:
    """Breaks ties in turn, so that equal nodes get equal shares."""

    def __init__(self) -> None:
        self._turn = 0

    def ordered(self, nodes: Sequence[NodeView], costs: Sequence[float]) -> list[int]:
        """Places of `nodes`, cheapest first."""
        self._turn += 1
        count = len(nodes)
        return sorted(range(count), key=lambda place: (round(costs[place], 6), (place - self._turn) % count))


class CostPolicy:
    """Cheapest decode worker, then prefill workers by cost; see DESIGN section 6 of the project's design."""

    name = "cost"

    def __init__(self) -> None:
        self._decode_ties, self._prefill_ties = _Spread(), _Spread()

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        decode_costs = [decode_cost_seconds(node, request) for node in decodes]
        best = self._decode_ties.ordered(decodes, decode_costs)[0]
        numbers = {"decode_cost_seconds": decode_costs[best], "decode_cached_tokens": decodes[best].num_cached_tokens}
        if not prefills:
            return Decision(decodes[best].node_id, (), "no_prefill_worker", numbers)
        prefill_costs = [prefill_cost_seconds(node, request) for node in prefills]
        order = self._prefill_ties.ordered(prefills, prefill_costs)
        first = order[0]
        numbers |= {
            "prefill_cost_seconds": prefill_costs[first],
            "prefill_cached_tokens": prefills[first].num_cached_tokens,
            "fetchable_tokens": request.num_fetchable_tokens,
        }
        others = [cost for place, cost in enumerate(prefill_costs) if place != first]
        if others:
            numbers["next_prefill_cost_seconds"] = min(others)
        reason = "cached" if prefills[first].num_cached_tokens else "cheapest"
        chosen = tuple(prefills[place].node_id for place in order[:MAX_PREFILL_CANDIDATES])
        return Decision(decodes[best].node_id, chosen, reason, numbers)


class RoundRobinPolicy:
    """Each in turn, whatever its load."""

    name = "round_robin"

    def __init__(self) -> None:
        self._turn = -1

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        self._turn += 1
        turned = [prefills[(self._turn + place) % len(prefills)].node_id for place in range(len(prefills))]
        decode = decodes[self._turn % len(decodes)].node_id
        return Decision(decode, tuple(turned[:MAX_PREFILL_CANDIDATES]), "round_robin")


class LeastLoadedPolicy:
    """Fewest sequences on decode, shortest queue on prefill; caches do not count."""

    name = "least_loaded"

    def __init__(self) -> None:
        self._decode_ties, self._prefill_ties = _Spread(), _Spread()

    def choose(self, request: RouteRequest, decodes: Sequence[NodeView], prefills: Sequence[NodeView]) -> Decision:
        loads = [float(node.num_running + node.num_waiting) for node in decodes]
        best = self._decode_ties.ordered(decodes, loads)[0]
        queues = [node.num_queued_prefill_tokens / _rate(node) for node in prefills]
        order = self._prefill_ties.ordered(prefills, queues)
        chosen = tuple(prefills[place].node_id for place in order[:MAX_PREFILL_CANDIDATES])
        return Decision(decodes[best].node_id, chosen, "least_loaded", {"decode_load": loads[best]})


def policy_named(name: str) -> RoutingPolicy:
    policies: dict[str, type[CostPolicy] | type[RoundRobinPolicy] | type[LeastLoadedPolicy]] = {
        "cost": CostPolicy,
        "round_robin": RoundRobinPolicy,
        "least_loaded": LeastLoadedPolicy,
    }
    return policies[name]()
