"""Where one sequence's time went: what the gateway saw itself, and what its workers told of their part.

All times are seconds since the request's arrival, on this gateway's monotonic clock. A worker tells its times since the
receipt of the call; they are moved by when the call went out, so that no clock is compared with another. Nothing of a
prompt or an answer is in here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from biphase.rpc.v1 import common_pb2
from services.gateway.routing.policy import Decision


@dataclass(slots=True, eq=False)
class Attempt:
    """One placement of a sequence: where it went, why, and how that ended. Times are monotonic."""

    started: float
    decode_node: str
    # In the order in which decode may ask them.
    prefill_nodes: tuple[str, ...]
    decision: Decision
    # When it ended before the sequence did, and the error's code: "" when it was not lost, but given up for one that
    # goes on with other tokens. None while it runs, and when it ran to the end.
    ended: float | None = None
    error_code: str = ""
    # As the worker told with its first token.
    spans: Sequence[common_pb2.Span] = ()


class Stretch(NamedTuple):
    """`attempt`: the one that was lost."""

    phase: str
    start: float
    end: float
    attempt: Attempt | None = None


def num_lost(attempts: Sequence[Attempt]) -> int:
    """Placements that ended in an error."""
    return sum(bool(attempt.error_code) for attempt in attempts)


def stretches(arrival: float, entered: float, attempts: Sequence[Attempt]) -> Iterator[Stretch]:
    """What the gateway saw of a sequence's way to its last place, on its monotonic clock: "prepare" (parse, template,
    tokens), before each place "queue", and "lost" from a placement to the error that ended it."""
    yield Stretch("prepare", arrival, entered)
    waiting_since = entered
    for attempt in attempts:
        yield Stretch("queue", waiting_since, attempt.started)
        if attempt.ended is not None:
            if attempt.error_code:
                yield Stretch("lost", attempt.started, attempt.ended, attempt)
            waiting_since = attempt.ended


def decision_object(attempt: Attempt) -> dict[str, Any]:
    """What routing chose, and the numbers it went by."""
    numbers: Mapping[str, float] = attempt.decision.numbers
    return {
        "reason": attempt.decision.reason,
        "decode": attempt.decode_node,
        "prefill": list(attempt.prefill_nodes),
        "numbers": {name: round(value, 4) for name, value in numbers.items()},
    }


def timeline(
    arrival: float,
    entered: float | None,
    attempts: Sequence[Attempt],
    first_token: float | None,
    end: float,
) -> list[dict[str, Any]]:
    """Phases in order of their start; each has `phase`, `start` and `end`, and what else is known of it.

    The gateway's own: those of `stretches`, a last "queue" where it waits again, and "decode" (first token to the end).
    The workers': see Span.phase in common.proto; their queue is called "worker_queue".

    Args:
        entered: when it began to wait for a place; None: it never did.
        end: when it ended, or now.
    """
    phases: list[dict[str, Any]] = []

    def add(phase: str, start: float, stop: float, **more: Any) -> None:
        known = {name: value for name, value in more.items() if value}
        start, stop = max(0.0, start - arrival), max(0.0, stop - arrival)
        phases.append({"phase": phase, "start": round(start, 5), "end": round(max(start, stop), 5), **known})

    if entered is None:
        return phases
    for phase, start, stop, lost in stretches(arrival, entered, attempts):
        add(phase, start, stop, node=lost and lost.decode_node, error_code=lost and lost.error_code)
    for attempt in attempts:
        for span in attempt.spans:
            add(
                "worker_queue" if span.phase == "queue" else span.phase,
                attempt.started + span.start_seconds,
                attempt.started + span.end_seconds,
                node=span.node_id,
                tokens=span.num_tokens,
                bytes=span.num_bytes,
                error_code=span.error_code,
            )
    if not attempts:
        add("queue", entered, end)
    elif (waiting_since := attempts[-1].ended) is not None:
        add("queue", waiting_since, end)
    if first_token is not None:
        add("decode", first_token, end, node=attempts[-1].decode_node if attempts else "")
    phases.sort(key=lambda phase: (phase["start"], phase["end"]))
    return phases
