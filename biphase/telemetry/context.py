"""Which request the present task works for: its id, for the log, and its place in a trace.

Both travel with gRPC calls (biphase.rpc.carrying). Standard library only.
"""

from __future__ import annotations

from contextvars import ContextVar

# "" outside of any request. A sequence's id on a worker may be longer: log calls that name their own keep it.
request_id: ContextVar[str] = ContextVar("biphase_request_id", default="")
# W3C traceparent of the span that the task works under; "" without tracing.
traceparent: ContextVar[str] = ContextVar("biphase_traceparent", default="")
