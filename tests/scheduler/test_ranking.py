"""Orders among requests."""

from __future__ import annotations

from biphase.request import Request, RequestId, SamplingParams
from biphase.scheduler.places import RankedRequests
from biphase.scheduler.ranking import rank_by_arrival, rank_by_priority, shortest_first


def request(name: str, arrival: float, priority: int = 0, uncached: int = 0) -> Request:
    made = Request(RequestId(name), [1] * max(1, uncached), SamplingParams(), priority=priority, arrival_time=arrival)
    made.num_uncached_tokens = uncached
    return made


def names(requests: list[Request]) -> str:
    return "".join(r.request_id for r in requests)


def test_by_arrival_and_by_priority() -> None:
    some = [request("a", 3.0), request("b", 1.0, priority=1), request("c", 2.0), request("d", 2.0, priority=-1)]
    for rank, order in ((rank_by_arrival, "bcda"), (rank_by_priority, "dcab")):
        ranked = RankedRequests(rank)
        for r in some:
            ranked.add(r)
        assert names(ranked.requests) == order


def test_equal_ranks_keep_their_order_and_are_told_apart() -> None:
    ranked = RankedRequests(rank_by_arrival)
    some = [request(name, 1.0) for name in "abcd"]
    for r in some:
        ranked.add(r)
    ranked.remove(some[2])
    ranked.remove(some[0])
    assert names(ranked.requests) == "bd"


def test_shortest_first_counts_what_is_left() -> None:
    started = request("s", 0.0, uncached=1000)
    started.num_computed_tokens, started.last_scheduled_time = 950, 10.0
    some = [request("a", 10.0, uncached=100), started, request("c", 10.0, uncached=30)]
    assert names(shortest_first(some, 5.0, now=10.0)) == "csa"


def test_shortest_first_within_priority() -> None:
    some = [request("a", 0.0, priority=1, uncached=1), request("b", 0.0, uncached=500)]
    assert names(shortest_first(some, 5.0, now=0.0)) == "ba"


def test_age_beats_length_and_service_resets_it() -> None:
    long, short = request("l", 0.0, uncached=4000), request("s", 4.9, uncached=64)
    assert names(shortest_first([long, short], 5.0, now=4.9)) == "sl"
    assert names(shortest_first([long, short], 5.0, now=5.0)) == "ls"
    long.last_scheduled_time = 5.0
    assert names(shortest_first([long, short], 5.0, now=5.1)) == "sl"


def test_the_aged_go_by_arrival() -> None:
    some = [request("a", 2.0, uncached=10), request("b", 1.0, uncached=9000)]
    assert names(shortest_first(some, 5.0, now=100.0)) == "ba"
