"""One sequence from admission to its last token, over as many decode workers as it takes.

When a worker dies, refuses or vanishes, prompt and tokens so far go to another one. Sampling is a pure function of
logits, seed and position, so the stream goes on as if nothing had happened: no token is lost or doubled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from biphase.errors import (
    BiphaseError,
    CancelledError,
    DeadlineExceededError,
    ErrorCode,
    OverloadedError,
    UnavailableError,
)
from biphase.rpc.client import ChannelPool
from biphase.rpc.errors import CODE_METADATA_KEY, from_rpc_error
from biphase.rpc.messages import sampling_to_proto
from biphase.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from biphase.telemetry import context
from biphase.telemetry.events import event_logger
from services.gateway.admission import AdmissionQueue
from services.gateway.domain import SequenceSpec
from services.gateway.routing.router import PREFILL_BUSY, Placement, Ticket
from services.gateway.timeline import Attempt

log = event_logger(__name__)

# Another worker may do better with these; all others are about the request itself.
_MOVABLE = frozenset(
    {
        ErrorCode.UNAVAILABLE,
        ErrorCode.OVERLOADED,
        ErrorCode.LAYOUT_MISMATCH,
        ErrorCode.STALE_HANDLE,
        ErrorCode.CORRUPT_BLOCK,
        ErrorCode.TRANSFER_FAILED,
        ErrorCode.CANCELLED,
    }
)
# How long a stream that lost its worker waits for any to come back, and a request that has not begun.
_REVIVAL_SECONDS = 30.0
_PATIENCE_SECONDS = 5.0
_REVIVAL_POLL_SECONDS = 0.1


class Dispatcher:
    """Opens sequences at workers. One per gateway process."""

    def __init__(
        self,
        channels: ChannelPool,
        queue: AdmissionQueue,
        *,
        max_retries: int,
        expects_decode: Callable[[], bool] = lambda: False,
        on_move: Callable[[str], None] = lambda code: None,
    ) -> None:
        self._channels = channels
        self._max_retries = max_retries
        # Whether a decode worker was there a moment ago.
        self.expects_decode = expects_decode
        self._on_move = on_move
        self.queue = queue
        self.num_running = 0

    def open(self, spec: SequenceSpec, *, deadline: float, preferred: str = "") -> SequenceStream:
        """
        Args:
            deadline: on the monotonic clock.
            preferred: incarnation of the decode worker to prefer.
        """
        ticket = Ticket(spec.request_id, spec.token_ids, spec.cache_salt, spec.priority, preferred)
        return SequenceStream(self, spec, ticket, deadline)

    def stub(self, address: str) -> Any:
        return decode_pb2_grpc.DecodeStub(self._channels.get(address))

    def may_move(self, error: BiphaseError, num_moves: int) -> bool:
        return num_moves < self._max_retries and error.code in _MOVABLE

    def moved(self, error: BiphaseError) -> None:
        self._on_move(str(error.code))


class SequenceStream:
    """Reads one sequence's messages. `close` ends it at any moment, and the work at the workers with it."""

    def __init__(self, dispatcher: Dispatcher, spec: SequenceSpec, ticket: Ticket, deadline: float) -> None:
        self._dispatcher = dispatcher
        self._spec = spec
        self._ticket = ticket
        self._deadline = deadline
        # Who reads a stream changes, from one task to another: calls carry what was so when it was opened.
        self._traceparent = context.traceparent.get()
        self._call: Any = None
        self._placement: Placement | None = None
        self._output: list[int] = []
        self._refusal: OverloadedError | None = None
        # Complete when the first token is there.
        self.prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        # The newest that a worker told.
        self.report: common_pb2.RequestReport | None = None
        self.num_moves = 0
        # A later worker was given output to go on from: its report is about more than the prompt.
        self.has_moved_output = False
        # Every placement so far, the newest last.
        self.attempts: list[Attempt] = []

    @property
    def admitted_time(self) -> float | None:
        """When it got its first place, monotonic."""
        return self.attempts[0].started if self.attempts else None

    @property
    def entered_time(self) -> float:
        """When it began to wait for its first place, monotonic."""
        return self._ticket.arrival

    @property
    def decode_incarnation(self) -> str:
        """Where it runs; "" before it does."""
        return self._placement.decode.incarnation if self._placement is not None else ""

    async def read(self) -> decode_pb2.GenerateResponse:
        """The next message; the last one has `finish`. Do not read on after it.

        Raises:
            BiphaseError: the sequence cannot go on.
        """
        while True:
            try:
                if self._call is None:
                    await self._start()
                message = await self._call.read()
            except grpc.aio.AioRpcError as error:
                lost = self._error(error)
            else:
                if message is not grpc.aio.EOF:
                    self._took(message)
                    return message  # type: ignore[no-any-return]
                lost = await self._ended_early()
            if (finish := self._already_finished()) is not None:
                self._release()
                return finish
            self._lost(lost)

    def go_on_after(self, token_ids: Sequence[int]) -> decode_pb2.GenerateResponse | None:
        """Has the output so far go on with these tokens, as if they had been sampled: the worker is given it anew, and
        has all but the last block of it in its cache.

        Returns:
            Them as a message, as `read` would; None when the output has no room for them.
        """
        if len(self._output) + len(token_ids) >= self._spec.sampling.max_tokens:
            return None
        self._ticket.preferred = self.decode_incarnation
        self._ticket.moved = self.has_moved_output = True
        if self._placement is not None:
            self.attempts[-1].ended = time.monotonic()
        self._release()
        self._output.extend(token_ids)
        message = decode_pb2.GenerateResponse(token_ids=token_ids)
        if self._spec.sampling.logprobs is not None:
            message.logprobs.extend(
                common_pb2.TokenLogprobs(token_ids=[token_id], logprobs=[0.0], rank=1) for token_id in token_ids
            )
        return message

    def _took(self, message: decode_pb2.GenerateResponse) -> None:
        if message.HasField("report"):
            # A copy: part of a message keeps all of it in memory, the logprobs of a whole prompt too, and what is
            # recorded stays for long.
            self.report = common_pb2.RequestReport()
            self.report.CopyFrom(message.report)
            if self.report.spans:
                self.attempts[-1].spans = self.report.spans
        if message.token_ids:
            if self._placement is not None:
                self._placement.prefilled(silent=message.report.silent_prefill_incarnations)
            self._output.extend(message.token_ids)
        if message.prompt_logprobs:
            self.prompt_logprobs.extend(message.prompt_logprobs)
        if message.HasField("finish"):
            self._release()

    async def _start(self) -> None:
        context.request_id.set(self._spec.request_id)
        context.traceparent.set(self._traceparent)
        remaining = self._deadline - time.monotonic()
        try:
            async with asyncio.timeout(max(0.0, remaining)):
                self._placement = await self._admitted()
        except TimeoutError:
            raise DeadlineExceededError("The request waited for a worker until its time was over.") from None
        self._dispatcher.num_running += 1
        placement = self._placement
        prefills = tuple(node.node_id for node in placement.prefills)
        self.attempts.append(Attempt(time.monotonic(), placement.decode.node_id, prefills, placement.decision))
        request = decode_pb2.GenerateRequest(
            request_id=self._spec.request_id,
            token_ids=self._spec.token_ids,
            num_prompt_tokens=len(self._spec.token_ids),
            sampling=sampling_to_proto(self._spec.sampling),
            prefill_candidates=[
                decode_pb2.PrefillCandidate(node_id=node.node_id, incarnation=node.incarnation, address=node.address)
                for node in self._placement.prefills
            ],
            priority=self._spec.priority,
            cache_salt=self._spec.cache_salt,
            namespace=self._placement.decode.namespace,
            local_prefill_reason=PREFILL_BUSY if self._placement.decision.reason == PREFILL_BUSY else "",
        )
        request.token_ids.extend(self._output)
        if self._output:
            # They were handed out already.
            request.sampling.ClearField("prompt_logprobs")
        stub = self._dispatcher.stub(self._placement.decode.address)
        self._call = stub.Generate(request, timeout=max(0.001, self._deadline - time.monotonic()))

    async def _admitted(self) -> Placement:
        """A stream that has begun waits a while for a worker to come back; a new request waits a moment, if one was
        there a moment ago, and else is told at once."""
        started = time.monotonic()
        while True:
            try:
                return await self._dispatcher.queue.admit(self._ticket)
            except UnavailableError:
                if self._refusal is not None and not self._ticket.moved:
                    # Every worker that is there said that it is full.
                    raise self._refusal from None
                waited = time.monotonic() - started
                if self._ticket.moved:
                    give_up = waited > _REVIVAL_SECONDS
                else:
                    give_up = waited > _PATIENCE_SECONDS or not self._dispatcher.expects_decode()
                if give_up:
                    raise
            # The one that failed may be the only one there is.
            self._ticket.excluded.clear()
            await asyncio.sleep(_REVIVAL_POLL_SECONDS)

    def _error(self, error: grpc.aio.AioRpcError) -> BiphaseError:
        assert self._placement is not None
        peer = self._placement.decode.node_id
        spoken = any(key == CODE_METADATA_KEY for key, _ in error.trailing_metadata() or ())
        if not spoken and error.code() in (
            grpc.StatusCode.INTERNAL,
            grpc.StatusCode.UNKNOWN,
            grpc.StatusCode.CANCELLED,
        ):
            # Not the worker's words: what the connection says when the process behind it dies.
            return UnavailableError(f"{peer}: {error.details() or error.code().name.lower()}")
        return from_rpc_error(error, peer)

    async def _ended_early(self) -> BiphaseError:
        """The call ended without a last message: as an error where its status says one, else as a lost worker."""
        assert self._placement is not None
        peer = self._placement.decode.node_id
        code = await self._call.code()
        if code == grpc.StatusCode.OK:
            return UnavailableError(f"{peer}: the stream ended without a finish")
        metadata = await self._call.trailing_metadata()
        details = await self._call.details()
        initial = grpc.aio.Metadata()
        return self._error(grpc.aio.AioRpcError(code, initial, metadata or initial, details))

    def _lost(self, error: BiphaseError) -> None:
        """Makes ready for another worker, or gives up.

        Raises:
            BiphaseError: it cannot be moved.
        """
        placement = self._placement
        if placement is not None:
            self.attempts[-1].ended, self.attempts[-1].error_code = time.monotonic(), str(error.code)
        self._release()
        if isinstance(error, CancelledError):
            error = UnavailableError(error.message)
        movable = self._dispatcher.may_move(error, self.num_moves)
        if placement is not None and movable:
            self._ticket.excluded.add(placement.decode.incarnation)
            if not isinstance(error, OverloadedError):
                placement.decode.suspend()
        log.warning(
            "sequence_lost",
            request_id=self._spec.request_id,
            node=placement.decode.node_id if placement is not None else "",
            code=str(error.code),
            error=error.message,
            num_output_tokens=len(self._output),
            moving=movable,
        )
        if not movable:
            raise error
        self.num_moves += 1
        if self._output:
            self.has_moved_output = True
        else:
            self.prompt_logprobs.clear()
        self._dispatcher.moved(error)
        if isinstance(error, OverloadedError) and not self._output:
            self._refusal = error
        else:
            self._ticket.moved = True

    def _already_finished(self) -> decode_pb2.GenerateResponse | None:
        """The worker died between the last token and saying that it was the last."""
        if not self._output:
            return None
        sampling, last = self._spec.sampling, self._output[-1]
        finish = None
        if sampling.ends_at(last, len(self._output)):
            finish = decode_pb2.Finish(reason="stop", stop_token_id=last if sampling.is_named_stop(last) else None)
        elif len(self._output) >= sampling.max_tokens:
            finish = decode_pb2.Finish(reason="length")
        return None if finish is None else decode_pb2.GenerateResponse(finish=finish)

    def _release(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._call = None
        if self._placement is not None:
            self._placement.release()
            self._placement = None
            self._dispatcher.num_running -= 1

    def close(self) -> None:
        """Ends the sequence; harmless when it has ended."""
        self._release()
