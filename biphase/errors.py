"""The one error hierarchy. Each error has a code, and through it a gRPC status and an HTTP status.

Owns the mapping from failure to status and to metric label (the code). Owns no messages: whoever raises says what
happened, to whom, and what would help.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """What went wrong, in one word; also the value of the `code` label in metrics and logs."""

    INVALID_REQUEST = "invalid_request"
    UNAUTHORIZED = "unauthorized"
    NOT_FOUND = "not_found"
    TOO_LARGE = "too_large"
    OVERLOADED = "overloaded"
    UNAVAILABLE = "unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    CANCELLED = "cancelled"
    LAYOUT_MISMATCH = "layout_mismatch"
    STALE_HANDLE = "stale_handle"
    CORRUPT_BLOCK = "corrupt_block"
    TRANSFER_FAILED = "transfer_failed"
    MODEL_LOAD = "model_load"
    CONFIG = "config"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


# code -> (gRPC status name, HTTP status)
_STATUS: dict[ErrorCode, tuple[str, int]] = {
    ErrorCode.INVALID_REQUEST: ("INVALID_ARGUMENT", 400),
    ErrorCode.UNAUTHORIZED: ("UNAUTHENTICATED", 401),
    ErrorCode.NOT_FOUND: ("NOT_FOUND", 404),
    ErrorCode.TOO_LARGE: ("OUT_OF_RANGE", 413),
    ErrorCode.OVERLOADED: ("RESOURCE_EXHAUSTED", 429),
    ErrorCode.UNAVAILABLE: ("UNAVAILABLE", 503),
    ErrorCode.DEADLINE_EXCEEDED: ("DEADLINE_EXCEEDED", 504),
    ErrorCode.CANCELLED: ("CANCELLED", 499),
    ErrorCode.LAYOUT_MISMATCH: ("FAILED_PRECONDITION", 503),
    ErrorCode.STALE_HANDLE: ("ABORTED", 503),
    ErrorCode.CORRUPT_BLOCK: ("DATA_LOSS", 503),
    ErrorCode.TRANSFER_FAILED: ("UNAVAILABLE", 503),
    ErrorCode.MODEL_LOAD: ("FAILED_PRECONDITION", 503),
    ErrorCode.CONFIG: ("FAILED_PRECONDITION", 500),
    ErrorCode.UNSUPPORTED: ("UNIMPLEMENTED", 501),
    ErrorCode.INTERNAL: ("INTERNAL", 500),
}


class BiphaseError(Exception):
    """Base of everything this project raises on purpose. `message` is one clear sentence for a person."""

    code: ErrorCode = ErrorCode.INTERNAL

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @property
    def grpc_status(self) -> str:
        """Name of the grpc.StatusCode."""
        return _STATUS[self.code][0]

    @property
    def http_status(self) -> int:
        return _STATUS[self.code][1]


class InvalidRequestError(BiphaseError):
    """The caller's input is wrong. `param` is the path of the field."""

    code = ErrorCode.INVALID_REQUEST

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnauthorizedError(BiphaseError):
    code = ErrorCode.UNAUTHORIZED


class NotFoundError(BiphaseError):
    code = ErrorCode.NOT_FOUND

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLargeError(BiphaseError):
    code = ErrorCode.TOO_LARGE


class OverloadedError(BiphaseError):
    """A bounded queue is full. `retry_after_seconds` is the wait worth suggesting."""

    code = ErrorCode.OVERLOADED

    def __init__(self, message: str, retry_after_seconds: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class UnavailableError(BiphaseError):
    code = ErrorCode.UNAVAILABLE


class DeadlineExceededError(BiphaseError):
    code = ErrorCode.DEADLINE_EXCEEDED


class CancelledError(BiphaseError):
    """The request's owner went away or asked to stop. Not asyncio.CancelledError."""

    code = ErrorCode.CANCELLED


class LayoutMismatchError(BiphaseError):
    """Two nodes' KV blocks do not mean the same thing. The message names the field that differs."""

    code = ErrorCode.LAYOUT_MISMATCH


class StaleHandleError(BiphaseError):
    """The block a handle named has been given to other content. A miss, never data."""

    code = ErrorCode.STALE_HANDLE


class CorruptBlockError(BiphaseError):
    """Checksum or chain hash does not match what was announced."""

    code = ErrorCode.CORRUPT_BLOCK


class TransferFailedError(BiphaseError):
    """A read ended without its data: connection lost, peer gone, deadline."""

    code = ErrorCode.TRANSFER_FAILED


class ModelLoadError(BiphaseError):
    """The model cannot be loaded: missing file, unknown architecture, truncated shard."""

    code = ErrorCode.MODEL_LOAD


class ConfigError(BiphaseError):
    """A setting, or two together, make no sense. Raised before any port is opened."""

    code = ErrorCode.CONFIG


class UnsupportedError(BiphaseError):
    """The request is well formed but asks for what this version cannot do. Never silently left out."""

    code = ErrorCode.UNSUPPORTED

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class InternalError(BiphaseError):
    code = ErrorCode.INTERNAL
