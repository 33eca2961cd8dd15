"""Where an engine's requests are. Each is in one place at a time, which its status names:

    waiting   WAITING, PREEMPTED         no blocks
    remote    WAITING_FOR_REMOTE_KV      all its blocks, filled from elsewhere; never preempted
    running   RUNNING                    blocks for what it has computed

Owns membership, order and status. Does not own why a request moves (scheduler) nor its blocks (cache/manager).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

from biphase.request import Request, RequestId, RequestStatus
from biphase.scheduler.ranking import Rank


class RankedRequests:
    """Requests sorted by rank, first is most important; equal ranks in order of insertion.

    A preempted request comes back to where its arrival puts it: before everyone who came later.
    """

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self.rank = rank
        self.requests: list[Request] = []

    def __len__(self) -> int:
        return len(self.requests)

    def add(self, request: Request) -> None:
        insort(self.requests, request, key=self.rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self.requests, self.rank(request), key=self.rank)
        while self.requests[index] is not request:
            index += 1
        del self.requests[index]


class RequestPlaces:
    """All unfinished requests of one engine."""

    def __init__(self, rank: Callable[[Request], Rank]) -> None:
        self.requests: dict[RequestId, Request] = {}
        self.waiting = RankedRequests(rank)
        self.running = RankedRequests(rank)
        self.remote: dict[RequestId, Request] = {}

    @property
    def num_active(self) -> int:
        """Requests that have a place in the engine: those that run and those whose KV is on its way."""
        return len(self.running) + len(self.remote)

    def add(self, request: Request) -> None:
        """A new request starts to wait."""
        assert request.request_id not in self.requests, f"{request.request_id} is here already"
        self.requests[request.request_id] = request
        request.status = RequestStatus.WAITING
        self.waiting.add(request)

    def move(self, request: Request, status: RequestStatus) -> None:
        """Moves a request to the place of another, unfinished status."""
        self._leave(request)
        request.status = status
        if status is RequestStatus.RUNNING:
            self.running.add(request)
        elif status is RequestStatus.WAITING_FOR_REMOTE_KV:
            self.remote[request.request_id] = request
        else:
            self.waiting.add(request)

    def remove(self, request: Request, status: RequestStatus) -> None:
        """A request ends, with a finished status."""
        self._leave(request)
        request.status = status
        del self.requests[request.request_id]

    def _leave(self, request: Request) -> None:
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.status is RequestStatus.WAITING_FOR_REMOTE_KV:
            del self.remote[request.request_id]
        else:
            self.waiting.remove(request)

    def check_integrity(self) -> None:
        """Asserts that every request is in exactly the place of its status, and in order."""
        places = [
            (self.waiting.requests, (RequestStatus.WAITING, RequestStatus.PREEMPTED)),
            (list(self.remote.values()), (RequestStatus.WAITING_FOR_REMOTE_KV,)),
            (self.running.requests, (RequestStatus.RUNNING,)),
        ]
        for requests, statuses in places:
            for request in requests:
                assert request.status in statuses, f"{request.request_id} is {request.status} in the wrong place"
                assert self.requests[request.request_id] is request
        assert sum(len(requests) for requests, _ in places) == len(self.requests)
        for ranked in (self.waiting, self.running):
            ranks = [ranked.rank(request) for request in ranked.requests]
            assert ranks == sorted(ranks), "out of order"
