"""Has a runner do the steps that a scheduler decides, one after the other or overlapping, and takes their results in.

    alone         decide N, run N, take N in, decide N+1, ...
    overlapping   begin N+1 while N runs, take N in while N+1 runs, decide N+2, ...

Owns what is in flight and how long steps took. Does not own what runs (scheduler) nor when (engine). One thread, the
engine's, calls it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from biphase.errors import BiphaseError, InternalError
from biphase.request import SamplingParams
from biphase.scheduler.output import RunnerOutput, SchedulerOutput
from biphase.scheduler.scheduler import Scheduler
from biphase.scheduler.stats import StepMeter
from biphase.telemetry.events import event_logger

log = event_logger(__name__)


class Runner(Protocol):
    """Runs a step on the model: writes the KV of its tokens, samples where a request is caught up."""

    def execute(self, output: SchedulerOutput) -> RunnerOutput: ...


@runtime_checkable
class OverlappingRunner(Runner, Protocol):
    """Runs steps in two halves, in the order in which they were begun; at most two are in flight."""

    def begin(self, output: SchedulerOutput) -> Any:
        """Starts a step and waits for nothing. Tokens that the step before has yet to sample are fed to it on the way.

        Returns:
            What `finish` takes.
        """
        ...

    def finish(self, pending: Any) -> RunnerOutput:
        """Waits for a step that was begun."""
        ...

    def num_awaited_outputs(self, sampling: SamplingParams) -> int:
        """How many output tokens of such a request have to be in the request, each before the next is sampled."""
        ...


@dataclass(slots=True)
class _Begun:
    """`pending` is the runner's; `error` is why there is none."""

    output: SchedulerOutput
    started: float
    pending: Any = None
    error: Exception | None = None


class Steps:
    """The steps of one engine.

    Args:
        runner: an OverlappingRunner where the scheduler's config says overlap.
        read_inbox: called before a result is taken in: whoever was aborted meanwhile gets no token of that step.
        stepped: called after each step, with the number of its tokens.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        meter: StepMeter,
        *,
        read_inbox: Callable[[], None],
        stepped: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        self._runner = runner
        self._overlapping = overlapping_runner(runner) if scheduler.config.overlap else None
        self._scheduler = scheduler
        self._meter = meter
        self._read_inbox = read_inbox
        self._stepped = stepped
        self._clock = clock
        self._begun: _Begun | None = None
        self._last_end = float("-inf")

    def run(self, output: SchedulerOutput) -> bool:
        """Begins what was decided, if anything, and takes the next result in. False: there was neither.

        A step that fails ends its requests.
        """
        before, self._begun = self._begun, None
        if output.scheduled:
            self._begun = self._begin(output)
        if before is not None:
            self._complete(before)
        elif self._begun is None:
            return False
        if self._overlapping is None or (self._begun is not None and self._begun.error is not None):
            # One that could not begin leaves nothing that another could be begun after.
            self.settle()
        return True

    def settle(self) -> None:
        """Takes in the result of the step that is in flight, if one is."""
        begun, self._begun = self._begun, None
        if begun is not None:
            self._complete(begun)

    def abandon(self) -> None:
        """Waits for what is in flight, whatever comes of it: nobody writes into blocks any more."""
        begun, self._begun = self._begun, None
        if begun is not None and begun.pending is not None:
            with suppress(Exception):
                self._finish(begun)

    def _begin(self, output: SchedulerOutput) -> _Begun:
        begun = _Begun(output, self._clock())
        if self._overlapping is not None:
            try:
                begun.pending = self._overlapping.begin(output)
            except Exception as error:
                begun.error = error  # Told in turn: the step before may have good tokens for the same requests.
        return begun

    def _finish(self, begun: _Begun) -> RunnerOutput:
        if self._overlapping is None:
            return self._runner.execute(begun.output)
        if begun.error is not None:
            raise begun.error
        return self._overlapping.finish(begun.pending)

    def _complete(self, begun: _Begun) -> None:
        output = begun.output
        try:
            result = self._finish(begun)
        except Exception as error:
            log.exception(
                "step_failed",
                request_ids=[scheduled.request.request_id for scheduled in output.scheduled],
                num_requests=len(output.scheduled),
                num_tokens=output.num_tokens,
            )
            failure = error if isinstance(error, BiphaseError) else InternalError(f"the step failed: {error}")
            self._scheduler.fail_step(output, failure)
            return
        now = self._clock()
        # It began to run when the one before was through.
        seconds, self._last_end = now - max(begun.started, self._last_end), now
        self._read_inbox()
        self._scheduler.update_from_output(output, result)
        num_decode_tokens = sum(1 for s in output.scheduled if s.num_scheduled_tokens == 1)
        self._meter.record(num_decode_tokens, output.num_tokens - num_decode_tokens, seconds)
        self._stepped(output.num_tokens)


def overlapping_runner(runner: Runner) -> OverlappingRunner:
    assert isinstance(runner, OverlappingRunner), f"{type(runner).__name__} does not begin and finish steps"
    return runner
