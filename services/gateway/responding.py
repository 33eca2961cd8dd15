"""Runs a response: whole, streamed or in the background; and stores what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from starlette.responses import Response
from starlette.types import Receive

from biphase.errors import BiphaseError, InternalError, OverloadedError, UnavailableError
from biphase.telemetry.events import event_logger
from services.gateway.disconnect import or_disconnect
from services.gateway.frames.responses import ResponseFrames
from services.gateway.frames.text import to_json
from services.gateway.generation import GenerationRun
from services.gateway.key_file import KeyGrant
from services.gateway.rate_limits import RateLimits
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


async def _complete(run: GenerationRun, frames: ResponseFrames, keeping: Keeping) -> dict[str, Any]:
    deltas = run.deltas()
    try:
        async for _, delta in deltas:
            frames.push(delta)
    finally:
        await deltas.aclose()  # type: ignore[attr-defined]
    _, response = frames.end(run.usage)
    await keeping.keep(response)
    return response


async def whole_response(run: GenerationRun, frames: ResponseFrames, keeping: Keeping, receive: Receive) -> Response:
    """
    Raises:
        BiphaseError: as the run does, and CancelledError when the client went away.
    """
    response = await or_disconnect(receive, _complete(run, frames, keeping))
    return Response(to_json(response), media_type="application/json")


async def streamed_response(
    run: GenerationRun, frames: ResponseFrames, keeping: Keeping, receive: Receive, readers: SlowReaders
) -> Response:
    """Waits for the first token, so that what fails before it still has its own status, then streams.

    Raises:
        BiphaseError: as the run does before its first token, and CancelledError when the client went away.
    """
    deltas = run.deltas()

    async def first_delta() -> Delta | None:
        async for _, delta in deltas:
            return delta
        return None

    try:
        first = await or_disconnect(receive, first_delta())
    except BaseException:
        await deltas.aclose()  # type: ignore[attr-defined]
        raise
    return EventStream(_events(run, frames, keeping, first, deltas), readers)


async def _events(
    run: GenerationRun, frames: ResponseFrames, keeping: Keeping, first: Delta | None, deltas: AsyncIterator[Any]
) -> AsyncGenerator[bytes, None]:
    try:
        yield frames.begin() + (frames.push(first) if first is not None else b"")
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
        await deltas.aclose()  # type: ignore[attr-defined]


class BackgroundResponses:
    """Responses that nobody waits for. For one event loop."""

    def __init__(self, limits: RateLimits) -> None:
        self._limits = limits
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def start(
        self, run: GenerationRun, frames: ResponseFrames, keeping: Keeping, grant: KeyGrant
    ) -> dict[str, Any]:
        """Begins it and returns the response as it is now.

        Raises:
            OverloadedError: too many of them are running.
        """
        if len(self._tasks) >= _MAX_BACKGROUND:
            raise OverloadedError(f"{_MAX_BACKGROUND} background responses are running. Try again later.", 5.0)
        response = frames.with_status("queued")
        await keeping.keep(frames.with_status("in_progress"))
        response_id = run.generation.response_id
        task = asyncio.create_task(self._run(run, frames, keeping, grant))
        self._tasks[response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(response_id, None))
        return response

    async def close(self) -> None:
        for task in list(self._tasks.values()):
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _run(self, run: GenerationRun, frames: ResponseFrames, keeping: Keeping, grant: KeyGrant) -> None:
        work = asyncio.ensure_future(_complete(run, frames, keeping))
        store, response_id = keeping.store, run.generation.response_id
        assert store is not None
        try:
            while not work.done():
                await asyncio.wait([work], timeout=_CANCEL_POLL_SECONDS)
                if not work.done() and await store.is_cancel_asked(response_id):
                    work.cancel()
                    await asyncio.wait([work])
                    await keeping.keep(frames.with_status("cancelled"))
                    return
            await work
        except BiphaseError as error:
            await keeping.keep(frames.fail(error)[1])
        except asyncio.CancelledError:
            work.cancel()
            await asyncio.wait([work])
            await keeping.keep(frames.fail(UnavailableError("The server was shut down."))[1])
            raise
        except Exception:
            log.exception("background_failed", request_id=run.generation.request_id)
            await keeping.keep(frames.fail(InternalError("Internal server error."))[1])
        finally:
            await self._limits.debit(grant, run.usage.completion_tokens)
