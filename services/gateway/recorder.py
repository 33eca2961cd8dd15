"""What happened to each sequence: one log line, the metrics, and the recent ones for /status."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from biphase.rpc.v1 import common_pb2
from biphase.telemetry.events import event_logger
from biphase.telemetry.metrics import GatewayMetrics

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
    admitted: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_output_tokens: int = 0
    num_moves: int = 0
    # Of the prompt, when the first token came; a later worker's cache says nothing about it.
    num_cached_tokens: int = 0
    # Of the worker that ended it.
    report: common_pb2.RequestReport | None = None


class Recorder:
    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._recent: deque[dict[str, Any]] = deque(maxlen=_RECENT)
        self._observe_itl: Callable[[float], None] = metrics.inter_token_latency.observe
        # HTTP requests being answered: what /load tells.
        self.num_open = 0

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
        self._metrics.generation_tokens.inc(count)

    def finished(self, record: SequenceRecord, reason: str, error_code: str = "") -> None:
        """Called once per sequence, however it ended: "stop", "length", "abort" or "error"."""
        now = time.monotonic()
        self._metrics.finished(reason)
        if error_code:
            self._metrics.failed(error_code)
        self._metrics.request_prompt_tokens.observe(record.num_prompt_tokens)
        self._metrics.request_generation_tokens.observe(record.num_output_tokens)
        self._metrics.e2e_request_latency.observe(now - record.arrival)
        if record.report is not None:
            self._path(record, record.report)
        row = self._row(record, reason, error_code, now)
        self._recent.append(row)
        log.info("request_finished", **row)

    def _path(self, record: SequenceRecord, report: common_pb2.RequestReport) -> None:
        metrics = self._metrics
        metrics.took_path(report.prefill_mode, report.reason, report.transport)
        waited = (record.admitted or record.arrival) - record.arrival
        metrics.request_queue_time.observe(waited + report.queue_seconds)
        metrics.request_prefill_time.observe(report.prefill_seconds)
        if record.first_token is not None and record.last_token is not None:
            decode = record.last_token - record.first_token
            metrics.request_decode_time.observe(decode)
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

    def recent(self) -> list[dict[str, Any]]:
        """The last finished sequences, newest first."""
        return list(reversed(self._recent))
