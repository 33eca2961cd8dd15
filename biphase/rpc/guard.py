"""Both ends of the token check on gRPC calls: channels that prove it, a server that asks for it before anything else.

Owns where in a call the proof stands. What it is made of is token.py's business.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc

from biphase.errors import UnauthorizedError
from biphase.rpc.errors import abort_with
from biphase.rpc.metadata import Metadata
from biphase.rpc.token import PROOF_METADATA_KEY, ProofChecker, ServiceToken
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

_LOG_SECONDS = 1.0


def proving(token: ServiceToken) -> Callable[[str], Metadata]:
    """For a MetadataChannel: a fresh proof for each call."""
    return lambda method: ((PROOF_METADATA_KEY, token.prove_call(method)),)


class CallGuard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Refuses every call without a good proof, of whatever method, before its message is read."""

    def __init__(self, token: ServiceToken) -> None:
        self._checker = ProofChecker(token)
        self._num_refused = 0
        self._log_at = 0.0

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        details = handler_call_details
        proof = None
        for key, value in details.invocation_metadata or ():
            if key == PROOF_METADATA_KEY:
                proof = value
        try:
            self._checker.check(details.method, proof)
        except UnauthorizedError as error:
            return grpc.stream_stream_rpc_method_handler(self._refusal(details.method, error))
        return await continuation(details)

    def _refusal(self, method: str, error: UnauthorizedError) -> Callable[[Any, Any], Awaitable[None]]:
        # As a stream, whatever the method is: a message that nobody asks for is not read.
        async def refuse(_: Any, context: Any) -> None:
            self._num_refused += 1
            if time.monotonic() >= self._log_at:
                # Whoever tries in a loop shall not fill the log.
                self._log_at = time.monotonic() + _LOG_SECONDS
                log.warning(
                    "call_refused",
                    peer=context.peer(),
                    method=method[:200],
                    reason=error.message,
                    num_refused=self._num_refused,
                )
            await abort_with(context, error)

        return refuse
