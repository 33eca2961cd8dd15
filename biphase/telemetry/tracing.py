"""OpenTelemetry spans, one per phase of a request. Off unless an OTLP endpoint is set; it needs the extra `tracing`.

Without it `serving` and `span` give one object that does nothing, and nothing of OpenTelemetry is imported. Phases are
told after the fact, with the times that were noted anyway, so that a traced request is not a slower one. Attributes are
those of OpenTelemetry's GenAI conventions and biphase.*; never a prompt, an answer or a key.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from biphase import __version__
from biphase.errors import BiphaseError, ConfigError
from biphase.telemetry import context

Attributes = Mapping[str, str | int | float | bool | tuple[str, ...]]

_EXPORT_SECONDS = 5
# Monotonic seconds and these are the time of day.
_EPOCH = time.time() - time.monotonic()
_tracer: Any = None


def configure(service: str, node_id: str, endpoint: str) -> None:
    """Called once per process, before anything is served.

    Args:
        endpoint: base URL of an OTLP/HTTP collector; "": what OTEL_EXPORTER_OTLP_ENDPOINT says, if anything. Sampling
            and the rest are OpenTelemetry's own variables (OTEL_TRACES_SAMPLER, OTEL_SDK_DISABLED, ...).

    Raises:
        ConfigError: asked for, and OpenTelemetry is not installed.
    """
    global _tracer
    # The names are OpenTelemetry's, so they are no flags of ours.
    named = (os.environ.get(f"OTEL_EXPORTER_OTLP_{part}ENDPOINT") for part in ("", "TRACES_"))
    if not (endpoint or any(named)) or os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            f"traces were asked for, and {error.name or 'OpenTelemetry'} is not installed: "
            "pip install 'biphase[tracing]', or leave out --otlp-endpoint and OTEL_EXPORTER_OTLP_*ENDPOINT"
        ) from error
    resource = Resource.create(
        {"service.name": f"biphase-{service}", "service.instance.id": node_id, "service.version": __version__}
    )
    provider = TracerProvider(resource=resource)
    url = f"{endpoint.rstrip('/')}/v1/traces" if endpoint else None
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)))
    _tracer = provider.get_tracer("biphase", __version__)


class Span:
    """One span under way; this class is the one that does nothing."""

    def child(self, name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
        """A phase that is over. Times are monotonic seconds."""

    def set(self, attributes: Attributes) -> None: ...

    def fail(self, code: str) -> None: ...

    def end(self) -> None: ...

    @property
    def is_recording(self) -> bool:
        return False


NO_SPAN = Span()


class _RealSpan(Span):
    def __init__(self, span: Any) -> None:
        self._span = span

    def child(self, name: str, start: float, end: float, attributes: Attributes | None = None) -> None:
        from opentelemetry.trace import set_span_in_context

        parent = set_span_in_context(self._span)
        child = _tracer.start_span(name, parent, attributes=attributes, start_time=_nanoseconds(start))
        child.end(_nanoseconds(max(start, end)))

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, code: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        self._span.set_attribute("error.type", code)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self) -> None:
        self._span.end()

    @property
    def is_recording(self) -> bool:
        return bool(self._span.is_recording())


def span(name: str, *, is_server: bool = False, attributes: Attributes | None = None) -> Span:
    """Starts a span under the present one, and makes it the present one of this task. Has to be ended."""
    if _tracer is None:
        return NO_SPAN
    from opentelemetry.trace import SpanKind
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator as W3C

    above = W3C().extract({"traceparent": context.traceparent.get()})
    kind = SpanKind.SERVER if is_server else SpanKind.INTERNAL
    started = _tracer.start_span(name, above, kind=kind, attributes=attributes)
    ids = started.get_span_context()
    context.traceparent.set(f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{int(ids.trace_flags):02x}")
    return _RealSpan(started) if started.is_recording() else NO_SPAN


@contextmanager
def serving(name: str, attributes: Attributes | None = None) -> Iterator[Span]:
    """A span around the answer to a call; an error that leaves it marks it."""
    started = span(name, is_server=True, attributes=attributes)
    try:
        yield started
    except BiphaseError as error:
        started.fail(str(error.code))
        raise
    finally:
        started.end()


def _nanoseconds(monotonic: float) -> int:
    return int((_EPOCH + monotonic) * 1e9)
