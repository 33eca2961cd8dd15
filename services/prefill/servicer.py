"""The Prefill call: one prompt in, committed blocks and the first token out.

Owns the call's life: the lease opened before anything is computed, blocks put under it in the engine's own thread
(before the engine could give them up), the work stopped when the caller goes away.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from biphase.cache.hashing import commit_hash
from biphase.engine import BlocksComputed, EngineEvent, Finished, Reserved, Tokens
from biphase.errors import DeadlineExceededError, InternalError, InvalidRequestError, LayoutMismatchError
from biphase.request import FinishReason, Request, TokenLogprobs
from biphase.rpc.errors import stream_method
from biphase.rpc.messages import logprobs_to_proto
from biphase.rpc.spans import engine_spans
from biphase.rpc.v1 import common_pb2, prefill_pb2, prefill_pb2_grpc
from biphase.telemetry import tracing
from biphase.telemetry.events import event_logger
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import Lease, LeaseEnd
from biphase.transfer.reslice import Reslice
from biphase.worker.bridge import EventQueue
from biphase.worker.parsing import parse_request
from biphase.worker.pins import IoPins
from biphase.worker.tracing import tell_phases
from biphase.worker.worker import Worker

log = event_logger(__name__)


class PrefillServicer(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @stream_method
    async def Prefill(
        self, message: prefill_pb2.PrefillRequest, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillResponse]:
        worker = self._worker
        try:
            # Its blocks may be cut another way, as long as all that it needs is in ours.
            Reslice(KVLayout.from_proto(message.layout), worker.layout).require_all_heads()
        except LayoutMismatchError as error:
            raise LayoutMismatchError(
                f"prefill worker {worker.node_id} cannot serve {message.reader_node_id}: {error.message}"
            ) from error
        request = self._parse(message)
        with tracing.serving("prefill", {"biphase.node": worker.node_id}) as span, worker.accept(request):
            queue: EventQueue = asyncio.Queue()
            lease = worker.leases.open(
                message.reader_node_id,
                message.reader_incarnation,
                on_end=lambda lease, why: self._lease_ended(request, lease, why),
            )
            done = False
            try:
                yield prefill_pb2.PrefillResponse(
                    accepted=prefill_pb2.PrefillAccepted(
                        lease_id=lease.lease_id,
                        lease_seconds=worker.leases.lease_seconds,
                        endpoint=worker.endpoint,
                    )
                )
                # After the answer: a grammar may take a while to compile, and silence is taken for a frozen worker.
                await worker.prepare(request)
                # Closed first, whoever leaves: what it holds must not wait for the garbage collector.
                async with aclosing(self._run(request, lease, queue)) as answers:
                    async for answer in answers:
                        yield answer
                done = True
            finally:
                tell_phases(span, request, worker.node_id, fetches=True)
                worker.engine.abort(request.request_id)
                if not done:
                    # The caller is gone or the work failed: nobody will read these blocks.
                    worker.leases.release([lease.lease_id])

    def _parse(self, message: prefill_pb2.PrefillRequest) -> Request:
        worker = self._worker
        if message.num_held_tokens > len(message.token_ids):
            raise InvalidRequestError(
                f"num_held_tokens is {message.num_held_tokens} of {len(message.token_ids)} tokens"
            )
        return parse_request(
            message,
            worker.own_id(message.request_id),
            worker.core.model.vocab_size,
            prefill_only=True,
            # Where the reader's blocks are smaller, what it has may end within one of ours: that one is announced.
            num_held_blocks=message.num_held_tokens // worker.settings.block_size,
        )

    async def _run(
        self, request: Request, lease: Lease, queue: EventQueue
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        worker = self._worker
        token_ids = request.all_token_ids
        pins = IoPins(worker.pool)

        def sink(event: EngineEvent) -> None:
            # In the engine's thread, while the request still holds these blocks.
            if isinstance(event, BlocksComputed):
                worker.leases.extend(lease.lease_id, [block.block_id for block in event.blocks])
            elif isinstance(event, Reserved):
                pins.take(event.block_ids)
            worker.bridge.post(queue, event)

        plan = worker.prefixes.plan(request)
        request.awaits_kv = plan is not None
        worker.engine.add_request(request, sink)
        fetched: asyncio.Task[None] | None = None
        token: Tokens | None = None
        prompt_logprobs: list[TokenLogprobs] = []
        try:
            while True:
                event = await queue.get()
                if isinstance(event, Reserved):
                    assert plan is not None
                    fetched = asyncio.create_task(worker.prefixes.load(request, plan, event))
                elif isinstance(event, BlocksComputed):
                    yield prefill_pb2.PrefillResponse(
                        blocks_committed=prefill_pb2.BlocksCommitted(
                            blocks=[
                                common_pb2.BlockHandle(
                                    index=block.index,
                                    block_id=block.block_id,
                                    generation=block.generation,
                                    block_hash=block.block_hash,
                                )
                                for block in event.blocks
                            ]
                        )
                    )
                elif isinstance(event, Tokens):
                    prompt_logprobs.extend(event.prompt_logprobs)
                    token = event if event.token_ids else token
                elif isinstance(event, Finished):
                    if isinstance(event.error, InvalidRequestError):
                        raise event.error
                    if event.reason is FinishReason.ABORT:
                        raise DeadlineExceededError(f"the lease of {request.request_id} ended before its prefill did")
                    if event.reason is FinishReason.ERROR or token is None:
                        raise InternalError(f"prefill of {request.request_id} failed: {event.error or 'no token'}")
                    break
        finally:
            # Nothing is awaited here: a call that is cancelled while it ends would skip what follows.
            pins.release_after(fetched)
        done = self._done(request, token_ids, token, prompt_logprobs)
        # Before the last message: its reader may be gone by the next line.
        worker.offer(request, request.num_cached_tokens + request.num_external_tokens)
        yield prefill_pb2.PrefillResponse(done=done)

    def _done(
        self, request: Request, token_ids: list[int], token: Tokens, prompt_logprobs: list[TokenLogprobs]
    ) -> prefill_pb2.PrefillDone:
        worker = self._worker
        num_tokens = len(token_ids)
        assert request.first_scheduled_time is not None
        assert request.first_token_time is not None
        done = prefill_pb2.PrefillDone(
            first_token_id=token.token_ids[0],
            prompt_logprobs=[logprobs_to_proto(entry) for entry in prompt_logprobs],
            num_tokens=num_tokens,
            chain_hash=commit_hash(
                request.block_hashes, worker.root_hash(request.cache_salt), token_ids, worker.settings.block_size
            ),
            num_cached_tokens=request.num_cached_tokens,
            num_external_tokens=request.num_external_tokens,
            num_computed_tokens=num_tokens - request.num_cached_tokens - request.num_external_tokens,
            queue_seconds=request.first_scheduled_time - request.arrival_time,
            prefill_seconds=request.first_token_time - request.first_scheduled_time,
            spans=engine_spans(request, worker.node_id, fetches=True),
        )
        if token.logprobs:
            done.first_logprobs.CopyFrom(logprobs_to_proto(token.logprobs[0]))
        worker.metrics.prefilled(
            num_tokens, done.queue_seconds, done.prefill_seconds, time.monotonic() - request.arrival_time
        )
        log.info(
            "prefill_done",
            request_id=request.request_id,
            num_tokens=num_tokens,
            num_cached_tokens=done.num_cached_tokens,
            num_external_tokens=done.num_external_tokens,
            num_computed_tokens=done.num_computed_tokens,
            queue_seconds=done.queue_seconds,
            prefill_seconds=done.prefill_seconds,
        )
        return done

    def _lease_ended(self, request: Request, lease: Lease, why: LeaseEnd) -> None:
        """A reader that stopped renewing is not worth computing for."""
        if why is not LeaseEnd.RELEASED:
            log.warning("handoff_lease_lost", request_id=request.request_id, why=why.value)
            self._worker.engine.abort(request.request_id)
