"""Errors across gRPC: a BiphaseError becomes a status plus its code in trailing metadata, and back."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc

from biphase.errors import (
    BiphaseError,
    CancelledError,
    ConfigError,
    CorruptBlockError,
    DeadlineExceededError,
    ErrorCode,
    InternalError,
    InvalidRequestError,
    LayoutMismatchError,
    ModelLoadError,
    NotFoundError,
    OverloadedError,
    StaleHandleError,
    TooLargeError,
    TransferFailedError,
    UnauthorizedError,
    UnavailableError,
    UnsupportedError,
)
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

CODE_METADATA_KEY = "biphase-code"
_F = TypeVar("_F", bound=Callable[..., Any])

_CLASSES: dict[ErrorCode, type[BiphaseError]] = {
    cls.code: cls
    for cls in (
        InvalidRequestError,
        UnauthorizedError,
        NotFoundError,
        TooLargeError,
        OverloadedError,
        UnavailableError,
        DeadlineExceededError,
        CancelledError,
        LayoutMismatchError,
        StaleHandleError,
        CorruptBlockError,
        TransferFailedError,
        ModelLoadError,
        ConfigError,
        UnsupportedError,
        InternalError,
    )
}

# What a bare gRPC status means when the peer could not say more (it died, the deadline passed, a proxy answered).
_BY_STATUS: dict[grpc.StatusCode, type[BiphaseError]] = {
    grpc.StatusCode.CANCELLED: CancelledError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: OverloadedError,
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthorizedError,
    grpc.StatusCode.PERMISSION_DENIED: UnauthorizedError,
    # No such method: another version, or not one of ours.
    grpc.StatusCode.UNIMPLEMENTED: UnavailableError,
}


def from_rpc_error(error: grpc.aio.AioRpcError, peer: str) -> BiphaseError:
    """Turns a failed call into the error the peer raised, or the nearest one its status allows.

    Args:
        peer: who was called, for the message.
    """
    metadata = {key: value for key, value in (error.trailing_metadata() or ())}
    code = metadata.get(CODE_METADATA_KEY)
    cls = _CLASSES.get(ErrorCode(code)) if code in set(ErrorCode) else None
    if cls is None:
        cls = _BY_STATUS.get(error.code(), InternalError)
    if cls is UnauthorizedError:
        # This process's token or certificate is wrong; whoever asked for the work has nothing to do with it.
        cls = UnavailableError
    return cls(f"{peer}: {error.details() or error.code().name.lower()}")


def is_spoken(error: grpc.aio.AioRpcError) -> bool:
    """Whether a service of ours ended the call with these words, and not a connection with nobody behind it."""
    return any(key == CODE_METADATA_KEY for key, _ in error.trailing_metadata() or ())


async def abort_with(context: Any, error: BiphaseError) -> None:
    """Ends the call with the error's status. Raises, as grpc's abort does."""
    await context.abort(
        grpc.StatusCode[error.grpc_status],
        error.message,
        trailing_metadata=((CODE_METADATA_KEY, str(error.code)),),
    )


def unary_method(method: Callable[[Any, Any, Any], Awaitable[Any]]) -> Any:
    """Wraps a servicer's unary method so that BiphaseErrors reach the caller with their status."""

    @functools.wraps(method)
    async def wrapped(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except asyncio.CancelledError:
            raise
        except BiphaseError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.exception("rpc_failed", method=method.__qualname__)
            await abort_with(context, InternalError(f"{type(error).__name__} in {method.__qualname__}"))

    return wrapped


def stream_method(method: Callable[[Any, Any, Any], AsyncIterator[Any]]) -> Any:
    """The same for a method that streams its answers."""

    @functools.wraps(method)
    async def wrapped(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        answers = method(self, request, context)
        try:
            async for answer in answers:
                yield answer
        except BiphaseError as error:
            await abort_with(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            log.exception("rpc_failed", method=method.__qualname__)
            await abort_with(context, InternalError(f"{type(error).__name__} in {method.__qualname__}"))
        finally:
            # A cancelled call abandons the generator; close it now, so that its `finally` runs before the call ends.
            await answers.aclose()  # type: ignore[attr-defined]

    return wrapped
