"""The hand-off: a prompt's KV from a prefill worker into the blocks reserved here, chunk by chunk.

Owns asking the candidates in order, reading blocks while the next chunk is computed, and the check that what came is
what was asked for. What one candidate delivered and was verified is kept when the next one takes over; when nobody is
left, the engine here computes the rest. No token leaves before the worker named token count and chain hash, and no
decoding starts before every block is in and verified.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import grpc

from biphase.cache.hashing import commit_hash
from biphase.engine import Reserved
from biphase.errors import BiphaseError, DeadlineExceededError, TransferFailedError, UnavailableError
from biphase.request import NodeId, Request
from biphase.rpc.errors import from_rpc_error
from biphase.rpc.messages import logprobs_from_proto, sampling_to_proto
from biphase.rpc.spans import shifted
from biphase.rpc.v1 import common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc
from biphase.scheduler.output import SampledToken
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import ReadResult
from biphase.transfer.collector import BlockCollector
from biphase.transfer.endpoint import Endpoint
from biphase.worker.reads import HeldLease, reads_ended
from biphase.worker.worker import Worker
from services.decode.patience import Patience

log = event_logger(__name__)

# How often it is checked, while waiting, whether waiting still makes sense.
_LOOK_SECONDS = 0.5
# Reads told in a report, about; a long prompt has more.
_MAX_READS_TOLD = 64

_PrefillCall: TypeAlias = grpc.aio.UnaryStreamCall


class OutOfPatienceError(Exception):
    """Computing the rest here is quicker than waiting on."""


@dataclass(slots=True)
class HandoffCounts:
    """What reads of this request came to, over all candidates."""

    num_failures: int = 0
    num_bytes: int = 0
    read_seconds: float = 0.0
    exposed_seconds: float = 0.0
    transport: str = "none"
    # Incarnations of candidates that did not answer, or not any more.
    silent: list[str] = field(default_factory=list)


class Handoff:
    """One request's hand-off. `run` once, after the engine reserved the blocks."""

    def __init__(
        self,
        worker: Worker,
        patience: Patience,
        request: Request,
        candidates: Sequence[decode_pb2.PrefillCandidate],
        deadline: float | None = None,
    ) -> None:
        """
        Args:
            deadline: of the whole request, monotonic seconds; None: there is none.
        """
        self._worker = worker
        self.patience = patience
        self._deadline = deadline
        self._request = request
        self._candidates = candidates
        self._started = time.monotonic()
        # Why the prompt was computed here after all.
        self._local_reason = "prefill_failed"
        self._token_ids = request.all_token_ids
        self._counts = HandoffCounts()
        self._done: prefill_pb2.PrefillDone | None = None
        self._prefill_node_id = ""
        # To be sent with the first token.
        self.prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        # Where the time went, in seconds since the request came here.
        self.spans: list[common_pb2.Span] = []

    async def run(self, reserved: Reserved) -> None:
        """Fills the reserved blocks and lets the engine go on.

        The caller holds references to the blocks until this returns. Cancelled: returns when no read is posted any
        more, and the engine is not told.
        """
        worker, request = self._worker, self._request
        engine, block_size = worker.engine, worker.settings.block_size
        collector = BlockCollector(
            request.block_hashes,
            commit_hash(request.block_hashes, worker.root_hash(request.cache_salt), self._token_ids, block_size),
            num_tokens=len(self._token_ids),
            block_size=block_size,
            dest_block_ids=reserved.block_ids,
            first_index=reserved.num_cached_tokens // block_size,
        )
        self._started = time.monotonic()
        candidates = sorted(
            self._candidates, key=lambda known: self.patience.is_distrusted(known.incarnation, self._started)
        )
        for place, candidate in enumerate(candidates, 1):
            collector.restart()
            attempt = _Attempt(self, candidate, collector, is_last=place == len(candidates))
            started, code = time.monotonic(), ""
            try:
                done = await attempt.run()
            except BiphaseError as error:
                self._counts.num_failures += 1
                if isinstance(error, UnavailableError | DeadlineExceededError):
                    self._counts.silent.append(candidate.incarnation)
                code = error.code.value
                log.warning(
                    "handoff_failed",
                    request_id=request.request_id,
                    prefill_node=candidate.node_id,
                    code=error.code.value,
                    error=error.message,
                    num_kept_tokens=collector.num_full_tokens,
                )
                continue
            except OutOfPatienceError:
                self._local_reason = code = "prefill_slow"
                log.info("prefill_slow", request_id=request.request_id, prefill_node=candidate.node_id,
                         waited_seconds=time.monotonic() - self._started)  # fmt: skip
                break
            finally:
                self._note("handoff", candidate.node_id, started, error_code=code)
                await attempt.quiesce()
            self.spans += shifted(done.spans, started - request.arrival_time)
            self._done, self._prefill_node_id = done, candidate.node_id
            self.prompt_logprobs = list(done.prompt_logprobs)
            engine.kv_ready(
                request.request_id,
                num_valid_tokens=len(self._token_ids),
                num_external_tokens=len(self._token_ids) - reserved.num_cached_tokens,
                first_token=SampledToken(
                    done.first_token_id,
                    logprobs_from_proto(done.first_logprobs) if done.HasField("first_logprobs") else None,
                ),
            )
            return
        collector.restart()
        # The last token is computed here even if its block came: its logits are what is missing.
        num_valid = min(collector.num_contiguous_tokens, len(self._token_ids) - 1)
        if request.sampling.prompt_logprobs is not None:
            # What tokens that came would have been predicted from was only ever on the other worker.
            num_valid = 0
        log.warning(
            "prefill_falls_back", request_id=request.request_id, reason=self._local_reason, num_kept_tokens=num_valid
        )
        engine.kv_ready(
            request.request_id,
            num_valid_tokens=num_valid,
            num_external_tokens=max(0, num_valid - reserved.num_cached_tokens),
        )

    def fill(self, report: common_pb2.RequestReport, num_tokens: int) -> None:
        """Says in the report how the request's KV came about. Token counts add up to `num_tokens`."""
        counts = self._counts
        report.num_prefill_failures = counts.num_failures
        report.ClearField("silent_prefill_incarnations")
        report.silent_prefill_incarnations.extend(counts.silent)
        report.transport = counts.transport
        report.transfer_bytes = counts.num_bytes
        report.transfer_seconds = counts.read_seconds
        report.exposed_transfer_seconds = counts.exposed_seconds
        if self._done is None:
            report.prefill_mode, report.reason = "local", self._local_reason
            report.prefill_node_id = report.decode_node_id
            report.num_transferred_tokens = self._request.num_external_tokens
            report.num_computed_tokens = num_tokens - report.num_cached_tokens
            return
        done = self._done
        report.prefill_node_id = self._prefill_node_id
        report.num_transferred_tokens = num_tokens - report.num_cached_tokens
        # The prefill worker's tokens stand in this order: cached, read from a third node, computed. What decode had
        # itself covers the first of them, whatever they were there.
        own = report.num_cached_tokens
        cached_end = max(own, done.num_cached_tokens)
        external_end = max(cached_end, done.num_cached_tokens + done.num_external_tokens)
        report.num_prefill_cached_tokens = cached_end - own
        report.num_external_tokens = external_end - cached_end
        report.num_computed_tokens = num_tokens - external_end
        report.queue_seconds += done.queue_seconds
        report.prefill_seconds = done.prefill_seconds

    def remaining_seconds(self) -> float | None:
        """What is left of the request's time; the prefill worker gets no more."""
        return None if self._deadline is None else max(0.001, self._deadline - time.monotonic())

    def patience_seconds(self) -> float | None:
        """How much longer it is worth waiting for the first token; None: as long as it takes."""
        if self._request.num_uncached_tokens > self.patience.max_local_tokens:
            return None
        stats = self._worker.engine.stats()
        seconds = self.patience.prefill_seconds(
            self._request.num_uncached_tokens, stats.prefill_tokens_per_second, is_decoding=stats.num_running > 0
        )
        return None if seconds is None else self._started + seconds - time.monotonic()

    def message(self, num_held_tokens: int) -> prefill_pb2.PrefillRequest:
        worker, request = self._worker, self._request
        return prefill_pb2.PrefillRequest(
            request_id=request.request_id,
            token_ids=self._token_ids,
            num_prompt_tokens=request.num_prompt_tokens,
            sampling=sampling_to_proto(request.sampling),
            num_held_tokens=num_held_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            layout=worker.layout.to_proto(),
            reader_node_id=worker.node_id,
            reader_incarnation=worker.incarnation,
        )

    def _note(self, phase: str, node_id: str, started: float, *, num_bytes: int = 0, error_code: str = "") -> None:
        """A stretch of the request's way that ends now."""
        arrival = self._request.arrival_time
        self.spans.append(
            common_pb2.Span(
                phase=phase,
                node_id=node_id,
                start_seconds=started - arrival,
                end_seconds=time.monotonic() - arrival,
                num_bytes=num_bytes,
                error_code=error_code,
            )
        )

    def took(self, result: ReadResult) -> None:
        if len(self.spans) < _MAX_READS_TOLD and (result.num_bytes or result.error is not None):
            code = "" if result.error is None else result.error.code.value
            started = time.monotonic() - result.seconds
            self._note("read", self._worker.node_id, started, num_bytes=result.num_bytes, error_code=code)
        self._counts.num_bytes += result.num_bytes
        self._counts.read_seconds += result.seconds
        if result.transport != "none":
            self._counts.transport = result.transport

    def exposed(self, since: float) -> None:
        """Blocks have come since then, monotonic seconds, that nothing else was waited for."""
        self._counts.exposed_seconds += time.monotonic() - since
        self._note("exposed", self._worker.node_id, since)


class _Attempt:
    """One candidate's try: its Prefill call, the lease it gave, the reads of what it announced."""

    def __init__(
        self, handoff: Handoff, candidate: decode_pb2.PrefillCandidate, collector: BlockCollector, *, is_last: bool
    ) -> None:
        self._handoff = handoff
        self._is_last = is_last
        self._worker = handoff._worker
        self._candidate = candidate
        self._collector = collector
        self._endpoint: Endpoint | None = None
        self._reads: set[asyncio.Future[ReadResult]] = set()
        self._error: BiphaseError | None = None
        self._is_over = False

    async def run(self) -> prefill_pb2.PrefillDone:
        """
        Raises:
            BiphaseError: the candidate refused, failed, fell silent, or delivered something else.
            OutOfPatienceError: it is slower than this worker would be by itself.
        """
        channel = self._worker.channels.get(self._candidate.address)
        stub = prefill_pb2_grpc.PrefillStub(channel)
        call = stub.Prefill(
            self._handoff.message(self._collector.num_full_tokens), timeout=self._handoff.remaining_seconds()
        )
        asked = time.monotonic()
        try:
            accepted = (await self._next(call)).accepted
            self._handoff.patience.accepted(self._candidate.incarnation, time.monotonic() - asked)
            self._endpoint = Endpoint.from_proto(accepted.endpoint)
            async with HeldLease(channel, accepted.lease_id, accepted.lease_seconds) as lease:
                done = await self._collect(call, self._endpoint, lease)
                self._collector.commit(done.num_tokens, done.chain_hash)
                started = time.monotonic()
                await self._all_read(lease)
                self._handoff.exposed(started)
                return done
        except UnavailableError:
            # Nobody is there any more: what is still being read from there would only run into its deadline.
            if self._endpoint is not None and self._are_posted():
                self._worker.reader.drop(self._endpoint)
            raise
        finally:
            call.cancel()

    async def _collect(self, call: _PrefillCall, endpoint: Endpoint, lease: HeldLease) -> prefill_pb2.PrefillDone:
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
                self._reads.add(read)
                read.add_done_callback(self._take)

    async def _next(self, call: _PrefillCall, lease: HeldLease | None = None) -> prefill_pb2.PrefillResponse:
        """The next message; an error when none comes for too long, the worker is gone, or a read has failed."""
        read = asyncio.ensure_future(call.read())
        if lease is not None:
            seconds = self._worker.settings.prefill_stall_seconds
        else:
            seconds = self._handoff.patience.accept_seconds(is_last=self._is_last)
        deadline = time.monotonic() + seconds
        try:
            while not read.done():
                patience = self._handoff.patience_seconds()
                left = min(_LOOK_SECONDS, deadline - time.monotonic(), _LOOK_SECONDS if patience is None else patience)
                await asyncio.wait({read}, timeout=max(left, 0.001))
                if not read.done():
                    self._look(lease, deadline, seconds)
            message = read.result()
        except grpc.aio.AioRpcError as error:
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
            raise UnavailableError(f"{node_id} no longer answers for its lease")
        if self._worker.cluster.is_gone(NodeId(node_id), self._candidate.incarnation):
            raise UnavailableError(f"{node_id} is gone from the registry")
        if time.monotonic() > deadline:
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

    def _are_posted(self) -> bool:
        return not all(read.done() for read in self._reads)

    async def _all_read(self, lease: HeldLease) -> None:
        while self._are_posted():
            await asyncio.wait(self._reads, timeout=_LOOK_SECONDS)
            if self._are_posted():
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
