"""Numbers about an engine: what its rates are, and a snapshot for status and metrics. Plain data, no metric names."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.cache.manager import KVCacheManager
from biphase.request import RequestStatus
from biphase.scheduler.scheduler import Scheduler

# Weight of the past in the moving figures, per step.
_DECAY = 0.9


@dataclass(frozen=True, slots=True)
class EngineStats:
    """One moment of one engine. Counters count from its start; ratios are 0 where nothing was measured yet."""

    num_running: int
    num_waiting: int  # the preempted included
    num_waiting_for_remote_kv: int
    num_preempted: int  # of those waiting
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_draining_blocks: int
    # Wasted KV memory: the share of held blocks' token slots that hold no token, 0 to 1.
    kv_waste_ratio: float
    # Prompt tokens to be computed here, cached ones not counted.
    num_queued_prefill_tokens: int
    prefill_tokens_per_second: float
    decode_step_seconds: float
    prefix_cache_queries_tokens: int
    prefix_cache_hits_tokens: int
    num_preemptions: int
    num_steps: int
    num_prefill_tokens: int
    num_generated_tokens: int
    # By finish reason.
    num_finished: dict[str, int]


class StepMeter:
    """Moving rates from the steps that show them clearly.

    A step's time is its decode part plus its prompts' part. Steps without prompt tokens show the first, and the rest
    of a step with at least `min_prefill_tokens` of them the second.
    """

    def __init__(self, min_prefill_tokens: int = 16) -> None:
        self._min_prefill_tokens = min_prefill_tokens
        self._prefill_tokens = 0.0
        self._prefill_seconds = 0.0
        self.decode_step_seconds = 0.0
        self.num_steps = 0
        self.num_prefill_tokens = 0

    @property
    def prefill_tokens_per_second(self) -> float:
        return self._prefill_tokens / self._prefill_seconds if self._prefill_seconds else 0.0

    def record(self, num_decode_tokens: int, num_prefill_tokens: int, seconds: float) -> None:
        self.num_steps += 1
        self.num_prefill_tokens += num_prefill_tokens
        if num_prefill_tokens == 0:
            past = self.decode_step_seconds or seconds
            self.decode_step_seconds = _DECAY * past + (1 - _DECAY) * seconds
        elif num_prefill_tokens >= self._min_prefill_tokens:
            if num_decode_tokens:
                # At least a tenth of the step, should this decode part have been far quicker than usual.
                seconds = max(seconds - self.decode_step_seconds, seconds / 10)
            # Sums, not rates, so that a big chunk weighs more than a small one.
            self._prefill_tokens = _DECAY * self._prefill_tokens + num_prefill_tokens
            self._prefill_seconds = _DECAY * self._prefill_seconds + seconds


def collect(scheduler: Scheduler, manager: KVCacheManager, meter: StepMeter, num_arriving: int) -> EngineStats:
    """A snapshot, from any thread: good for people and for routing, not exact to the step.

    Args:
        num_arriving: requests that the scheduler has not seen yet; they count as waiting.
    """
    pool = manager.pool
    # Copies: the engine's thread goes on changing these lists.
    waiting, running = list(scheduler.places.waiting.requests), list(scheduler.places.running.requests)
    return EngineStats(
        num_running=len(running),
        num_waiting=len(waiting) + num_arriving,
        num_waiting_for_remote_kv=len(scheduler.places.remote),
        num_preempted=sum(request.status is RequestStatus.PREEMPTED for request in waiting),
        num_blocks=pool.num_blocks,
        num_used_blocks=pool.num_used,
        num_cached_blocks=pool.num_cached,
        num_draining_blocks=manager.num_draining_blocks,
        kv_waste_ratio=manager.waste_ratio(running),
        num_queued_prefill_tokens=sum(r.num_uncached_tokens for r in waiting if not r.awaits_kv)
        + sum(max(0, r.num_tokens - r.num_computed_tokens - 1) for r in running),
        prefill_tokens_per_second=meter.prefill_tokens_per_second,
        decode_step_seconds=meter.decode_step_seconds,
        prefix_cache_queries_tokens=manager.num_query_tokens,
        prefix_cache_hits_tokens=manager.num_hit_tokens,
        num_preemptions=scheduler.num_preemptions,
        num_steps=meter.num_steps,
        num_prefill_tokens=meter.num_prefill_tokens,
        num_generated_tokens=scheduler.num_generated_tokens,
        num_finished={reason.value: count for reason, count in scheduler.num_finished.copy().items()},
    )
