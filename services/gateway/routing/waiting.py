"""The bounded line of requests that wait for a place, where their order can still be chosen. Pure: no event loop.

Order: streams that lost their worker, then by priority, then shortest uncached prompt first with ageing, so that a
long one is overtaken for a while but never for ever. A prompt that is short enough for decode to prefill between its
steps waits for decode alone: a long one at the head, waiting for a prefill worker, does not hold it up. A prompt whose
beginning a busy worker has, so that waiting for that one is quicker than any other, stands aside and holds up nobody.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from biphase.errors import OverloadedError, UnavailableError
from services.gateway.node import Node
from services.gateway.routing.router import Detour, Placement, Router, Ticket

# A waiting prompt gains on shorter ones by so many tokens a second.
AGEING_TOKENS_PER_SECOND = 1000.0


class Waiter:
    """One ticket in the line. `answered` is called once, unless it left before."""

    __slots__ = ("answered", "is_short", "num_tokens", "ticket", "waits_for")

    def __init__(
        self,
        ticket: Ticket,
        num_tokens: int,
        is_short: bool,
        answered: Callable[[Placement | UnavailableError], None],
    ) -> None:
        self.ticket = ticket
        self.num_tokens = num_tokens
        # Decode can take it whatever the prefill pool does.
        self.is_short = is_short
        self.answered: Callable[[Placement | UnavailableError], None] | None = answered
        # Set while it stands aside.
        self.waits_for: Detour | None = None


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
        self._aside: dict[Node, list[_Entry]] = {}
        self._numbers = itertools.count()
        self._waiting_tokens = 0
        self.num_waiting = 0
        router.on_freed = self._freed

    @property
    def num_waiting_tokens(self) -> int:
        return self._waiting_tokens

    def enter(self, ticket: Ticket, answered: Callable[[Placement | UnavailableError], None]) -> Waiter | None:
        """Answers at once (and returns None), or lets the ticket wait.

        Raises:
            OverloadedError: the line is full.
            UnavailableError: no decode worker could take it.
        """
        if not self._router.has_decode(ticket):
            raise UnavailableError("No decode worker is available.")
        if not self._long and not self._short and isinstance(placement := self._router.place(ticket), Placement):
            answered(placement)
            return None
        if self.num_waiting >= self._max_waiting and not ticket.moved:
            raise OverloadedError(
                f"The server is busy: {self.num_waiting} requests are waiting. Try again later.", self._retry_after()
            )
        num_tokens, num_tokens_now = self._router.num_uncached_tokens(ticket)
        waiter = Waiter(ticket, num_tokens, self._router.fits_decode(num_tokens_now), answered)
        # Everybody ages alike, so the order of two never changes and a heap will do.
        rank = waiter.num_tokens + ticket.arrival * AGEING_TOKENS_PER_SECOND
        heapq.heappush(self._heap(waiter), (not ticket.moved, ticket.priority, rank, next(self._numbers), waiter))
        self.num_waiting += 1
        self._waiting_tokens += waiter.num_tokens
        self._serve()
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Gives up waiting; harmless after the answer."""
        if waiter.answered is not None:
            self._count_out(waiter)

    def wake(self) -> None:
        """Gives out places while there are any. Called when a node comes, goes or changes."""
        for entries in self._aside.values():
            for entry in entries:
                self._step_back(entry)
        self._aside.clear()
        self._serve()

    def _freed(self, node: Node) -> None:
        """A node can take more: first those who wait for it and no other, then the line."""
        entries = self._aside.get(node)
        while entries and self._router.is_ready(node):
            self._step_back(heapq.heappop(entries))
            self._serve()
        if entries is not None and not entries:
            self._aside.pop(node, None)
        self._serve()

    def _step_back(self, entry: _Entry) -> None:
        """From aside into the line."""
        waiter = entry[-1]
        self._forget(waiter)
        if waiter.answered is not None:
            heapq.heappush(self._heap(waiter), entry)

    def _serve(self) -> None:
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
        answer: Placement | Detour | UnavailableError | None
        if self._router.has_decode(waiter.ticket):
            answer = self._router.place(waiter.ticket)
        else:
            answer = UnavailableError("No decode worker is available.")
        if answer is None:
            return False
        entry = heapq.heappop(heap)
        if isinstance(answer, Detour):
            waiter.waits_for = answer
            answer.node.expect_prefill(answer.num_uncached_tokens)
            heapq.heappush(self._aside.setdefault(answer.node, []), entry)
            return True
        answered = waiter.answered
        self._count_out(waiter)
        answered(answer)
        return True

    def _heap(self, waiter: Waiter) -> list[_Entry]:
        return self._short if waiter.is_short else self._long

    def _forget(self, waiter: Waiter) -> None:
        if waiter.waits_for is not None:
            waiter.waits_for.node.expect_prefill(-waiter.waits_for.num_uncached_tokens)
            waiter.waits_for = None

    def _count_out(self, waiter: Waiter) -> None:
        waiter.answered = None
        self._forget(waiter)
        self.num_waiting -= 1
        self._waiting_tokens -= waiter.num_tokens

    def _retry_after(self) -> float:
        rate = self._prefill_rate()
        return min(60.0, max(1.0, self._waiting_tokens / rate)) if rate else 1.0
