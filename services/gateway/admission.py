"""The bounded queue in front of the workers: requests wait here, where their order can still be chosen.

Order: streams that lost their worker, then by priority, then shortest uncached prompt first with ageing, so that a
long one is overtaken for a while but never for ever.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Callable

from biphase.errors import OverloadedError, UnavailableError
from services.gateway.routing.router import Placement, Router, Ticket

# A waiting prompt gains on shorter ones by so many tokens a second.
AGEING_TOKENS_PER_SECOND = 1000.0


class AdmissionQueue:
    """
    Args:
        max_waiting: more are refused with OverloadedError.
        prefill_rate: tokens per second of all workers together, for the advice when to come back; 0: unknown.
    """

    def __init__(self, router: Router, *, max_waiting: int, prefill_rate: Callable[[], float] = lambda: 0.0) -> None:
        self._router = router
        self._max_waiting = max_waiting
        self._prefill_rate = prefill_rate
        self._heap: list[tuple[bool, int, float, int, Ticket, asyncio.Future[Placement]]] = []
        self._numbers = itertools.count()
        self._num_waiting = 0
        self._waiting_tokens = 0
        router.on_freed = self.wake

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def admit(self, ticket: Ticket) -> Placement:
        """Waits for a place.

        Raises:
            OverloadedError: the queue is full.
            UnavailableError: no decode worker could take it.
        """
        if not self._router.has_decode(ticket):
            raise UnavailableError("No decode worker is available.")
        if not self._num_waiting and (placement := self._router.place(ticket)) is not None:
            return placement
        if self._num_waiting >= self._max_waiting and not ticket.moved:
            raise OverloadedError(
                f"The server is busy: {self._num_waiting} requests are waiting. Try again later.", self._retry_after()
            )
        size = self._router.num_uncached_tokens(ticket)
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        # Everybody ages alike, so the order of two never changes and a heap will do.
        rank = size + ticket.arrival * AGEING_TOKENS_PER_SECOND
        heapq.heappush(self._heap, (not ticket.moved, ticket.priority, rank, next(self._numbers), ticket, future))
        self._num_waiting += 1
        self._waiting_tokens += size
        self.wake()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                # The place came in the same moment as the cancellation.
                future.result().release()
            raise
        finally:
            self._num_waiting -= 1
            self._waiting_tokens -= size

    def wake(self) -> None:
        """Gives out places while there are any. Called when one becomes free or a node changes."""
        while self._heap:
            *_, ticket, future = self._heap[0]
            if future.done():
                heapq.heappop(self._heap)
                continue
            if not self._router.has_decode(ticket):
                heapq.heappop(self._heap)
                future.set_exception(UnavailableError("No decode worker is available."))
                continue
            placement = self._router.place(ticket)
            if placement is None:
                return
            heapq.heappop(self._heap)
            future.set_result(placement)

    def _retry_after(self) -> float:
        rate = self._prefill_rate()
        return min(60.0, max(1.0, self._waiting_tokens / rate)) if rate else 1.0
