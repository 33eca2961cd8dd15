"""The bounded queue in front of the workers: requests wait here, where their order can still be chosen.

Order: streams that lost their worker, then by priority, then shortest uncached prompt first with ageing, so that a
long one is overtaken for a while but never for ever. A prompt that is short enough for decode to prefill between its
steps waits for decode alone: a long one at the head, waiting for a prefill worker, does not hold it up.
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


_Entry = tuple[bool, int, float, int, Ticket, asyncio.Future[Placement]]


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
        self._long: list[_Entry] = []
        self._short: list[_Entry] = []
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
        heap = self._short if self._router.fits_decode(size) else self._long
        heapq.heappush(heap, (not ticket.moved, ticket.priority, rank, next(self._numbers), ticket, future))
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
        open_heaps = [heap for heap in (self._short, self._long) if heap]
        while open_heaps:
            heap = min(open_heaps, key=lambda entries: entries[0][:4])
            if not self._serve_head(heap):
                open_heaps.remove(heap)
            open_heaps = [entries for entries in open_heaps if entries]

    def _serve_head(self, heap: list[_Entry]) -> bool:
        """Whether the first of the heap is off it."""
        *_, ticket, future = heap[0]
        if not future.done():
            if not self._router.has_decode(ticket):
                future.set_exception(UnavailableError("No decode worker is available."))
            elif (placement := self._router.place(ticket)) is not None:
                future.set_result(placement)
            else:
                return False
        heapq.heappop(heap)
        return True

    def _retry_after(self) -> float:
        rate = self._prefill_rate()
        return min(60.0, max(1.0, self._waiting_tokens / rate)) if rate else 1.0
