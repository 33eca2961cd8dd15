"""The Generate call: a prompt in, tokens out, whichever way its KV came to be here.

Owns the call's life and the report of the path it took. The hand-off itself is `handoff`; the engine decides when
anything runs. However the call ends, leaving it stops the work and frees the blocks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from biphase.engine import EngineEvent, Finished, Reserved, Tokens
from biphase.errors import InternalError, InvalidRequestError, LayoutMismatchError, UnavailableError
from biphase.request import FinishReason, Request
from biphase.rpc.errors import stream_method
from biphase.rpc.messages import logprobs_to_proto
from biphase.rpc.spans import engine_spans
from biphase.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc
from biphase.telemetry import tracing
from biphase.telemetry.events import event_logger
from biphase.telemetry.tracing import Span
from biphase.worker.bridge import EventQueue
from biphase.worker.parsing import parse_request
from biphase.worker.pins import IoPins
from biphase.worker.tracing import tell_phases
from biphase.worker.worker import Worker
from services.decode.handoff import Handoff
from services.decode.mode import choose_prefill_mode
from services.decode.patience import Patience

log = event_logger(__name__)


class DecodeServicer(decode_pb2_grpc.DecodeServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._patience = Patience(worker.settings.max_slow_local_tokens)

    @stream_method
    async def Generate(
        self, message: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        worker = self._worker
        if message.namespace and message.namespace != worker.layout.namespace:
            raise LayoutMismatchError(
                f"{worker.node_id} serves namespace {worker.layout.namespace.hex()[:12]}, "
                f"the request was routed for {message.namespace.hex()[:12]}"
            )
        request = parse_request(message, worker.own_id(message.request_id), worker.core.model.vocab_size)
        with tracing.serving("generate", {"biphase.node": worker.node_id}) as span, worker.accept(request):
            await worker.prepare(request)
            remaining = context.time_remaining()
            deadline = None if remaining is None else time.monotonic() + remaining
            # Closed before the span ends, whoever leaves: a call that is cancelled between two answers would otherwise
            # leave its generator, and what that tells last, to the garbage collector.
            async with aclosing(self._run(request, message, deadline, span)) as answers:
                async for answer in answers:
                    yield answer

    async def _run(
        self, request: Request, message: decode_pb2.GenerateRequest, deadline: float | None, span: Span
    ) -> AsyncGenerator[decode_pb2.GenerateResponse, None]:
        worker = self._worker
        candidates = list(message.prefill_candidates)
        queue: EventQueue = asyncio.Queue()
        pins = IoPins(worker.pool)
        mode = choose_prefill_mode(worker, request, candidates, message.local_prefill_reason)
        # Decode fetches a shared prefix for itself only where it also computes the rest.
        plan = None if mode.remote else worker.prefixes.plan(request)
        request.awaits_kv = mode.remote or plan is not None
        handoff = Handoff(worker, self._patience, request, candidates, deadline) if mode.remote else None
        loading: asyncio.Task[None] | None = None
        report = common_pb2.RequestReport(
            prefill_mode="remote" if mode.remote else "local",
            reason=mode.reason,
            prefill_node_id="" if mode.remote else worker.node_id,
            decode_node_id=worker.node_id,
            transport="none",
        )

        def sink(event: EngineEvent) -> None:
            # In the engine's thread: once this returns, an abort may free the request's own references.
            if isinstance(event, Reserved):
                pins.take(event.block_ids)
            worker.bridge.post(queue, event)

        try:
            worker.engine.add_request(request, sink)
            first = True
            previous = request.arrival_time
            while True:
                event = await queue.get()
                if isinstance(event, Reserved):
                    if handoff is not None:
                        loading = asyncio.create_task(handoff.run(event))
                    elif plan is not None:
                        loading = asyncio.create_task(worker.prefixes.load(request, plan, event))
                elif isinstance(event, Tokens):
                    if event.token_ids:
                        now = time.monotonic()
                        (worker.metrics.first_token if first else worker.metrics.next_tokens)(now - previous)
                        previous = now
                    answer = decode_pb2.GenerateResponse(
                        token_ids=event.token_ids,
                        logprobs=[logprobs_to_proto(entry) for entry in event.logprobs],
                        prompt_logprobs=[logprobs_to_proto(entry) for entry in event.prompt_logprobs],
                    )
                    if first and event.token_ids:
                        first = False
                        self._complete(report, request, handoff)
                        answer.report.CopyFrom(report)
                        answer.report.spans.extend(engine_spans(request, worker.node_id, fetches=handoff is None))
                        if handoff is not None:
                            answer.report.spans.extend(handoff.spans)
                    if handoff is not None and handoff.prompt_logprobs:
                        answer.prompt_logprobs.extend(handoff.prompt_logprobs)
                        handoff.prompt_logprobs = []
                    yield answer
                elif isinstance(event, Finished):
                    if isinstance(event.error, InvalidRequestError):
                        raise event.error
                    if event.reason is FinishReason.ERROR:
                        raise InternalError(f"{worker.node_id} failed {request.request_id}: {event.error}")
                    if event.reason is FinishReason.ABORT:
                        # Only the end of this call aborts its request; whatever else did, the answer is not complete.
                        raise UnavailableError(f"{worker.node_id} gave up {request.request_id}")
                    self._complete(report, request, handoff)
                    # Before the last message: its reader may be gone by the next line.
                    self._count(request, report)
                    finish = decode_pb2.Finish(reason=event.reason.value)
                    if event.stop_token_id is not None:
                        finish.stop_token_id = event.stop_token_id
                    self._log_finished(request, report, event)
                    worker.offer(
                        request,
                        report.num_cached_tokens + report.num_prefill_cached_tokens + report.num_external_tokens,
                    )
                    yield decode_pb2.GenerateResponse(finish=finish, report=report)
                    return
        finally:
            tell_phases(
                span, request, worker.node_id, fetches=handoff is None, more=() if handoff is None else handoff.spans
            )
            # Nothing is awaited here: a call that is cancelled while it ends would skip what follows.
            worker.engine.abort(request.request_id)
            pins.release_after(loading)

    def _complete(self, report: common_pb2.RequestReport, request: Request, handoff: Handoff | None) -> None:
        """Fills the report with what is known now. The four token counts always add up to the prompt's length."""
        num_tokens = request.num_prompt_tokens + request.num_preset_output_tokens
        report.num_cached_tokens = request.num_cached_tokens
        report.num_preemptions = request.num_preemptions
        if request.first_scheduled_time is not None:
            report.queue_seconds = request.first_scheduled_time - request.arrival_time
        if request.first_token_time is not None and request.first_scheduled_time is not None:
            report.prefill_seconds = request.first_token_time - request.first_scheduled_time
        if handoff is None:
            report.num_external_tokens = request.num_external_tokens
            report.num_computed_tokens = num_tokens - request.num_cached_tokens - request.num_external_tokens
        else:
            handoff.fill(report, num_tokens)

    def _count(self, request: Request, report: common_pb2.RequestReport) -> None:
        metrics = self._worker.metrics
        metrics.took_path(report.prefill_mode, report.reason)
        metrics.handed_off(
            report.transport, report.transfer_bytes, report.exposed_transfer_seconds, report.num_prefill_failures
        )
        first_token = request.first_token_time or time.monotonic()
        metrics.generated(
            request.num_prompt_tokens,
            request.num_output_tokens,
            queue_seconds=report.queue_seconds,
            prefill_seconds=report.prefill_seconds,
            ttft_seconds=first_token - request.arrival_time,
            seconds=time.monotonic() - request.arrival_time,
        )

    def _log_finished(self, request: Request, report: common_pb2.RequestReport, event: Finished) -> None:
        log.info(
            "request_finished",
            request_id=request.request_id,
            reason=event.reason.value,
            prefill_mode=report.prefill_mode,
            mode_reason=report.reason,
            prefill_node=report.prefill_node_id,
            transport=report.transport,
            num_prompt_tokens=request.num_prompt_tokens,
            num_output_tokens=request.num_output_tokens,
            num_cached_tokens=report.num_cached_tokens,
            num_transferred_tokens=report.num_transferred_tokens,
            num_prefill_cached_tokens=report.num_prefill_cached_tokens,
            num_external_tokens=report.num_external_tokens,
            num_computed_tokens=report.num_computed_tokens,
            exposed_transfer_seconds=report.exposed_transfer_seconds,
            seconds=time.monotonic() - request.arrival_time,
        )
