"""The events of a background response: followed while it runs, and read again later from any gateway.

Owns their numbering (the n-th event has sequence number n) and the ways to read them: from the run itself where it is
this process's own, from the store while another gateway runs it or once it has ended, and from the response as it
stands when its events were never told one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

from services.gateway.frames.output_items import replayed
from services.gateway.frames.responses import event_bytes
from services.gateway.response_store import ResponseStore

RUNNING = ("queued", "in_progress")
_POLL_SECONDS = 0.2


class EventLog:
    """What one response that runs here has told so far. For one event loop."""

    def __init__(self, store: ResponseStore, response_id: str) -> None:
        self._store = store
        self._response_id = response_id
        self._events: list[bytes] = []
        self._num_stored = 0
        # The last attempt to store failed, or was cut short: it may have been carried out or not.
        self._is_uncertain = False
        self._storing = asyncio.Lock()
        self._is_over = False
        self._changed = asyncio.Event()

    def append(self, events: bytes) -> None:
        """
        Args:
            events: any number of them, as they are sent.
        """
        self._events.extend(_split(events))
        self._wake()

    async def flush(self, *, is_last: bool = False) -> None:
        """Stores what is new, for other gateways and for later. What fails is made up for by the next one.

        Args:
            is_last: none will follow, so that events which cannot be stored are kept here.
        """
        async with self._storing:
            anew = self._is_uncertain
            events = list(self._events) if anew else self._events[self._num_stored :]
            if not events:
                return
            num_events = len(self._events)
            self._is_uncertain = True
            if await self._store.append_events(self._response_id, events, anew=anew):
                self._num_stored, self._is_uncertain = num_events, False
            elif is_last:
                self._store.keep_events_here(self._response_id, self._events)

    def close(self) -> None:
        """No more will come."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """The events from the start-th on, as they come, until the last one."""
        while True:
            changed = self._changed
            if new := self._events[start:]:
                start += len(new)
                yield b"".join(new)
            elif self._is_over:
                return
            else:
                await changed.wait()


async def stored_events(store: ResponseStore, response_id: str, owner: str, start: int) -> AsyncGenerator[bytes, None]:
    """The same for a response that another gateway runs, or that has ended."""
    while True:
        record = await store.get(response_id, owner)
        is_over = record is None or record.response["status"] not in RUNNING
        # Asked for after the status: what ended it is told before it is said to have ended.
        new = await store.events(response_id, start)
        if new:
            start += len(new)
            yield b"".join(new)
        if is_over:
            return
        await asyncio.sleep(_POLL_SECONDS)


async def replayed_events(response: dict[str, Any], start: int) -> AsyncGenerator[bytes, None]:
    """The events of a response that has ended and was not streamed, each part of it in one piece."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "completed_at": None, "error": None}
    begun["incomplete_details"] = None
    last = response["status"] if response["status"] in ("completed", "failed") else "incomplete"
    told = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        *replayed(response["output"]),
        (f"response.{last}", {"response": response}),
    ]
    yield b"".join(event_bytes(event, number) for number, event in enumerate(told) if number >= start)


def _split(events: bytes) -> list[bytes]:
    """JSON holds no line ends, so an empty line always ends an event."""
    return [event + b"\n\n" for event in events.split(b"\n\n")[:-1]]
