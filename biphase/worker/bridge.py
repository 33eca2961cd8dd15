"""From the engine's thread to the event loop: many events of one step, one wake-up of the loop.

The engine calls a request's sink in its own thread. Waking an event loop costs a system call, so events that come
before the loop runs again share the wake-up.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque

from biphase.engine import EngineEvent

EventQueue = asyncio.Queue[EngineEvent]


class EngineBridge:
    """`post` from any thread; each event arrives in its queue, in order, on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._pending: deque[tuple[EventQueue, EngineEvent]] = deque()
        self._lock = threading.Lock()
        self._wake_scheduled = False

    def post(self, queue: EventQueue, event: EngineEvent) -> None:
        with self._lock:
            self._pending.append((queue, event))
            if self._wake_scheduled:
                return
            self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._deliver)
        except RuntimeError:
            # The loop is closed: the process is going down, and nobody waits for this event any more.
            return

    def _deliver(self) -> None:
        with self._lock:
            events = list(self._pending)
            self._pending.clear()
            self._wake_scheduled = False
        for queue, event in events:
            queue.put_nowait(event)
