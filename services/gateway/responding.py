"""Runs a response: whole, streamed or in the background; and stores what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.responses import Response
from starlette.types import Receive

from biphase.errors import BiphaseError, InternalError, OverloadedError, UnavailableError
from biphase.telemetry.events import event_logger
from services.gateway.disconnect import or_disconnect
from services.gateway.frames.choice import Choice
from services.gateway.frames.responses import ResponseFrames
from services.gateway.frames.text import to_json
from services.gateway.generation import GenerationRun
from services.gateway.keep_alive import first_of, give_up, kept_alive
from services.gateway.key_file import KeyGrant
from services.gateway.rate_limits import RateLimits
from services.gateway.response_events import EventLog
from services.gateway.response_store import ResponseStore, StoredResponse
from services.gateway.sequence_text import Delta
from services.gateway.sse import EventStream, SlowReaders

log = event_logger(__name__)

_MAX_BACKGROUND = 256
# How soon a background response learns that another gateway was asked to cancel it.
_CANCEL_POLL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Keeping:
    """Where the finished response goes; `store` is None when the client wants it forgotten."""

    store: ResponseStore | None
    input: list[dict[str, Any]]
    history: list[dict[str, Any]]
    owner: str

    async def keep(self, response: dict[str, Any]) -> None:
        if self.store is not None:
            await self.store.put(StoredResponse(response, self.input, self.history, self.owner))


# The last events of a response, and the response.
_End: TypeAlias = tuple[bytes, dict[str, Any]]


async def _generated(run: GenerationRun, frames: ResponseFrames, told: EventLog | None = None) -> _End:
    deltas = run.deltas()
    try:
        async for _, delta in deltas:
            events = frames.push(delta)
            if told is not None:
                told.append(events)
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]
    # Nothing is waited for from here on: whoever finds the task cancelled knows that the frames have no end yet.
    return frames.end(run.usage)


async def _complete(run: GenerationRun, frames: ResponseFrames, keeping: Keeping) -> dict[str, Any]:
    _, response = await _generated(run, frames)
    await keeping.keep(response)
    return response


async def _given_up(work: asyncio.Task[_End], end: Callable[[], _End]) -> _End:
    """Cancels the work, and gives `end` in its place; or what has come of it, where that was quicker."""
    work.cancel()
    await asyncio.wait([work])
    return end() if work.cancelled() or work.exception() is not None else work.result()


async def _end(keeping: Keeping, told: EventLog | None, events: bytes, response: dict[str, Any]) -> None:
    """Stores the last events before the response itself: whoever sees that it has ended finds all of them."""
    if told is not None:
        told.append(events)
        await told.flush(is_last=True)
    await keeping.keep(response)


async def whole_response(run: GenerationRun, frames: ResponseFrames, keeping: Keeping, receive: Receive) -> Response:
    """
    Raises:
        BiphaseError: as the run does, and CancelledError when the client went away.
    """
    response = await or_disconnect(receive, _complete(run, frames, keeping))
    return Response(to_json(response), media_type="application/json")


async def streamed_response(
    run: GenerationRun,
    frames: ResponseFrames,
    keeping: Keeping,
    receive: Receive,
    readers: SlowReaders,
    keep_alive_seconds: float,
) -> Response:
    """Waits for the first token, so that what fails before it still has its own status, then streams.

    Args:
        keep_alive_seconds: the longest silence; 0: as long as it takes.

    Raises:
        BiphaseError: as the run does before its first token, and CancelledError when the client went away.
    """
    deltas = run.deltas()

    first = await first_of(deltas, receive, keep_alive_seconds)
    events = _events(run, frames, keeping, first, deltas)
    return EventStream(kept_alive(events, keep_alive_seconds), readers)


async def _events(
    run: GenerationRun,
    frames: ResponseFrames,
    keeping: Keeping,
    first: asyncio.Task[tuple[Choice, Delta] | None],
    deltas: AsyncIterator[tuple[Choice, Delta]],
) -> AsyncGenerator[bytes, None]:
    try:
        begun = await first
        yield frames.begin() + (frames.push(begun[1]) if begun is not None else b"")
        async for _, delta in deltas:
            if events := frames.push(delta):
                yield events
        events, response = frames.end(run.usage)
        # Stored before its end is told: the next request may name it at once.
        await keeping.keep(response)
        yield events
    except BiphaseError as error:
        events, response = frames.fail(error)
        await keeping.keep(response)
        yield events
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except Exception:
        log.exception("stream_failed", request_id=run.generation.request_id)
        events, response = frames.fail(InternalError("Internal server error."))
        yield events
    finally:
        await give_up(first)
        await deltas.aclose()  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True)
class _Running:
    task: asyncio.Task[None]
    # None when it was not asked to be streamed.
    told: EventLog | None


class BackgroundResponses:
    """Responses that go on whether somebody waits for them or not. For one event loop."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._running: dict[str, _Running] = {}

    async def start(
        self, run: GenerationRun, frames: ResponseFrames, keeping: Keeping, grant: KeyGrant
    ) -> dict[str, Any]:
        """Begins it and returns the response as it is now. Its events are kept if the request asks for a stream.

        Raises:
            OverloadedError: too many of them are running.
        """
        if len(self._running) >= _MAX_BACKGROUND:
            raise OverloadedError(f"{_MAX_BACKGROUND} background responses are running. Try again later.", 5.0)
        store, response_id = keeping.store, run.generation.response_id
        assert store is not None
        response = frames.with_status("queued")
        kept = frames.with_status("in_progress")
        told = EventLog(store, response_id) if run.generation.answer.stream else None
        if told is not None:
            told.append(frames.begin())
            await told.flush()
        await keeping.keep(kept)
        task = asyncio.create_task(self._run(run, frames, keeping, grant, told))
        self._running[response_id] = _Running(task, told)
        task.add_done_callback(lambda _: self._running.pop(response_id, None))
        return response

    @property
    def running_ids(self) -> list[str]:
        return list(self._running)

    def events(self, response_id: str) -> EventLog | None:
        """What a response that is running here tells."""
        running = self._running.get(response_id)
        return None if running is None else running.told

    async def close(self) -> None:
        tasks = [running.task for running in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, run: GenerationRun, frames: ResponseFrames, keeping: Keeping, grant: KeyGrant, told: EventLog | None
    ) -> None:
        work = asyncio.create_task(_generated(run, frames, told))
        try:
            is_shut_down = False
            try:
                end = await _watched(work, run.generation.response_id, frames, keeping, told)
            except BiphaseError as error:
                end = frames.fail(error)
            except asyncio.CancelledError:
                is_shut_down = True
                end = await _given_up(work, lambda: frames.fail(UnavailableError("The server was shut down.")))
            except Exception:
                log.exception("background_failed", request_id=run.generation.request_id)
                end = frames.fail(InternalError("Internal server error."))
            # It has one end, which is stored whole whatever comes meanwhile.
            storing = asyncio.create_task(_end(keeping, told, *end))
            try:
                await asyncio.shield(storing)
            except asyncio.CancelledError:
                is_shut_down = True
                await asyncio.wait([storing])
            except Exception:
                log.exception("background_not_stored", request_id=run.generation.request_id)
            if is_shut_down:
                raise asyncio.CancelledError
        finally:
            if told is not None:
                told.close()
            await self._limits.debit(grant, run.usage.completion_tokens)


async def _watched(
    work: asyncio.Task[_End], response_id: str, frames: ResponseFrames, keeping: Keeping, told: EventLog | None
) -> _End:
    """What comes of the work, or of being asked to cancel it. Stores its events meanwhile.

    Raises:
        BiphaseError: as the work does.
    """
    assert keeping.store is not None
    while not work.done():
        await asyncio.wait([work], timeout=_CANCEL_POLL_SECONDS)
        if told is not None and not work.done():
            await told.flush()
        # Looked at again after each wait: what has ended cannot be cancelled.
        if not work.done() and await keeping.store.is_cancel_asked(response_id) and not work.done():
            return await _given_up(work, frames.cancel)
    return work.result()
