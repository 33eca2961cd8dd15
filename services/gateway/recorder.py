"""What happened to each sequence: one log line, the metrics, and the recent ones for /status.

Of a sequence's content nothing is kept. A timeline is put together when somebody asks for it.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from biphase.rpc.v1 import common_pb2
from biphase.telemetry.events import event_logger
from biphase.telemetry.metrics import GatewayMetrics
from services.gateway.routing.policy import Decision
from services.gateway.timeline import Attempt, decision_object, num_lost, timeline

log = event_logger(__name__)

_RECENT = 256


@dataclass(slots=True, eq=False)
class SequenceRecord:
    """One sequence's times (monotonic) and counts, filled while it runs."""

    request_id: str
    endpoint: str
    num_prompt_tokens: int
    # Other choices of a prompt find what the first one left: no hits that count.
    counts_prompt: bool = True
    client_id: str = ""
    arrival: float = field(default_factory=time.monotonic)
    # When it began to wait for a place.
    entered: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output_tokens: int = 0
    num_moves: int = 0
    # Of the prompt, when the first token came; a later worker's cache says nothing about it.
    num_cached_tokens: int = 0
    # Of the worker that ended it.
    report: common_pb2.RequestReport | None = None
    # Its placements; the dispatcher's own list, which grows.
    attempts: Sequence[Attempt] = ()


@dataclass(slots=True)
class Totals:
    """Of this process's sequences, since its start."""

    num_finished: int = 0
    num_failed: int = 0
    num_moves: int = 0
    num_output_tokens: int = 0
    # Of the prompts of those that got a first token; cached: computed by nobody for them.
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _Finished:
    number: int
    row: dict[str, Any]
    record: SequenceRecord
    end: float


class Recorder:
    """
    Args:
        policy: name of the routing policy.
    """

    def __init__(self, metrics: GatewayMetrics, policy: str = "") -> None:
        self._metrics = metrics
        self._policy = policy
        self._recent: deque[_Finished] = deque(maxlen=_RECENT)
        self._active: dict[int, SequenceRecord] = {}
        # Wall clock less monotonic clock: what a monotonic time is called on a calendar.
        self._epoch = time.time() - time.monotonic()
        self.totals = Totals()
        # Routing's reasons, by count.
        self.decisions: Counter[str] = Counter()
        self._observe_itl: Callable[[float], None] = metrics.inter_token_latency.observe
        # HTTP requests being answered: what /load tells.
        self.num_open = 0

    def routed(self, decision: Decision) -> None:
        """Called for each placement."""
        self._metrics.routed(self._policy, decision.reason)
        self.decisions[decision.reason] += 1

    def began(self, record: SequenceRecord) -> None:
        """Called once per sequence; `finished` follows."""
        self._active[id(record)] = record

    def tokens(self, record: SequenceRecord, count: int) -> None:
        """Called once per message with tokens."""
        now = time.monotonic()
        if record.last_token is None:
            record.first_token = now
            self._metrics.time_to_first_token.observe(now - record.arrival)
            if record.counts_prompt:
                self._metrics.prompt_tokens.inc(record.num_prompt_tokens)
        else:
            self._observe_itl(now - record.last_token)
        record.last_token = now
        record.num_output_tokens += count
        self.totals.num_output_tokens += count
        self._metrics.generation_tokens.inc(count)

    def finished(self, record: SequenceRecord, reason: str, error_code: str = "") -> None:
        """Called once per sequence, however it ended: "stop", "length", "abort" or "error"."""
        now = time.monotonic()
        self._active.pop(id(record), None)
        self._metrics.finished(reason)
        self._count(record, error_code)
        if error_code:
            self._metrics.failed(error_code)
        self._metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
        self._metrics.request_generation_tokens.observe(record.num_output_tokens)
        self._metrics.e2e_request_latency.observe(now - record.arrival)
        if record.report is not None:
            self._path(record, record.report)
        row = self._row(record, reason, error_code, now)
        self._recent.append(_Finished(self.totals.num_finished, row, record, now))
        log.info("request_finished", **row)

    def _count(self, record: SequenceRecord, error_code: str) -> None:
        totals = self.totals
        totals.num_finished += 1
        totals.num_failed += bool(error_code)
        totals.num_moves += record.num_moves
        if record.first_token is not None and record.counts_prompt:
            totals.num_prompt_tokens += record.num_prompt_tokens
            totals.num_cached_tokens += record.num_cached_tokens

    def _path(self, record: SequenceRecord, report: common_pb2.RequestReport) -> None:
        metrics = self._metrics
        metrics.took_path(report.prefill_mode, report.reason, report.transport)
        waited = (record.admitted or record.arrival) - record.arrival
        metrics.request_queue_time.observe(waited + report.queue_seconds)
        metrics.request_prefill_time.observe(report.prefill_seconds)
        if record.first_token is not None and record.last_token is not None:
            decode = record.last_token - record.first_token
            metrics.request_decode_time.observe(decode)
            if record.num_output_tokens > 1:
                metrics.time_per_output_token.observe(decode / (record.num_output_tokens - 1))
            metrics.request_inference_time.observe(decode + report.prefill_seconds)
        if record.counts_prompt:
            own = report.num_cached_tokens + report.num_prefill_cached_tokens
            metrics.prefix_cache_queries.inc(record.num_prompt_tokens)
            metrics.prefix_cache_hits.inc(min(own, record.num_prompt_tokens))
            metrics.external_prefix_cache_queries.inc(max(0, record.num_prompt_tokens - own))
            metrics.external_prefix_cache_hits.inc(report.num_external_tokens)
        metrics.prompt_tokens_from("decode_cache", report.num_cached_tokens)
        metrics.prompt_tokens_from("prefill_cache", report.num_prefill_cached_tokens)
        metrics.prompt_tokens_from("external", report.num_external_tokens)
        metrics.prompt_tokens_from("computed", report.num_computed_tokens)
        metrics.transferred_tokens.inc(report.num_transferred_tokens)
        metrics.transferred_bytes.inc(report.transfer_bytes)
        metrics.num_preemptions.inc(report.num_preemptions)
        metrics.prefill_retries.inc(report.num_prefill_failures)
        if report.num_transferred_tokens:
            metrics.exposed_transfer.observe(report.exposed_transfer_seconds)

    def _row(self, record: SequenceRecord, reason: str, error_code: str, now: float) -> dict[str, Any]:
        row: dict[str, Any] = {
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "finish_reason": reason,
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_output_tokens": record.num_output_tokens,
            "seconds": round(now - record.arrival, 4),
            "ttft_seconds": None if record.first_token is None else round(record.first_token - record.arrival, 4),
            "gateway_queue_seconds": None if record.admitted is None else round(record.admitted - record.arrival, 4),
        }
        if record.client_id:
            row["client_request_id"] = record.client_id
        if error_code:
            row["error_code"] = error_code
        if record.num_moves:
            row["num_moves"] = record.num_moves
        report = record.report
        if report is not None:
            row |= {
                "prefill_mode": report.prefill_mode,
                "reason": report.reason,
                "prefill_node": report.prefill_node_id,
                "decode_node": report.decode_node_id,
                "transport": report.transport,
                "num_cached_tokens": report.num_cached_tokens,
                "num_transferred_tokens": report.num_transferred_tokens,
                "num_external_tokens": report.num_external_tokens,
                "num_prefill_cached_tokens": report.num_prefill_cached_tokens,
                "num_computed_tokens": report.num_computed_tokens,
                "transfer_bytes": report.transfer_bytes,
                "transfer_seconds": round(report.transfer_seconds, 4),
                "exposed_transfer_seconds": round(report.exposed_transfer_seconds, 4),
                "worker_queue_seconds": round(report.queue_seconds, 4),
                "prefill_seconds": round(report.prefill_seconds, 4),
                "num_preemptions": report.num_preemptions,
                "num_prefill_failures": report.num_prefill_failures,
            }
        return row

    def recent(self, limit: int = _RECENT, after: int = 0) -> list[dict[str, Any]]:
        """The last finished sequences, newest first, with their timelines.

        Args:
            after: `number` of the last one that the asker has; 0: none.
        """
        newest = itertools.islice(reversed(self._recent), limit)
        return [self._told(item) for item in itertools.takewhile(lambda item: item.number > after, newest)]

    def _told(self, item: _Finished) -> dict[str, Any]:
        return item.row | {"number": item.number} | self._way(item.record, item.end)

    def _way(self, record: SequenceRecord, until: float) -> dict[str, Any]:
        """Where its time went up to then, and where it was sent."""
        told: dict[str, Any] = {
            "arrival_time": round(self._epoch + record.arrival, 3),
            "timeline": timeline(record.arrival, record.entered, record.attempts, record.first_token, until),
        }
        if record.attempts:
            told["routing"] = decision_object(record.attempts[-1])
        return told

    def active(self, limit: int) -> list[dict[str, Any]]:
        """Sequences that are not over, oldest first."""
        now = time.monotonic()
        return [self._under_way(record, now) for record in itertools.islice(self._active.values(), limit)]

    @property
    def num_active(self) -> int:
        return len(self._active)

    def _under_way(self, record: SequenceRecord, now: float) -> dict[str, Any]:
        told: dict[str, Any] = {
            "request_id": record.request_id,
            "endpoint": record.endpoint,
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_output_tokens": record.num_output_tokens,
            "seconds": round(now - record.arrival, 4),
            "ttft_seconds": None if record.first_token is None else round(record.first_token - record.arrival, 4),
            **self._way(record, now),
        }
        if record.client_id:
            told["client_request_id"] = record.client_id
        if record.attempts:
            told["num_moves"] = num_lost(record.attempts)
        return told
