"""A worker's part of a trace: the phases that its Span messages tell anyway, under the span of the call."""

from __future__ import annotations

from collections.abc import Iterable

from biphase.request import Request
from biphase.rpc.spans import engine_spans
from biphase.rpc.v1 import common_pb2
from biphase.telemetry.tracing import Span

_NAMES = {"queue": "queue", "fetch": "fetch prefix", "chunk": "prefill chunk", "handoff": "handoff", "read": "transfer",
          "exposed": "transfer exposed"}  # fmt: skip


def tell_phases(
    span: Span, request: Request, node_id: str, *, fetches: bool, more: Iterable[common_pb2.Span] = ()
) -> None:
    """
    Args:
        fetches: as in engine_spans.
        more: further phases; those that another node told of itself are left out, for it tells its own.
    """
    if not span.is_recording:
        return
    arrival = request.arrival_time
    for phase in (*engine_spans(request, node_id, fetches=fetches), *more):
        if phase.node_id != node_id and phase.phase != "handoff":
            continue
        attributes: dict[str, str | int] = {"biphase.node": phase.node_id}
        if phase.num_tokens:
            attributes["biphase.num_tokens"] = phase.num_tokens
        if phase.num_bytes:
            attributes["biphase.num_bytes"] = phase.num_bytes
        if phase.error_code:
            attributes["error.type"] = phase.error_code
        name = _NAMES.get(phase.phase, phase.phase)
        span.child(name, arrival + phase.start_seconds, arrival + phase.end_seconds, attributes)
