"""One candidate's try at a hand-off: its Prefill call, the lease it gave, the reads of what it announced.

Owns the watch over one prefill worker: whether it still answers, and whether waiting on is worth it. What became of the
blocks is the collector's business, what to do next the hand-off's.
"""

from __future__ import annotations

import asyncio
import math
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeAlias

import grpc

from biphase.errors import BiphaseError, DeadlineExceededError, TransferFailedError, UnavailableError
from biphase.request import NodeId
from biphase.rpc.errors import from_rpc_error, is_spoken
from biphase.rpc.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc
from biphase.transfer.channels import ReadResult
from biphase.transfer.collector import BlockCollector
from biphase.transfer.endpoint import Endpoint
from biphase.worker.reads import HeldLease, reads_ended

if TYPE_CHECKING:
    from services.decode.handoff import Handoff

# How often it is checked, while waiting, whether waiting still makes sense.
_LOOK_SECONDS = 0.5
# A wait that ends so much too late was no wait for the candidate: this process itself got no processor.
_LAG_SECONDS = 0.1

PrefillCall: TypeAlias = grpc.aio.UnaryStreamCall


class OutOfPatienceError(Exception):
    """Computing the rest here is quicker than waiting on."""


class Attempt:
    """One candidate's try: its Prefill call, the lease it gave, the reads of what it announced."""

    def __init__(
        self, handoff: Handoff, candidate: decode_pb2.PrefillCandidate, collector: BlockCollector, *, is_last: bool
    ) -> None:
        self._handoff = handoff
        self._is_last = is_last
        self._worker = handoff.worker
        self._candidate = candidate
        # What has come by now, in this worker's blocks; and in the candidate's, where those are cut another way.
        self._own_collector = self._collector = collector
        self._endpoint: Endpoint | None = None
        self._lease: HeldLease | None = None
        # The reads as the event loop sees them, and as their thread does. Only the latter may be cancelled: the former
        # would look done while bytes still land.
        self._reads: set[asyncio.Future[ReadResult]] = set()
        self._jobs: list[Future[ReadResult]] = []
        self._error: BiphaseError | None = None
        self._is_over = False
        # Nothing is heard of the candidate any more: no word of its own ended the attempt.
        self.is_silent = False

    async def run(self) -> prefill_pb2.PrefillDone:
        """
        Raises:
            BiphaseError: the candidate refused, failed, fell silent, or delivered something else.
            OutOfPatienceError: it is slower than this worker would be by itself.
        """
        channel = self._worker.channels.get(self._candidate.address)
        stub = prefill_pb2_grpc.PrefillStub(channel)
        num_held_tokens = self._collector.num_full_tokens
        call = stub.Prefill(self._handoff.message(num_held_tokens), timeout=self._handoff.remaining_seconds())
        asked = time.monotonic()
        try:
            accepted = (await self._next(call)).accepted
            self._handoff.patience.accepted(self._candidate.incarnation, time.monotonic() - asked)
            self._endpoint = Endpoint.from_proto(accepted.endpoint)
            if self._endpoint.layout != self._worker.layout:
                self._collector = self._handoff.collector_for(self._endpoint.layout, num_held_tokens)
            async with HeldLease(channel, accepted.lease_id, accepted.lease_seconds) as lease:
                self._lease = lease
                done = await self._collect(call, self._endpoint, lease)
                self._collector.commit(done.num_tokens, done.chain_hash)
                started = time.monotonic()
                await self._all_read(lease)
                self._handoff.exposed(started)
                return done
        except OutOfPatienceError:
            await self._give_up_reads()
            raise
        except UnavailableError:
            # Nobody is there any more: what is still being read from there would only run into its deadline. One that
            # says itself that it can do no more still serves what others read.
            if self.is_silent and self._endpoint is not None and self._are_posted():
                self._worker.reader.drop(self._endpoint)
            raise
        finally:
            call.cancel()

    async def _collect(self, call: PrefillCall, endpoint: Endpoint, lease: HeldLease) -> prefill_pb2.PrefillDone:
        while True:
            event = await self._next(call, lease)
            if event.HasField("done"):
                return event.done
            requests = self._collector.announce(event.blocks_committed.blocks)
            if requests:
                future = self._worker.reader.read(
                    endpoint, lease.lease_id, requests, self._worker.settings.transfer_timeout_seconds
                )
                read = asyncio.wrap_future(future)
                self._jobs.append(future)
                self._reads.add(read)
                read.add_done_callback(self._take)

    async def _next(self, call: PrefillCall, lease: HeldLease | None = None) -> prefill_pb2.PrefillResponse:
        """The next message; an error when none comes for too long, the worker is gone, or a read has failed."""
        read = asyncio.ensure_future(call.read())
        if lease is not None:
            seconds = self._worker.settings.prefill_stall_seconds
        else:
            seconds = self._handoff.patience.accept_seconds(is_last=self._is_last)
        deadline = time.monotonic() + seconds
        was_late = False
        try:
            while not read.done():
                patience = self._handoff.patience_seconds()
                left = min(_LOOK_SECONDS, deadline - time.monotonic(), _LOOK_SECONDS if patience is None else patience)
                asked = time.monotonic()
                await asyncio.wait({read}, timeout=max(left, 0.001))
                now = time.monotonic()
                lag = now - asked - max(left, 0.001)
                if lag > _LAG_SECONDS and not was_late:
                    # What came meanwhile is still on its way through this process: it gets as long again, once.
                    was_late, deadline = True, max(deadline, now) + lag
                    continue
                if not read.done():
                    self._look(lease, deadline, seconds)
            message = read.result()
        except grpc.aio.AioRpcError as error:
            # What the connection says when there is nobody behind it.
            self.is_silent = error.code() is grpc.StatusCode.UNAVAILABLE and not is_spoken(error)
            raise from_rpc_error(error, self._candidate.node_id) from error
        finally:
            read.cancel()
        if self._error is not None:
            raise self._error
        if not isinstance(message, prefill_pb2.PrefillResponse):
            # The stream ended; a failed call says why in its status.
            code = await call.code()
            details = await call.details()
            raise TransferFailedError(f"{self._candidate.node_id} ended the prefill early: {code.name} {details}")
        return message

    def _look(self, lease: HeldLease | None, deadline: float, seconds: float) -> None:
        """
        Raises:
            BiphaseError: nothing more is to be expected of this candidate.
        """
        node_id = self._candidate.node_id
        if self._error is not None:
            raise self._error
        if lease is not None and lease.lost:
            self.is_silent = not lease.is_refused
            raise UnavailableError(f"{node_id} no longer answers for its lease")
        if self._worker.cluster.is_gone(NodeId(node_id), self._candidate.incarnation):
            self.is_silent = True
            raise UnavailableError(f"{node_id} is gone from the registry")
        if time.monotonic() > deadline:
            self.is_silent = True
            if lease is None:
                self._handoff.patience.was_silent(self._candidate.incarnation, time.monotonic())
            raise DeadlineExceededError(f"{node_id} made no progress in {seconds:.2g} s")
        patience = self._handoff.patience_seconds()
        if patience is not None and patience <= 0 and deadline != math.inf:
            raise OutOfPatienceError

    def _take(self, read: asyncio.Future[ReadResult]) -> None:
        if read.cancelled() or self._is_over:
            return
        result = read.result()
        self._handoff.took(result)
        self._collector.verified(result.verified)
        if result.error is not None and self._error is None:
            self._error = result.error

    async def _give_up_reads(self) -> None:
        """Ends what is still posted, at the expense of nobody else.

        All reads from a worker share a connection that serves them one by one. A read of ours that waits its turn says
        nothing of the worker; one that runs and does not end does, if the worker does not answer otherwise either. Then
        the blocks must not be waited for until their deadline, or nothing would be gained by giving up.
        """
        for job in self._jobs:
            job.cancel()
        if self._are_posted():
            await asyncio.wait(self._reads, timeout=_LOOK_SECONDS)
        has_answered = self._lease is not None and self._lease.is_released
        if self._endpoint is not None and not has_answered and any(job.running() for job in self._jobs):
            self._worker.reader.drop(self._endpoint)

    def _are_posted(self) -> bool:
        return not all(read.done() for read in self._reads)

    async def _all_read(self, lease: HeldLease) -> None:
        # Waits also where all are done: what a read brought is taken by its callback, which may be due only now.
        while self._reads:
            await asyncio.wait(self._reads, timeout=_LOOK_SECONDS)
            if not self._are_posted():
                break
            self._look(lease, math.inf, 0.0)
        if self._error is not None:
            raise self._error
        if not self._collector.is_complete:
            raise TransferFailedError(f"not every block came from {self._candidate.node_id}")

    async def quiesce(self) -> None:
        """Returns when no read of this attempt is posted any more."""
        await reads_ended(self._reads)
        # A result that is delivered only now belongs to nobody: the collector may be at the next candidate.
        self._is_over = True
        if self._collector is not self._own_collector:
            self._collector.restart()
            self._own_collector.has(self._collector.num_full_tokens)
