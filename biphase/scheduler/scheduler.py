"""What runs in the next step, and what its result means for each request. Plain data in and out.

A request's way through the places of places.py:

    add -> waiting -> running -> finished            preempted: running -> waiting, and computed anew
                 \\-> remote -> running               kv_ready

Where steps overlap (`config.overlap`), `schedule` may be called while the step before is in flight; see ahead.py.

Owns the order, the token budget, preemption and the end of sequences. Does not own blocks (KVCacheManager), threads or
sinks (Engine), nor anything with tensors (runner). One thread, the engine's, calls it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from heapq import merge

from biphase.cache.manager import KVCacheManager
from biphase.errors import BiphaseError, InternalError
from biphase.request import FinishReason, Request, RequestId, RequestStatus, SamplingParams
from biphase.scheduler.ahead import ResultNeeded, StepsInFlight
from biphase.scheduler.config import SchedulerConfig
from biphase.scheduler.events import EngineEvent
from biphase.scheduler.output import RunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from biphase.scheduler.places import RequestPlaces
from biphase.scheduler.ranking import rank_by_arrival, rank_by_priority, shortest_first
from biphase.scheduler.reporter import Reporter
from biphase.scheduler.stopping import finish_reason

_FINISHED = {
    FinishReason.STOP: RequestStatus.FINISHED_STOPPED,
    FinishReason.LENGTH: RequestStatus.FINISHED_LENGTH,
    FinishReason.ABORT: RequestStatus.FINISHED_ABORTED,
    FinishReason.ERROR: RequestStatus.FINISHED_ERROR,
}


def awaits_nothing(sampling: SamplingParams) -> int:
    return 0


class Scheduler:
    """Decides every step anew, decodes first.

    Args:
        emit: gets a request's events as they happen, while the request still holds its blocks.
        clock: monotonic seconds.
        blocks_arrived: gets the blocks that were read from another node, before anybody may use them.
        num_awaited_outputs: see StepsInFlight; asked only where steps overlap.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        config: SchedulerConfig,
        emit: Callable[[Request, EngineEvent], None],
        clock: Callable[[], float] = time.monotonic,
        blocks_arrived: Callable[[Sequence[int]], None] = lambda block_ids: None,
        num_awaited_outputs: Callable[[SamplingParams], int] = awaits_nothing,
    ) -> None:
        self.config = config
        self._manager = manager
        self._in_flight = StepsInFlight(manager, config.max_model_len, num_awaited_outputs)
        self._blocks_arrived = blocks_arrived
        self._reporter = Reporter(manager, emit, clock)
        self._clock = clock
        self._block_size = manager.block_size
        self._num_watermark_blocks = int(config.watermark * manager.pool.num_blocks)
        self._is_shortest_first = config.policy == "shortest_first"
        self.places = RequestPlaces(rank_by_arrival if config.policy == "fcfs" else rank_by_priority)
        self._finished_ids: list[RequestId] = []
        self.num_preemptions = 0
        self.num_generated_tokens = 0
        self.num_finished: Counter[FinishReason] = Counter()

    # ---- arrivals

    def add(self, request: Request) -> None:
        """Queues a request that `check_request` accepted and `KVCacheManager.prepare` saw."""
        self.places.add(request)
        if self.config.overlap:
            self._in_flight.add_request(request)

    def abort(self, request_id: RequestId) -> None:
        """Ends a request wherever it is. Unknown or ended: nothing happens."""
        request = self.places.requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)

    def kv_ready(
        self,
        request_id: RequestId,
        num_valid_tokens: int,
        num_external_tokens: int,
        first_token: SampledToken | None = None,
    ) -> None:
        """Tokens [0, num_valid_tokens) of a request in `remote` are in its blocks now; it runs from there.

        Args:
            num_external_tokens: how many of them came from another node.
            first_token: the next token, which the other node sampled; only with all tokens valid.
        """
        request = self.places.remote.get(request_id)
        if request is None:
            return
        num_tokens = request.num_tokens
        # Without its logits known, the last token is run here whatever came.
        limit = num_tokens if first_token is not None else num_tokens - 1
        # What its own cache had is valid too, and shared: it must never be written again.
        num_own_tokens = request.num_computed_tokens
        request.num_computed_tokens = max(num_own_tokens, min(num_valid_tokens, limit))
        if request.num_computed_tokens > num_own_tokens:
            first, last = num_own_tokens // self._block_size, -(-request.num_computed_tokens // self._block_size)
            self._blocks_arrived(self._manager.block_ids(request)[first:last])
        request.num_external_tokens = min(num_external_tokens, request.num_computed_tokens - request.num_cached_tokens)
        request.awaits_kv = False
        request.kv_ready_time = self._clock()
        self.places.move(request, RequestStatus.RUNNING)
        self._manager.cache_blocks(request)
        if request.prefill_only:
            self._reporter.announce(request)
        if first_token is not None:
            if num_valid_tokens != num_tokens:
                message = f"a first token came with {num_valid_tokens} of {num_tokens} tokens"
                self._finish(request, FinishReason.ERROR, InternalError(message))
                return
            self._append(request, first_token)

    # ---- a step

    def schedule(self) -> SchedulerOutput:
        """One token for every running sequence that decodes, then prompts in chunks until the budget is spent.

        Empty when nothing can run: all is idle, or waits for KV, for blocks or for the result of the step in flight.
        """
        output = SchedulerOutput()
        running = self.places.running.requests
        ahead = bool(self._in_flight)
        if ahead and (not self._in_flight.goes_on or self._in_flight.awaits_output(running)):
            return output
        try:
            self._fill(output)
        except ResultNeeded:
            return SchedulerOutput()
        if ahead and self._in_flight.awaits_output(scheduled.request for scheduled in output.scheduled):
            return SchedulerOutput()  # Admitted just now; it runs from the next step on.
        if output.scheduled:
            output.finished, self._finished_ids = self._finished_ids, []
            if self.config.overlap:
                self._in_flight.begin(output)
        return output

    def _fill(self, output: SchedulerOutput) -> None:
        prompts = self._schedule_decodes(output)
        if prompts or self.places.waiting.requests:
            budget = self.config.max_num_batched_tokens - len(output.scheduled)
            if self.config.max_mixed_prefill_tokens and output.scheduled:
                budget = min(budget, self.config.max_mixed_prefill_tokens)
            self._schedule_prompts(prompts, budget, output)

    def _schedule_decodes(self, output: SchedulerOutput) -> list[Request]:
        """Schedules sequences that need one token. Returns the running ones that need more, most important first."""
        prompts: list[Request] = []
        scheduled, running, block_size = output.scheduled, self.places.running.requests, self._block_size
        shares = self._in_flight.shares
        position = 0
        while position < len(running):
            request = running[position]
            position += 1
            num_computed_tokens = request.num_computed_tokens
            left = request.num_tokens - num_computed_tokens
            if shares:
                num_computed_tokens, num_tokens = self._in_flight.progress(request)
                left = num_tokens - num_computed_tokens
                if left == 0:
                    continue
            if left > 1:
                prompts.append(request)
                continue
            block_ids = self._manager.block_ids(request)
            if num_computed_tokens >= len(block_ids) * block_size and not self._grow_decode(
                request, num_computed_tokens + 1, output
            ):
                break
            scheduled.append(ScheduledRequest(request, num_computed_tokens, 1, block_ids, True))
        return [request for request in prompts if request.status is RequestStatus.RUNNING]

    def _grow_decode(self, request: Request, num_tokens: int, output: SchedulerOutput) -> bool:
        """A block for the next token, at the cost of the least important running requests: at worst its own place.

        `_schedule_decodes` goes from the most important on, so whoever goes is not in this step yet.
        """
        while not self._manager.allocate_slots(request, num_tokens):
            victim = self.places.running.requests[-1]
            self._preempt(victim, output)
            if victim is request:
                return False
        return True

    def _schedule_prompts(self, prompts: list[Request], budget: int, output: SchedulerOutput) -> None:
        """Hands `budget` tokens to prompts in progress and, as long as nobody lacks blocks, to waiting requests.

        Both stand in one order, the policy's. Under shortest_first a step that completes a prompt carries no chunk of
        one that it does not complete: that would only delay the first.
        """
        now = self._clock()
        waiting = list(self.places.waiting.requests)
        order: Iterable[Request]
        if self._is_shortest_first:
            order = shortest_first(prompts + waiting, self.config.ageing_seconds, now)
        else:
            order = merge(prompts, waiting, key=self.places.waiting.rank)
        unserved = list(prompts)
        may_admit = not output.preempted
        completes = False
        for request in order:
            if not (may_admit or (unserved and budget)):
                break
            if request.status is RequestStatus.RUNNING:
                num_computed_tokens, num_tokens = self._in_flight.progress(request)
                left = num_tokens - num_computed_tokens
                if budget == 0 or (completes and left > budget):
                    continue
                has_room = self._make_room(request, num_computed_tokens + min(left, budget), unserved, output)
                unserved.remove(request)
                may_admit = may_admit and not output.preempted
                if not has_room:
                    continue
            else:
                if not may_admit or (completes and request.num_uncached_tokens > budget):
                    continue
                # A reservation costs no tokens; everything else waits for them, and nobody overtakes.
                may_admit = (budget > 0 or request.awaits_kv) and self._admit(request, budget, now)
                if not may_admit or request.awaits_kv:
                    continue
                num_computed_tokens = request.num_computed_tokens
                left = request.num_tokens - num_computed_tokens
            num_scheduled_tokens = min(left, budget)
            budget -= num_scheduled_tokens
            samples = num_scheduled_tokens == left
            completes = completes or (samples and self._is_shortest_first)
            if not self._in_flight:
                request.last_scheduled_time = now
            block_ids = self._manager.block_ids(request)
            output.scheduled.append(
                ScheduledRequest(request, num_computed_tokens, num_scheduled_tokens, block_ids, samples, now)
            )

    def _make_room(self, request: Request, num_tokens: int, unserved: list[Request], output: SchedulerOutput) -> bool:
        """Blocks for a prompt in progress, at the cost of less important prompts that this step has not served.

        Decodes are left alone: they end and give blocks back, while a prompt only asks for more.
        """
        while not self._manager.allocate_slots(request, num_tokens):
            victim = unserved[-1]
            if victim is request:
                return False
            unserved.pop()
            self._preempt(victim, output)
        return True

    def _admit(self, request: Request, budget: int, now: float) -> bool:
        """Moves a waiting request to running, or to remote with all its blocks. False: no place or too few blocks."""
        num_active = self.places.num_active
        if num_active >= self.config.max_num_seqs:
            return False
        # Every sequence that runs is about to need a block; with none, the whole pool may go to one request.
        num_reserved_blocks = self._num_watermark_blocks + len(self.places.running) if num_active else 0
        num_total_tokens = request.num_tokens
        if request.awaits_kv and not request.prefill_only:
            num_total_tokens += 1  # A place for the token that comes with the KV.
        if not self._manager.admit(
            request,
            num_new_tokens=num_total_tokens if request.awaits_kv else budget,
            num_total_tokens=num_total_tokens,
            num_reserved_blocks=num_reserved_blocks,
        ):
            return False
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        if request.awaits_kv:
            self.places.move(request, RequestStatus.WAITING_FOR_REMOTE_KV)
            self._reporter.reserved(request)
        else:
            self.places.move(request, RequestStatus.RUNNING)
            if request.prefill_only:
                self._reporter.announce(request)
        return True

    def _preempt(self, request: Request, output: SchedulerOutput) -> None:
        """Takes a running request's blocks. It waits where its arrival puts it and computes all its tokens anew.

        Raises:
            ResultNeeded: a step is in flight, which may write those blocks and end sequences.
        """
        if self._in_flight:
            raise ResultNeeded
        self.places.move(request, RequestStatus.PREEMPTED)
        self._manager.free(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.num_uncached_tokens = request.num_tokens - self._manager.num_cached_tokens(request)
        request.prompt_logprobs.clear()
        self.num_preemptions += 1
        output.preempted.append(request.request_id)

    # ---- a step's result

    def update_from_output(self, output: SchedulerOutput, result: RunnerOutput) -> None:
        """Counts what was computed, commits full blocks, appends sampled tokens, ends sequences.

        Requests that ended since the step was decided are passed over, their tokens dropped.
        """
        block_size, now = self._block_size, 0.0
        for scheduled in output.scheduled:
            request = scheduled.request
            if request.status is not RequestStatus.RUNNING:
                continue
            num_computed_tokens = scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            request.num_computed_tokens = num_computed_tokens
            if num_computed_tokens // block_size > scheduled.num_computed_tokens // block_size:
                self._manager.cache_blocks(request)
            if request.prefill_only:
                self._reporter.announce(request)
            if request.first_token_time is None:
                now = now or self._clock()
                request.note_chunk(now, scheduled.num_scheduled_tokens)
                if result.prompt_logprobs:
                    request.prompt_logprobs += result.prompt_logprobs.get(request.request_id, ())
            if scheduled.samples:
                sampled = result.sampled.get(request.request_id)
                if sampled is None:
                    error = result.failed.get(request.request_id)
                    error = error or InternalError(f"the step sampled no token for {request.request_id}")
                    self._finish(request, FinishReason.ERROR, error)
                else:
                    self._append(request, sampled)
        if self.config.overlap:
            self._in_flight.end(output)

    def fail_step(self, output: SchedulerOutput, error: BiphaseError) -> None:
        """Ends every request of a step that did not come back."""
        for scheduled in output.scheduled:
            if scheduled.request.status is RequestStatus.RUNNING:
                self._finish(scheduled.request, FinishReason.ERROR, error)
        if self.config.overlap:
            self._in_flight.end(output)

    def _append(self, request: Request, sampled: SampledToken) -> None:
        self._reporter.append(request, sampled)
        self.num_generated_tokens += 1
        reason = finish_reason(request, self.config.max_model_len)
        if reason is None and request.prefill_only:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason, error: BiphaseError | None = None) -> None:
        """The one way out of every state."""
        self.places.remove(request, _FINISHED[reason])
        if self.config.overlap:
            self._in_flight.remove_request(request)
        if self._manager.has_blocks(request):
            self._manager.free(request)
        self.num_finished[reason] += 1
        self._finished_ids.append(request.request_id)
        self._reporter.finished(request, reason, error)

    def check_integrity(self) -> None:
        """Asserts that requests, blocks and counts agree."""
        self.places.check_integrity()
        assert self.places.num_active <= self.config.max_num_seqs
        for request in self.places.requests.values():
            has_blocks = request.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KV)
            assert self._manager.has_blocks(request) == has_blocks
            assert request.num_computed_tokens < request.num_tokens
            assert request.num_computed_tokens == 0 or has_blocks
            assert not has_blocks or self._manager.num_unused_slots(request) >= 0
        self._in_flight.check_integrity()
        self._manager.check_integrity()
