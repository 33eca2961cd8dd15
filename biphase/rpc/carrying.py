"""The present request's id and trace, carried from caller to callee in the metadata of gRPC calls.

Only whoever passed the guard is listened to: what a server takes over is for its log and its spans alone.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from biphase.rpc.metadata import Metadata
from biphase.telemetry import context

REQUEST_ID_KEY = "biphase-request-id"
TRACEPARENT_KEY = "traceparent"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,256}")
_TRACEPARENT = re.compile(r"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")


def clean_traceparent(text: str) -> str:
    """The header where it has the form of W3C's version 00, else ""."""
    return text if _TRACEPARENT.fullmatch(text) else ""


def carried(method: str) -> Metadata:
    """For a MetadataChannel: the caller's request, as it is when the call is made."""
    request_id, traceparent = context.request_id.get(), context.traceparent.get()
    pairs: Metadata = ((REQUEST_ID_KEY, request_id),) if _REQUEST_ID.fullmatch(request_id) else ()
    return (*pairs, (TRACEPARENT_KEY, traceparent)) if traceparent else pairs


class RequestCarrier(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Sets what a call carries for the task that answers it."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        for key, value in handler_call_details.invocation_metadata or ():
            if key == REQUEST_ID_KEY and _REQUEST_ID.fullmatch(value):
                context.request_id.set(value)
            elif key == TRACEPARENT_KEY:
                context.traceparent.set(clean_traceparent(value))
        return await continuation(handler_call_details)
