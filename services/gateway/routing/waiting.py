"""The bounded line of requests that wait for a place, where their order can still be chosen. Pure: no event loop.

Order: streams that lost their worker, then by priority, then shortest uncached prompt first with ageing, so that a
long one is overtaken for a while but never for ever. A prompt that is short enough for decode to prefill between its
steps waits for decode alone: a long one at the head, waiting for a prefill worker, does not hold it up.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from biphase.errors import OverloadedError, UnavailableError
from services.gateway.routing.router import Placement, Router, Ticket

# A waiting prompt gains on shorter ones by so many tokens a second.
AGEING_TOKENS_PER_SECOND = 1000.0


class Waiter:
    """One ticket in the line. `answered` is called once, unless it left before."""

    __slots__ = ("answered", "num_tokens", "ticket")

    def __init__(
        self, ticket: Ticket, num_tokens: int, answered: Callable[[Placement | UnavailableError], None]
    ) -> None:
        self.ticket = ticket
        self.num_tokens = num_tokens
        self.answered: Callable[[Placement | UnavailableError], None] | None = answered


_Entry = tuple[bool, int, float, int, Waiter]


class WaitingLine:
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
        self._waiting_tokens = 0
        self.num_waiting = 0
        router.on_freed = self.wake

    def enter(self, ticket: Ticket, answered: Callable[[Placement | UnavailableError], None]) -> Waiter | None:
        """Answers at once (and returns None), or lets the ticket wait.

        Raises:
            OverloadedError: the line is full.
            UnavailableError: no decode worker could take it.
        """
        if not self._router.has_decode(ticket):
            raise UnavailableError("No decode worker is available.")
        if not self.num_waiting and (placement := self._router.place(ticket)) is not None:
            answered(placement)
            return None
        if self.num_waiting >= self._max_waiting and not ticket.moved:
            raise OverloadedError(
                f"The server is busy: {self.num_waiting} requests are waiting. Try again later.", self._retry_after()
            )
        waiter = Waiter(ticket, self._router.num_uncached_tokens(ticket), answered)
        # Everybody ages alike, so the order of two never changes and a heap will do.
        rank = waiter.num_tokens + ticket.arrival * AGEING_TOKENS_PER_SECOND
        heap = self._short if self._router.fits_decode(waiter.num_tokens) else self._long
        heapq.heappush(heap, (not ticket.moved, ticket.priority, rank, next(self._numbers), waiter))
        self.num_waiting += 1
        self._waiting_tokens += waiter.num_tokens
        self.wake()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Gives up waiting; harmless after the answer."""
        if waiter.answered is not None:
            self._count_out(waiter)

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
        waiter = heap[0][-1]
        if waiter.answered is None:
            heapq.heappop(heap)
            return True
        answer: Placement | UnavailableError | None
        if self._router.has_decode(waiter.ticket):
            answer = self._router.place(waiter.ticket)
        else:
            answer = UnavailableError("No decode worker is available.")
        if answer is None:
            return False
        heapq.heappop(heap)
        answered = waiter.answered
        self._count_out(waiter)
        answered(answer)
        return True

    def _count_out(self, waiter: Waiter) -> None:
        waiter.answered = None
        self.num_waiting -= 1
        self._waiting_tokens -= waiter.num_tokens

    def _retry_after(self) -> float:
        rate = self._prefill_rate()
        return min(60.0, max(1.0, self._waiting_tokens / rate)) if rate else 1.0
