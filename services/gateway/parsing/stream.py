"""`stream` and `stream_options`."""

from __future__ import annotations

from dataclasses import dataclass

from services.gateway.parsing.sampling import invalid
from services.gateway.wire import GenerationFields


@dataclass(frozen=True, slots=True)
class StreamChoice:
    stream: bool
    include_usage: bool
    continuous_usage: bool


def parse_stream(body: GenerationFields) -> StreamChoice:
    options = body.stream_options
    if options is not None and not body.stream:
        raise invalid("Stream options can only be defined when `stream=True`.", "stream_options")
    include = bool(options and options.include_usage)
    return StreamChoice(bool(body.stream), include, include and bool(options and options.continuous_usage_stats))
