"""References that posted I/O holds on the blocks it writes into."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from biphase.cache.block_pool import BlockPool


class IoPins:
    """Keeps a request's reserved blocks from being reused while reads into them may still land.

    `take` runs in the engine's thread, at the moment the blocks are reserved; `release` on the event loop, when no
    read is posted any more. A request that went away before its reservation takes nothing.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._block_ids: list[int] = []
        self._released = False

    def take(self, block_ids: Sequence[int]) -> None:
        with self._lock:
            if not self._released:
                self._pool.acquire(block_ids)
                self._block_ids.extend(block_ids)

    def release_after(self, io: asyncio.Task[None] | None) -> None:
        """Cancels the task that posts the I/O, and releases when it has ended, which is when no read is posted any
        more. Does not wait."""
        if io is None:
            self.release()
            return
        io.add_done_callback(lambda _: self.release())
        io.cancel()

    def release(self) -> None:
        with self._lock:
            self._released = True
            block_ids, self._block_ids = self._block_ids, []
        self._pool.release(block_ids)
