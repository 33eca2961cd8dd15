"""Steps whose results are not in: what is known of their requests already, and what must be kept for them.

The step after one in flight is decided as if each sequence that samples in it went on: by one token that nobody has
seen yet, which the runner feeds on. Two kinds of request are not decided on so: those that the awaited token ends in
any case are over, and those whose next token depends on the host's knowledge of the last (`num_awaited_outputs`) let
the whole step wait for the result. Counters of requests change with results only.

Blocks that a step in flight writes or reads stay in use until its result is in, whatever became of their requests.
Owns none of the decisions (scheduler); one thread, the engine's, calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from biphase.cache.manager import KVCacheManager
from biphase.request import Request, SamplingParams
from biphase.scheduler.output import ScheduledRequest, SchedulerOutput


class ResultNeeded(Exception):
    """The step cannot be decided before the result of the one in flight."""


@dataclass(slots=True)
class _Step:
    output: SchedulerOutput
    shares: dict[Request, ScheduledRequest]
    # Blocks whose requests gave them up while the step ran.
    held_blocks: list[list[int]] = field(default_factory=list)


class StepsInFlight:
    """At most two: one that runs, and one that was begun after it.

    Args:
        num_awaited_outputs: of a request with these parameters the host must know so many output tokens, each before
            the next is sampled; 0 where it need not know any.
    """

    def __init__(
        self, manager: KVCacheManager, max_model_len: int, num_awaited_outputs: Callable[[SamplingParams], int]
    ) -> None:
        self._manager = manager
        self._max_model_len = max_model_len
        self._num_awaited_outputs = num_awaited_outputs
        self._steps: list[_Step] = []
        # Requests that await their outputs' beginning, and how much of it.
        self._awaiting: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def shares(self) -> dict[Request, ScheduledRequest]:
        """Of the newest step."""
        return self._steps[-1].shares if self._steps else {}

    # ---- requests

    def add_request(self, request: Request) -> None:
        if count := self._num_awaited_outputs(request.sampling):
            self._awaiting[request] = count

    def remove_request(self, request: Request) -> None:
        """A request gives up its blocks, which it still has. What a step in flight touches is kept until its result."""
        self._awaiting.pop(request, None)
        for step in reversed(self._steps):
            if request in step.shares:
                block_ids = list(self._manager.block_ids(request))
                self._manager.pool.acquire(block_ids)
                step.held_blocks.append(block_ids)
                return

    def awaits_output(self, requests: Iterable[Request]) -> bool:
        """Whether the host must know the next token of any of these before the one after it."""
        awaiting = self._awaiting
        return bool(awaiting) and any(request.num_output_tokens < awaiting.get(request, 0) for request in requests)

    def progress(self, request: Request) -> tuple[int, int]:
        """Computed tokens and all tokens of a running request once every step in flight is done.

        The two are equal when the newest token of the latter, which is not known yet, ends the request in any case.
        """
        num_computed_tokens, num_tokens = request.num_computed_tokens, request.num_tokens
        share = self.shares.get(request)
        if share is not None:
            num_computed_tokens = share.num_computed_tokens + share.num_scheduled_tokens
            if share.samples and not self._ends_with_next(request, num_tokens):
                num_tokens = num_computed_tokens + 1
        return num_computed_tokens, num_tokens

    def _ends_with_next(self, request: Request, num_tokens: int) -> bool:
        return (
            request.prefill_only
            or request.num_output_tokens + 1 >= request.sampling.max_tokens
            or num_tokens + 1 >= self._max_model_len
        )

    @property
    def goes_on(self) -> bool:
        """Whether the newest step samples for a request that may go on after it: else there is nothing to gain."""
        return any(
            share.samples and not self._ends_with_next(request, request.num_tokens)
            for request, share in self.shares.items()
        )

    # ---- steps

    def begin(self, output: SchedulerOutput) -> None:
        assert len(self._steps) < 2, "a third step in flight"
        self._steps.append(_Step(output, {scheduled.request: scheduled for scheduled in output.scheduled}))

    def end(self, output: SchedulerOutput) -> None:
        """The step's result is in: what was kept for it is free."""
        step = next(step for step in self._steps if step.output is output)
        self._steps.remove(step)
        for request, share in self.shares.items():
            # Not earlier: what the step before took began before that.
            if share.scheduled_time is not None:
                request.last_scheduled_time = share.scheduled_time
        for block_ids in step.held_blocks:
            self._manager.pool.release(block_ids)

    def check_integrity(self) -> None:
        """Asserts that blocks of steps in flight are in use."""
        for step in self._steps:
            for request, share in step.shares.items():
                for block_id in share.block_ids:
                    assert self._manager.pool.ref_count(block_id) > 0, (
                        f"block {block_id} of {request.request_id} is free"
                    )
