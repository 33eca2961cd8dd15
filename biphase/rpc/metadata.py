"""Channels whose calls carry more metadata than their callers give: a proof (guard.py), a request (carrying.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

Metadata: TypeAlias = tuple[tuple[str, str], ...]


class MetadataChannel:
    """A channel, aio or not, each of whose calls carries what `added` says of its method when it is made.

    Not a grpc interceptor: those put a task of their own between a streaming call and its caller.
    """

    def __init__(self, channel: Any, added: Callable[[str], Metadata]) -> None:
        self._channel = channel
        self._added = added

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._adding(self._channel.unary_unary(method, *args, **options), method)

    def unary_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._adding(self._channel.unary_stream(method, *args, **options), method)

    def stream_unary(self, method: str, *args: Any, **options: Any) -> Any:
        return self._adding(self._channel.stream_unary(method, *args, **options), method)

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        return self._adding(self._channel.stream_stream(method, *args, **options), method)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def _adding(self, call: Any, method: str) -> Callable[..., Any]:
        def start(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return call(*args, metadata=(*(metadata or ()), *self._added(method)), **options)

        return start
