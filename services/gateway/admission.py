"""Admission: lets a request wait for a place, as long as it wants to. The order is routing/waiting.py's."""

from __future__ import annotations

import asyncio

from biphase.errors import UnavailableError
from services.gateway.routing.router import Placement, Ticket
from services.gateway.routing.waiting import WaitingLine


class AdmissionQueue:
    """The waiting line for one event loop."""

    def __init__(self, line: WaitingLine) -> None:
        self._line = line

    @property
    def num_waiting(self) -> int:
        return self._line.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Uncached prompt tokens of those that wait."""
        return self._line.num_waiting_tokens

    def wake(self) -> None:
        """A node changed: looks whether somebody can go on."""
        self._line.wake()

    async def admit(self, ticket: Ticket) -> Placement:
        """Waits for a place.

        Raises:
            OverloadedError: too many wait.
            UnavailableError: no decode worker could take it.
        """
        future: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()

        def answered(answer: Placement | UnavailableError) -> None:
            if isinstance(answer, Placement):
                if future.done():
                    # Given up in this very moment.
                    answer.release()
                else:
                    future.set_result(answer)
            elif not future.done():
                future.set_exception(answer)

        waiter = self._line.enter(ticket, answered)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                # The place came in the same moment as the cancellation.
                future.result().release()
            raise
        finally:
            if waiter is not None:
                self._line.leave(waiter)
