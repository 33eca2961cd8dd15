"""A sequence in a trace: what the gateway knows of it, by OpenTelemetry's GenAI conventions, and its phases here."""

from __future__ import annotations

import time

from biphase.telemetry import tracing
from biphase.telemetry.tracing import Span
from services.gateway.domain import Endpoint, Generation, SequenceSpec
from services.gateway.recorder import SequenceRecord
from services.gateway.timeline import stretches

_OPERATIONS = {Endpoint.CHAT: "chat", Endpoint.RESPONSES: "chat", Endpoint.COMPLETIONS: "text_completion"}


def sequence_span(generation: Generation, spec: SequenceSpec) -> Span:
    """Started under the HTTP request's; the calls that this task makes from now on are under it."""
    operation = _OPERATIONS[generation.endpoint]
    # The id of a response gives access to what is stored under it, and traces are read by others.
    is_secret = generation.endpoint is Endpoint.RESPONSES
    return tracing.span(
        f"{operation} {generation.model}",
        attributes={
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "biphase",
            "gen_ai.request.model": generation.model,
            "gen_ai.request.choice.count": generation.n,
            "gen_ai.request.max_tokens": spec.sampling.max_tokens,
            "gen_ai.request.temperature": spec.sampling.temperature,
            "gen_ai.request.top_p": spec.sampling.top_p,
            **({} if is_secret else {"gen_ai.response.id": generation.response_id}),
            "gen_ai.response.model": generation.model,
            "gen_ai.usage.input_tokens": len(spec.token_ids),
            "biphase.request_id": spec.request_id,
        },
    )


def tell_phases(span: Span, record: SequenceRecord, outcome: str, error_code: str) -> None:
    """The gateway's phases of a sequence that is over: prepare, queue, route, migrate, first token, decode."""
    now = time.monotonic()
    span.set({"gen_ai.usage.output_tokens": record.num_output_tokens, "gen_ai.response.finish_reasons": (outcome,)})
    if error_code:
        span.fail(error_code)
    if record.entered is not None:
        for phase, start, stop, lost in stretches(record.arrival, record.entered, record.attempts):
            if lost is None:
                span.child(phase, start, stop)
            else:
                failed = {"biphase.decode_node": lost.decode_node, "error.type": lost.error_code}
                span.child("migrate", start, stop, failed)
    for attempt in record.attempts:
        where = {"biphase.decode_node": attempt.decode_node, "biphase.reason": attempt.decision.reason}
        span.child("route", attempt.started, attempt.started, where)
    if record.first_token is not None:
        span.child("first token", record.arrival, record.first_token)
        span.child("decode", record.first_token, record.last_token or now)
