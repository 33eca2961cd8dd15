"""Streams with nothing to say for a while: a comment now and then keeps proxies from ending them.

Off unless asked for: a stream that waits for its first token is begun before that, and so answers 200 whatever comes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from starlette.types import Receive

from services.gateway.disconnect import or_disconnect

T = TypeVar("T")

COMMENT = b": keep-alive\n\n"


async def first_of(items: AsyncIterator[T], receive: Receive, patience_seconds: float) -> asyncio.Task[T | None]:
    """The first item, or None when there is none. It may still be to come: patience is over then.

    Args:
        patience_seconds: 0: without end.

    Raises:
        CancelledError: the client went away. Whatever the items raise before patience is over is raised too.
    """

    async def take() -> T | None:
        async for item in items:
            return item
        return None

    first = asyncio.create_task(take())

    async def settled() -> None:
        await asyncio.wait({first}, timeout=patience_seconds or None)

    try:
        await or_disconnect(receive, settled())
        if first.done():
            first.result()
    except BaseException:
        await give_up(first)
        await items.aclose()  # type: ignore[attr-defined]
        raise
    return first


async def give_up(task: asyncio.Task[T]) -> None:
    """Cancels it unless it is over, and returns when it is."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def kept_alive(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    """The events, and a comment whenever there was none for so long; 0: none ever."""
    return _with_comments(events, seconds) if seconds else events


async def _with_comments(events: AsyncGenerator[bytes, None], seconds: float) -> AsyncGenerator[bytes, None]:
    pending: asyncio.Task[bytes] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(anext(events))
            await asyncio.wait({pending}, timeout=seconds)
            if not pending.done():
                yield COMMENT
                continue
            try:
                part = pending.result()
            except StopAsyncIteration:
                return
            pending = None
            yield part
    finally:
        if pending is not None:
            await give_up(pending)
        await events.aclose()
