"""The engine: one thread that takes requests in, runs step after step, and tells each request's owner what came of it.

    other threads                     engine thread
    add_request ─┐                    ┌─> inbox ─> schedule ─> runner.execute ─> inbox ─> update ─┐
    abort ───────┼─> inbox ─> wake    └──────────────────────────<────────────────────────────────┘
    kv_ready ────┘                        sinks are called in schedule and update; after_step after each

Where steps overlap, the runner begins the step that was scheduled, and the update is of the one before (steps.py).
Owns the thread, the inbox and the sinks. Does not own what runs (scheduler), where (manager) or how (runner). Sleeps on
a condition when nothing can run: until somebody calls, or blocks are released elsewhere.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from biphase.cache.manager import KVCacheManager
from biphase.errors import BiphaseError, InvalidRequestError, OverloadedError, UnavailableError
from biphase.request import FinishReason, Request, RequestId
from biphase.scheduler.config import SchedulerConfig
from biphase.scheduler.events import BlocksComputed, EngineEvent, Finished, Reserved, Tokens
from biphase.scheduler.output import SampledToken
from biphase.scheduler.scheduler import Scheduler, awaits_nothing
from biphase.scheduler.stats import EngineStats, StepMeter, collect
from biphase.scheduler.stopping import check_request
from biphase.steps import Runner, Steps, overlapping_runner
from biphase.telemetry.events import event_logger

__all__ = [
    "BlocksComputed",
    "Engine",
    "EngineEvent",
    "EngineStats",
    "Finished",
    "Reserved",
    "Runner",
    "SchedulerConfig",
    "Sink",
    "Tokens",
]

log = event_logger(__name__)

Sink = Callable[[EngineEvent], None]


def _nothing() -> None:
    return None


class Engine:
    """Continuous batching over one runner and one KV cache.

    Args:
        runner: called in the engine's thread only; with `config.overlap`, one that begins and finishes steps.
        manager: its pool may be shared with leases and transfers.
        after_step: called in the engine's thread whenever events have gone out: before a step that reservations or
            announcements precede, and after each step. The place to hop to another thread once for all of them.
        clock: monotonic seconds.
        stepped: called in the engine's thread after each step, with the number of its tokens.
        blocks_arrived: called in the engine's thread with the blocks that were read from another node, before anybody
            may use them.
    """

    def __init__(
        self,
        runner: Runner,
        manager: KVCacheManager,
        config: SchedulerConfig,
        *,
        after_step: Callable[[], None] = _nothing,
        clock: Callable[[], float] = time.monotonic,
        blocks_arrived: Callable[[Sequence[int]], None] = lambda block_ids: None,
        stepped: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        self.config = config
        self.manager = manager
        self._after_step = after_step
        awaited = overlapping_runner(runner).num_awaited_outputs if config.overlap else awaits_nothing
        self._scheduler = Scheduler(manager, config, self._emit, clock, blocks_arrived, awaited)
        self._meter = StepMeter()
        self._steps = Steps(
            runner, self._scheduler, self._meter, read_inbox=self._read_inbox, stepped=stepped, clock=clock
        )
        self._wake = threading.Condition(threading.Lock())
        self._inbox: deque[Callable[[], None]] = deque()
        self._num_arriving = 0
        self._sinks: dict[RequestId, Sink] = {}
        self._stopping = False
        # Why the engine stopped by itself; its process is of no use any more.
        self.failure: BiphaseError | None = None
        self._idle = False
        self._blocks_freed = False
        self._has_emitted = False
        self._thread: threading.Thread | None = None
        manager.pool.add_listener(freed=self._on_blocks_freed)

    # ---- any thread

    def start(self) -> None:
        assert self._thread is None, "the engine runs already"
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def shutdown(self) -> None:
        """Ends the current step, aborts what is left and joins the thread. Later requests are refused."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()
        else:
            self._abort_all()

    def add_request(self, request: Request, sink: Sink) -> None:
        """Queues a request.

        Args:
            sink: called with each event in the engine's thread; has to be quick.

        Raises:
            InvalidRequestError: it can never run here, or its id is in use.
            OverloadedError: max_waiting requests wait already.
            UnavailableError: the engine is shut down.
        """
        pool = self.manager.pool
        check_request(
            request,
            max_model_len=self.config.max_model_len,
            num_blocks=pool.num_blocks,
            block_size=self.manager.block_size,
        )
        if len(self._scheduler.places.waiting) + self._num_arriving >= self.config.max_waiting:
            self._refuse_for_load()
        self.manager.prepare(request)
        with self._wake:
            if self._stopping:
                raise self.failure or UnavailableError("the engine is shutting down")
            if request.request_id in self._sinks:
                raise InvalidRequestError(f"request id {request.request_id!r} is in use", param="request_id")
            if len(self._scheduler.places.waiting) + self._num_arriving >= self.config.max_waiting:
                self._refuse_for_load()
            self._sinks[request.request_id] = sink
            self._num_arriving += 1
            self._inbox.append(partial(self._take, request))
            self._wake.notify()

    def abort(self, request_id: str) -> None:
        """Ends a request before the next step, with Finished(ABORT). Unknown or ended: nothing happens."""
        self._post(partial(self._scheduler.abort, RequestId(request_id)))

    def kv_ready(
        self,
        request_id: str,
        *,
        num_valid_tokens: int,
        num_external_tokens: int,
        first_token: SampledToken | None = None,
    ) -> None:
        """Says what arrived for an awaits_kv request after its Reserved event; it runs on from there.

        Args:
            num_valid_tokens: tokens [0, num_valid_tokens) are in the reserved blocks; less is computed here.
            num_external_tokens: how many of them were read from another node.
            first_token: the token after all of the request's, when the hand-off is complete.
        """
        self._post(
            partial(self._scheduler.kv_ready, RequestId(request_id), num_valid_tokens, num_external_tokens, first_token)
        )

    @property
    def num_waiting(self) -> int:
        """Requests that have no place yet."""
        return len(self._scheduler.places.waiting) + self._num_arriving

    def stats(self) -> EngineStats:
        return collect(self._scheduler, self.manager, self._meter, self._num_arriving)

    def _refuse_for_load(self) -> None:
        rate = self._meter.prefill_tokens_per_second
        queued = sum(request.num_uncached_tokens for request in list(self._scheduler.places.waiting.requests))
        # Half the queue gone is a good moment to come back.
        wait = min(max(queued / rate / 2, 1.0), 60.0) if rate else 1.0
        raise OverloadedError(f"{self.config.max_waiting} requests are waiting already", retry_after_seconds=wait)

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _on_blocks_freed(self) -> None:
        # Under the pool's lock, from any thread. The flag goes up before the look at _idle, and the engine says that
        # it is idle before its look at the flag: one of the two sees the other.
        self._blocks_freed = True
        if self._idle:
            with self._wake:
                self._wake.notify()

    # ---- the engine's thread

    def step(self) -> bool:
        """Runs one step in the calling thread, as the engine's thread does. False: there was nothing to run."""
        self._read_inbox()
        self._blocks_freed = False
        output = self._scheduler.schedule()
        self._flush()
        ran = self._steps.run(output)
        self._flush()
        return ran

    def _run(self) -> None:
        while not self._stopping:
            try:
                if not self.step():
                    self._sleep()
            except Exception as error:
                log.exception("engine_failed")
                self._give_up(UnavailableError(f"the engine failed: {error!r}"))
                return
        self._abort_all()

    def _give_up(self, failure: BiphaseError) -> None:
        """After a bug of ours. What it left is unknown and nobody's next token could be trusted: all is over."""
        with self._wake:
            self.failure = failure
            self._stopping = True
            sinks, self._sinks = self._sinks, {}
        self._steps.abandon()
        for sink in sinks.values():
            with suppress(Exception):
                sink(Finished(FinishReason.ERROR, error=failure))
        self._has_emitted = True
        self._flush()

    def _sleep(self) -> None:
        with self._wake:
            self._idle = True
            while not (self._inbox or self._stopping or self._blocks_freed):
                self._wake.wait()
            self._idle = False

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _take(self, request: Request) -> None:
        self._scheduler.add(request)
        with self._wake:
            self._num_arriving -= 1

    def _abort_all(self) -> None:
        self._steps.settle()
        self._read_inbox()
        for request_id in list(self._scheduler.places.requests):
            self._scheduler.abort(request_id)
        self._flush()

    def _emit(self, request: Request, event: EngineEvent) -> None:
        self._has_emitted = True
        request_id = request.request_id
        # An ended request's id is free before its owner hears of the end.
        sink = self._sinks.pop(request_id) if isinstance(event, Finished) else self._sinks[request_id]
        try:
            sink(event)
        except Exception:
            log.exception("sink_failed", request_id=request_id, kind=type(event).__name__)
            if not isinstance(event, Finished):
                self.abort(request_id)

    def _flush(self) -> None:
        if self._has_emitted:
            self._has_emitted = False
            try:
                self._after_step()
            except Exception:
                log.exception("after_step_failed")
