"""Where a request's time went at one node, as Span messages. Built once per request, with its first token."""

from __future__ import annotations

from collections.abc import Iterable

from biphase.request import Request
from biphase.rpc.v1 import common_pb2


def engine_spans(request: Request, node_id: str, *, fetches: bool) -> list[common_pb2.Span]:
    """What this node's engine did for a request: the wait for a place, what was read for it, each chunk computed.

    Args:
        fetches: what the request waited for was a prefix from a third node, and no hand-off.

    Returns:
        Seconds since the request's arrival here.
    """
    arrival = request.arrival_time
    spans: list[common_pb2.Span] = []
    if request.first_scheduled_time is not None:
        spans.append(_span("queue", node_id, 0.0, request.first_scheduled_time - arrival))
        if fetches and request.kv_ready_time is not None:
            fetch = _span("fetch", node_id, request.first_scheduled_time - arrival, request.kv_ready_time - arrival)
            fetch.num_tokens = request.num_external_tokens
            spans.append(fetch)
    for chunk in request.chunks:
        span = _span("chunk", node_id, chunk.start_time - arrival, chunk.end_time - arrival)
        span.num_tokens = chunk.num_tokens
        spans.append(span)
    return spans


def shifted(spans: Iterable[common_pb2.Span], seconds: float) -> list[common_pb2.Span]:
    """The spans of an answer as its asker counts, who had asked at `seconds` of its own."""
    moved = []
    for span in spans:
        copy = common_pb2.Span()
        copy.CopyFrom(span)
        copy.start_seconds += seconds
        copy.end_seconds += seconds
        moved.append(copy)
    return moved


def _span(phase: str, node_id: str, start: float, end: float) -> common_pb2.Span:
    return common_pb2.Span(phase=phase, node_id=node_id, start_seconds=max(0.0, start), end_seconds=max(0.0, end))
