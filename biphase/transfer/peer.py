"""The thread that reads from one holder.

Owns its connection, its queue of reads and their deadlines: those behind the running read too, which are looked after
at every tick of its waits. Ends when it has had nothing to do for long, or when the reader closes.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from biphase.errors import BiphaseError, CorruptBlockError, InternalError, StaleHandleError, TransferFailedError
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import Channel, ReaderContext, ReadProgress, ReadRequest, ReadResult
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.selection import open_channel

log = event_logger(__name__)

_CONNECT_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PeerStats:
    """What has come from one holder."""

    node_id: str
    incarnation: str
    # "none" while no connection stands.
    transport: str
    gigabytes_per_second: float
    num_bytes: int
    num_blocks: int
    num_failed_reads: int
    # Time reads were in progress.
    seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class Job:
    """One read that was asked for."""

    lease_id: str
    blocks: Sequence[ReadRequest]
    # Monotonic seconds.
    deadline: float
    future: Future[ReadResult]

    def fail(self, reason: str) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_result(failed(TransferFailedError(reason)))


def failed(error: BiphaseError) -> ReadResult:
    """A read of which nothing came."""
    return ReadResult((), (), (), 0, 0.0, "none", error)


class Peer:
    """Everything but the queue, the flags and the counters is the thread's own.

    Args:
        on_end: called in the thread when it ends.
    """

    def __init__(
        self, endpoint: Endpoint, context: ReaderContext, idle_seconds: float, on_end: Callable[[Peer], None]
    ) -> None:
        self.endpoint = endpoint
        self._context = context
        self._idle_seconds = idle_seconds
        self._on_end = on_end
        self._lock = threading.Lock()
        self._jobs: deque[Job] = deque()
        self._closing = False
        self._ended = False
        self._channel: Channel | None = None
        # Written to wake the thread out of its idle wait.
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._num_bytes = self._num_blocks = self._num_failed = 0
        self._seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"read-{endpoint.node_id}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> bool:
        """False: the thread ends, or has ended."""
        with self._lock:
            if self._ended or self._closing:
                return False
            self._jobs.append(job)
            os.eventfd_write(self._wake, 1)
        return True

    def stats(self) -> PeerStats:
        channel = self._channel
        return PeerStats(
            node_id=self.endpoint.node_id,
            incarnation=self.endpoint.incarnation,
            transport="none" if channel is None else channel.transport,
            gigabytes_per_second=0.0 if channel is None else channel.gigabytes_per_second,
            num_bytes=self._num_bytes,
            num_blocks=self._num_blocks,
            num_failed_reads=self._num_failed,
            seconds=self._seconds,
        )

    def close(self) -> None:
        """Makes the thread end soon; what it reads and what waits fails."""
        with self._lock:
            if self._ended:
                return
            self._closing = True
            os.eventfd_write(self._wake, 1)
            if self._channel is not None:
                self._channel.abort()

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        try:
            while (job := self._next()) is not None:
                if job.future.set_running_or_notify_cancel():
                    job.future.set_result(self._serve(job))
        finally:
            with self._lock:
                self._ended = True
                jobs, self._jobs = self._jobs, deque()
                os.close(self._wake)
            self._drop_channel()
            self._on_end(self)
            for job in jobs:
                job.fail("the reader is closed")

    def _next(self) -> Job | None:
        """The next read, waited for without using the processor; None when the thread should end."""
        idle_until = time.monotonic() + self._idle_seconds
        while True:
            with self._lock:
                if self._closing:
                    return None
                if self._jobs:
                    return self._jobs.popleft()
                left = idle_until - time.monotonic()
                if left <= 0:
                    self._ended = True
                    return None
            poll = select.poll()
            poll.register(self._wake, select.POLLIN)
            if self._channel is not None:
                poll.register(self._channel.fileno(), select.POLLIN | select.POLLRDHUP)
            for fd, _ in poll.poll(left * 1000):
                if fd == self._wake:
                    os.eventfd_read(self._wake)
                else:
                    # A holder never speaks first: it is gone, and its memory should not stay mapped here.
                    log.info("peer_gone", peer=self.endpoint.node_id)
                    self._drop_channel()

    def _serve(self, job: Job) -> ReadResult:
        progress = ReadProgress()
        error: BiphaseError | None = None
        start = time.perf_counter()
        try:
            self._read(job, progress)
        except BiphaseError as raised:
            error = raised
        except Exception as raised:
            log.exception("read_failed", peer=self.endpoint.node_id)
            error = InternalError(f"reading blocks failed: {raised!r}")
        if error is None and progress.corrupt:
            error = CorruptBlockError(f"{len(progress.corrupt)} blocks from {self.endpoint.node_id} are corrupt")
        elif error is None and progress.stale:
            error = StaleHandleError(f"{len(progress.stale)} blocks at {self.endpoint.node_id} are no longer there")
        seconds = time.perf_counter() - start
        num_bytes = len(progress.verified) * self.endpoint.layout.block_bytes
        self._num_bytes += num_bytes
        self._num_blocks += len(progress.verified)
        self._seconds += seconds
        if error is not None:
            self._num_failed += 1
            log.warning(
                "read_incomplete",
                peer=self.endpoint.node_id,
                code=error.code.value,
                reason=error.message,
                num_verified=len(progress.verified),
                num_asked=len(job.blocks),
            )
        return ReadResult(
            verified=tuple(progress.verified),
            stale=tuple(progress.stale),
            corrupt=tuple(progress.corrupt),
            num_bytes=num_bytes,
            seconds=seconds,
            transport=progress.transport,
            error=error,
        )

    def _read(self, job: Job, progress: ReadProgress) -> None:
        reused = self._channel is not None
        channel = self._open(job.deadline)
        progress.transport = channel.transport
        try:
            channel.read(job.lease_id, job.blocks, progress, job.deadline)
        except TransferFailedError as error:
            self._drop_channel()
            if not reused or progress.any() or time.monotonic() >= job.deadline or self._closing:
                raise
            # The connection may have died while nobody used it: that is worth one more.
            log.info("reconnecting", peer=self.endpoint.node_id, reason=error.message)
            self._read(job, progress)
        except BaseException:
            self._drop_channel()
            raise

    def _open(self, deadline: float) -> Channel:
        if self._channel is None:
            limit = min(deadline, time.monotonic() + _CONNECT_SECONDS)
            channel = open_channel(self.endpoint, self._context, limit, self._tick)
            with self._lock:
                self._channel = channel
        return self._channel

    def _drop_channel(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
            if channel is not None:
                channel.close()

    def _tick(self) -> None:
        """While the running read waits: those behind it may have run out of time."""
        now = time.monotonic()
        with self._lock:
            closing = self._closing
            late = [job for job in self._jobs if job.deadline <= now]
            for job in late:
                self._jobs.remove(job)
        for job in late:
            job.fail(f"the deadline passed while other reads from {self.endpoint.node_id} were waited for")
        if closing:
            raise TransferFailedError("the reader is closed")
