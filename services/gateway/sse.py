"""Server-sent events to one client: written as they come, with bounded buffers, ended when nobody reads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from biphase.errors import UnavailableError
from biphase.telemetry.events import event_logger
from services.gateway.disconnect import wait_disconnect
from services.gateway.frames.text import DONE, event
from services.gateway.http_errors import object_of

log = event_logger(__name__)

MEDIA_TYPE = "text/event-stream; charset=utf-8"


class SlowReaders:
    """Ends streams whose client has taken nothing for a while; until then their senders wait, and hold back the work.

    A look over all streams now and then costs less than a timer for each write.
    """

    def __init__(self, limit_seconds: float) -> None:
        self._limit_seconds = limit_seconds
        # Stream's task -> when the write that it waits for began.
        self.writing: dict[asyncio.Future[None], float] = {}

    async def run(self) -> None:
        while True:
            await asyncio.sleep(min(5.0, self._limit_seconds / 4))
            now = time.monotonic()
            for task, since in list(self.writing.items()):
                if since and now - since > self._limit_seconds:
                    log.warning("slow_reader", seconds=now - since)
                    task.cancel()


class EventStream(Response):
    """
    Args:
        events: the bytes to send, each part in one write. Closed in any case.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], readers: SlowReaders, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status_code=200, headers=dict(headers or {}))
        self.headers["content-type"] = MEDIA_TYPE
        self.headers["cache-control"] = "no-cache"
        # Proxies such as nginx gather answers into large pieces unless told not to.
        self.headers["x-accel-buffering"] = "no"
        if "content-length" in self.headers:
            del self.headers["content-length"]
        self._events = events
        self._readers = readers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        pump = asyncio.ensure_future(self._pump(send))
        watch = asyncio.ensure_future(wait_disconnect(receive))
        try:
            await asyncio.wait({pump, watch}, return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            # The server stops and its patience is over; the client is told, since the stream looks healthy so far.
            await self._close(pump, watch)
            error = UnavailableError("The server is shutting down.")
            await send({"type": "http.response.body", "body": event(object_of(error)) + DONE, "more_body": False})
            raise
        await self._close(pump, watch)
        if not pump.cancelled() and (failure := pump.exception()) is not None:
            raise failure

    async def _close(self, pump: asyncio.Future[None], watch: asyncio.Future[None]) -> None:
        for task in (pump, watch):
            task.cancel()
        await asyncio.wait({pump, watch})
        self._readers.writing.pop(pump, None)
        await self._events.aclose()

    async def _pump(self, send: Send) -> None:
        task = asyncio.current_task()
        assert task is not None
        writing = self._readers.writing
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for part in self._events:
            writing[task] = time.monotonic()
            await send({"type": "http.response.body", "body": part, "more_body": True})
            writing[task] = 0.0
        await send({"type": "http.response.body", "body": b"", "more_body": False})
