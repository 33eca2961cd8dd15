"""Who comes first: the orders among requests, as pure functions.

Does not own who fits (manager), nor where requests are kept (places).
"""

from __future__ import annotations

from biphase.request import Request

Rank = tuple[int, float]


def rank_by_arrival(request: Request) -> Rank:
    return (0, request.arrival_time)


def rank_by_priority(request: Request) -> Rank:
    return (request.priority, request.arrival_time)


def shortest_first(requests: list[Request], ageing_seconds: float, now: float) -> list[Request]:
    """Sorts prompts by priority, then by the tokens they have left to compute, discounted by how long they got none.

    The discount grows evenly to everything at `ageing_seconds`: then a prompt of any length stands before every fresh
    one, gets its chunk, and starts to age anew. So long prompts advance by a chunk every `ageing_seconds` at least,
    and short ones wait for one chunk at most now and then.
    """

    def key(request: Request) -> tuple[int, float, float]:
        if request.num_computed_tokens:
            left = request.num_tokens - request.num_computed_tokens
        else:
            left = request.num_uncached_tokens
        since = request.arrival_time if request.last_scheduled_time is None else request.last_scheduled_time
        waited = now - since
        return (request.priority, left * max(0.0, 1.0 - waited / ageing_seconds), request.arrival_time)

    return sorted(requests, key=key)
