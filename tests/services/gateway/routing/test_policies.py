from __future__ import annotations

from collections import Counter

import pytest

from services.gateway.routing.policies import policy_named, prefill_costs_seconds
from services.gateway.routing.policy import NodeView, RouteRequest


def node(name: str, **fields: float) -> NodeView:
    values: dict[str, float] = {"prefill_tokens_per_second": 1000.0}
    return NodeView(name, **(values | fields))  # type: ignore[arg-type]


REQUEST = RouteRequest("r", 1000)


@pytest.mark.parametrize("name", ["cost", "round_robin", "least_loaded"])
def test_equal_nodes_get_equal_shares(name: str) -> None:
    policy = policy_named(name)
    decodes, prefills = [node(f"d{i}") for i in range(3)], [node(f"p{i}") for i in range(2)]
    decisions = [policy.choose(REQUEST, decodes, prefills) for _ in range(60)]
    assert set(Counter(decision.decode for decision in decisions).values()) == {20}
    assert set(Counter(decision.prefills[0] for decision in decisions).values()) == {30}
    assert all(len(decision.prefills) == 2 for decision in decisions)


@pytest.mark.parametrize("name", ["cost", "round_robin", "least_loaded"])
def test_without_prefill_workers_decode_is_on_its_own(name: str) -> None:
    assert policy_named(name).choose(REQUEST, [node("d")], []).prefills == ()


def test_cost_goes_where_the_prefix_is() -> None:
    policy = policy_named("cost")
    for _ in range(3):
        request = RouteRequest("r", 1000, {"p1": 9}, 100)
        decision = policy.choose(request, [node("d")], [node("p0"), node("p1")])
        assert decision.prefills == ("p1", "p0") and decision.reason == "cached"
        # A tenth of a second, and as it is work a quarter more.
        assert decision.numbers["prefill_cost_seconds"] == pytest.approx(0.125)


def test_cost_leaves_a_prefix_whose_holder_is_too_busy() -> None:
    busy = node("p1", num_queued_prefill_tokens=5000)
    request = RouteRequest("r", 1000, {"p1": 9}, 100)
    assert policy_named("cost").choose(request, [node("d")], [node("p0"), busy]).prefills[0] == "p0"


def test_what_others_hold_is_read_and_not_computed() -> None:
    (fetched,) = prefill_costs_seconds([node("p")], RouteRequest("r", 1000, {"store": 8}, 100, 800))
    (computed,) = prefill_costs_seconds([node("p")], REQUEST)
    (own,) = prefill_costs_seconds([node("p")], RouteRequest("r", 1000, {"p": 8}, 100, 800))
    assert own == pytest.approx(0.25) and computed == pytest.approx(1.25)
    assert own < fetched < computed


def test_cost_counts_speed_and_load() -> None:
    policy = policy_named("cost")
    prefills = [node("slow", prefill_tokens_per_second=500.0), node("fast", prefill_tokens_per_second=4000.0)]
    decodes = [node("full", used_block_share=0.95), node("running", num_running=20), node("idle", num_running=2)]
    decision = policy.choose(REQUEST, decodes, prefills)
    assert (decision.decode, decision.prefills[0]) == ("idle", "fast")


def test_least_loaded_does_not_look_at_caches() -> None:
    decision = policy_named("least_loaded").choose(
        RouteRequest("r", 1000, {"p0": 10}, 100),
        [node("d0", num_running=1), node("d1", num_waiting=3)],
        [node("p0", num_queued_prefill_tokens=10), node("p1")],
    )
    assert (decision.decode, decision.prefills[0]) == ("d0", "p1")
