"""From a parsed request to an HTTP response, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator

from starlette.responses import Response
from starlette.types import Receive

from biphase.errors import BiphaseError, InternalError
from biphase.telemetry.events import event_logger
from services.gateway.disconnect import or_disconnect
from services.gateway.frames.choice import Choice
from services.gateway.frames.frames import Frames
from services.gateway.frames.text import DONE, event, to_json
from services.gateway.frames.usage import Usage
from services.gateway.generation import GenerationRun
from services.gateway.http_errors import object_of
from services.gateway.keep_alive import first_of, give_up, kept_alive
from services.gateway.sequence_text import Delta
from services.gateway.sse import EventStream, SlowReaders

log = event_logger(__name__)

_Deltas = AsyncIterator[tuple[Choice, Delta]]


async def whole_answer(run: GenerationRun, frames: Frames, receive: Receive) -> Response:
    """Runs to the end.

    Raises:
        BiphaseError: as the run does, and CancelledError when the client went away.
    """

    async def finish() -> None:
        deltas = run.deltas()
        try:
            async for _ in deltas:
                pass
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]

    await or_disconnect(receive, finish())
    return Response(to_json(frames.whole(run.choices, run.usage)), media_type="application/json")


async def streamed_answer(
    run: GenerationRun, frames: Frames, receive: Receive, readers: SlowReaders, keep_alive_seconds: float
) -> Response:
    """Waits for the first token, so that what fails before it still has its own status, then streams.

    Args:
        keep_alive_seconds: the longest silence; 0: as long as it takes.

    Raises:
        BiphaseError: as the run does before its first token, and CancelledError when the client went away.
    """
    deltas = run.deltas()

    first = await first_of(deltas, receive, keep_alive_seconds)
    events = _events(run, frames, first, deltas)
    return EventStream(kept_alive(events, keep_alive_seconds), readers)


async def _events(
    run: GenerationRun, frames: Frames, first: asyncio.Task[tuple[Choice, Delta] | None], deltas: _Deltas
) -> AsyncGenerator[bytes, None]:
    options = run.generation.answer
    last = b""
    unfinished = len(run.choices)
    try:
        begun = await first
        if begun is not None:
            choice, delta = begun
            # The last part waits for what follows it, so that it all goes out in one write.
            last = _part(run, frames, choice, delta)
            unfinished -= delta.finish_reason is not None
            if unfinished and last:
                yield last
        async for choice, delta in deltas:
            last = _part(run, frames, choice, delta)
            unfinished -= delta.finish_reason is not None
            if unfinished and last:
                yield last
        if options.include_usage:
            last += frames.usage(run.usage)
        yield last + DONE
    except BiphaseError as error:
        yield event(object_of(error)) + DONE
    except (GeneratorExit, KeyboardInterrupt):
        raise
    except Exception:
        log.exception("stream_failed", request_id=run.generation.request_id)
        yield event(object_of(InternalError("Internal server error."))) + DONE
    finally:
        await give_up(first)
        await deltas.aclose()  # type: ignore[attr-defined]


def _part(run: GenerationRun, frames: Frames, choice: Choice, delta: Delta) -> bytes:
    usage = run.usage if run.generation.answer.continuous_usage else None
    if choice.begun:
        return frames.delta(choice, delta, usage)
    choice.begun = True
    before = None
    if usage is not None:
        before = Usage(usage.prompt_tokens, usage.completion_tokens - len(delta.token_ids))
    return frames.begin(choice, before) + frames.delta(choice, delta, usage)
