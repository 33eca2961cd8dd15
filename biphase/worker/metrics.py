"""A worker's numbers under the names of its /metrics, read off when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from biphase.telemetry.metrics import Reading
from biphase.transfer.readings import block_readings, lease_readings

if TYPE_CHECKING:
    from biphase.worker.worker import Worker


def readings(worker: Worker) -> Iterator[Reading]:
    """The present values of what is not counted as it happens. From any thread; good to a step or two."""
    stats = worker.engine.stats()
    rate = stats.prefill_tokens_per_second
    plain = {
        "vllm:num_requests_running": stats.num_running,
        "vllm:num_requests_waiting": stats.num_waiting,
        "vllm:prompt_tokens": stats.num_prefill_tokens,
        "vllm:generation_tokens": stats.num_generated_tokens,
        "vllm:prefix_cache_queries": stats.prefix_cache_queries_tokens,
        "vllm:prefix_cache_hits": stats.prefix_cache_hits_tokens,
        "vllm:num_preemptions": stats.num_preemptions,
        "vllm:kv_cache_usage_perc": stats.num_used_blocks / stats.num_blocks if stats.num_blocks else 0.0,
        "biphase:kv_waste_ratio": stats.kv_waste_ratio,
        "biphase:queued_prefill_tokens": stats.num_queued_prefill_tokens,
        "biphase:queued_prefill_seconds": stats.num_queued_prefill_tokens / rate if rate else 0.0,
        "biphase:prefill_tokens_per_second": rate,
        "biphase:decode_step_seconds": stats.decode_step_seconds,
        "biphase:requests_waiting_for_kv": stats.num_waiting_for_remote_kv,
        "biphase:engine_steps": stats.num_steps,
    }
    for name, value in plain.items():
        yield name, value, {}
    for reason, count in stats.num_finished.items():
        yield "vllm:request_success", count, {"finished_reason": reason}
    size = {"block_size": str(worker.settings.block_size), "num_gpu_blocks": str(stats.num_blocks)}
    yield "vllm:cache_config_info", 1, size
    yield from block_readings(stats.num_blocks, stats.num_used_blocks, stats.num_cached_blocks)
    yield from lease_readings([worker.leases.counts()], stats.num_draining_blocks)
    sent = worker.server.stats()
    yield "biphase:sent_bytes", sent.num_bytes_sent, {}
    yield "biphase:sent_blocks", sent.num_blocks_sent, {}
    yield from _offers(worker)
    yield from worker.cluster.readings()


def _offers(worker: Worker) -> Iterator[Reading]:
    counts, prefixes = worker.offers.counts, worker.prefixes.counts
    outcomes = {
        "offered": counts.num_offered_blocks,
        "stored": counts.num_stored_blocks,
        "refused": counts.num_refused_blocks,
        "postponed": counts.num_postponed_blocks,
        "given_up": counts.num_given_up_blocks,
        "lost": worker.offers.evictions.num_lost_blocks,
    }
    for outcome, count in outcomes.items():
        yield "biphase:offer_blocks", count, {"outcome": outcome}
    yield "biphase:offers_dropped", counts.num_dropped_chains, {}
    yield "biphase:offers_failed", counts.num_failed_calls, {}
    fetches = {
        "started": prefixes.num_fetches,
        "failed": prefixes.num_failed,
        "not_worth_it": prefixes.num_not_worth_it,
    }
    for outcome, count in fetches.items():
        yield "biphase:prefix_fetches", count, {"outcome": outcome}
    yield "biphase:prefix_fetched_blocks", prefixes.num_fetched_blocks, {}
