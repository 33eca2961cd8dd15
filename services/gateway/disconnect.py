"""Work that ends when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from biphase.errors import CancelledError

T = TypeVar("T")


async def wait_disconnect(receive: Receive) -> None:
    """Returns when the client is gone. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def or_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; it is cancelled when the client goes away first.

    Raises:
        CancelledError: the client went away. Nobody reads the answer, but logs and metrics know.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise CancelledError("The client went away.")
    finally:
        unfinished = [entry for entry in (task, watch) if not entry.done()]
        for entry in unfinished:
            entry.cancel()
        if unfinished:
            await asyncio.wait(unfinished)
