"""Reads of KV blocks as the event loop sees them, and the lease that keeps them readable meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any

import grpc

from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import ReadResult

log = event_logger(__name__)

_RELEASE_SECONDS = 5.0
# A renewal is quick or lost; one that was lost is tried again soon.
_RENEW_SECONDS = 2.0
_RETRY_SECONDS = 0.5


async def reads_ended(reads: Iterable[asyncio.Future[ReadResult]]) -> None:
    """Returns when none of the reads is posted any more.

    Blocks must not be given up while bytes may land in them, so a cancellation, and another one after it, waits for
    the reads too, which end by their own deadline; then it goes on its way.
    """
    pending = {read for read in reads if not read.done()}
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            _, pending = await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
            pending = {read for read in pending if not read.done()}
    if cancelled is not None:
        raise cancelled


class HeldLease:
    """A lease another node gave us: renewed while this context is open, released when it closes.

    A release that cannot be delivered is no loss: the lease expires at its owner.
    """

    def __init__(self, channel: grpc.aio.Channel, lease_id: str, lease_seconds: float) -> None:
        self._stub = blocks_pb2_grpc.BlockHolderStub(channel)
        self.lease_id = lease_id
        self._lease_seconds = lease_seconds
        # The owner no longer knows the lease, or no longer answers: what has not been verified will not come.
        self.lost = False
        # It said so itself.
        self.is_refused = False
        # The owner has answered the release.
        self.is_released = False
        self._renewer: asyncio.Task[None] | None = None

    async def __aenter__(self) -> HeldLease:
        self._renewer = asyncio.create_task(self._renew_forever())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._renewer is not None
        self._renewer.cancel()
        background(self._release())

    async def _renew_forever(self) -> None:
        failures = 0
        interval = self._lease_seconds / 3
        timeout = min(interval, _RENEW_SECONDS)
        while not self.lost:
            await asyncio.sleep(_RETRY_SECONDS if failures else interval)
            try:
                answer = await self._stub.Renew(blocks_pb2.RenewRequest(lease_ids=[self.lease_id]), timeout=timeout)
            except grpc.aio.AioRpcError as error:
                failures += 1
                log.warning("lease_renewal_failed", lease_id=self.lease_id, status=error.code().name)
                # The lease outlives one lost renewal, not two.
                self.lost = failures >= 2
            else:
                failures = 0
                self.lost = self.is_refused = self.lease_id in answer.expired

    async def _release(self) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await self._stub.Release(blocks_pb2.ReleaseRequest(lease_ids=[self.lease_id]), timeout=_RELEASE_SECONDS)
            self.is_released = True


_background: set[asyncio.Task[None]] = set()


def background(work: Coroutine[Any, Any, None]) -> None:
    """Runs a coroutine to its end without anyone waiting, and keeps it from being collected meanwhile."""
    task = asyncio.create_task(work)
    _background.add(task)
    task.add_done_callback(_background.discard)


async def finish_background(tasks_timeout_seconds: float) -> None:
    """Waits for what `background` started; called once, when a process ends."""
    pending: Sequence[asyncio.Task[None]] = list(_background)
    if pending:
        await asyncio.wait(pending, timeout=tasks_timeout_seconds)
