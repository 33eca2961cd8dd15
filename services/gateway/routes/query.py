"""Parameters in the address: parsed by hand, so that a bad one is refused in the same form as a bad body."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from biphase.errors import InvalidRequestError
from services.gateway.http_errors import shown

_TRUE = ("true", "1", "yes", "on", "")
_FALSE = ("false", "0", "no", "off")


def query_flag(request: Request, name: str) -> bool:
    """Whether a switch is on; absent: no.

    Raises:
        InvalidRequestError: neither true nor false.
    """
    value = request.query_params.get(name, "false").lower()
    if value not in _TRUE and value not in _FALSE:
        raise InvalidRequestError(f"{name} must be true or false, got {shown(value)!r}.", name)
    return value in _TRUE


def number_of(text: str) -> int | None:
    """A count of at most 15 digits; None when it is none."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 15 else None


def query_number(request: Request, name: str) -> int | None:
    """A number of at least 0; None when it is absent.

    Raises:
        InvalidRequestError: no such number.
    """
    value = request.query_params.get(name)
    if value is None:
        return None
    number = number_of(value)
    if number is None:
        raise InvalidRequestError(f"{name} must be a number of at least 0, got {shown(value)!r}.", name)
    return number


def query_parameters(**kinds: str) -> dict[str, Any]:
    """For openapi.json: optional parameters by name, with their JSON types."""
    return {
        "parameters": [
            {"name": name, "in": "query", "required": False, "schema": {"type": kind}} for name, kind in kinds.items()
        ]
    }
