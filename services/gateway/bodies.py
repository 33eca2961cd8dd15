"""A request's body: its size, its type, its JSON, and its fields' types."""

from __future__ import annotations

import re
from typing import Any, TypeVar

from fastapi import Request

from biphase.errors import InvalidRequestError, TooLargeError
from services.gateway.openapi_bodies import described
from services.gateway.wire import Body

B = TypeVar("B", bound=Body)

# Enough for a prompt of half a million token ids, or a hundred thousand messages.
MAX_VALUES = 500_000
_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class UnsupportedMediaTypeError(InvalidRequestError):
    """The body claims to be something other than JSON."""


async def read_body(request: Request, kind: type[B], max_bytes: int) -> B:
    """
    Args:
        kind: what to parse it into.

    Raises:
        TooLargeError: more than max_bytes, the rest is not read; or more values than can be made in passing.
        InvalidRequestError: not JSON by its content type.
        pydantic.ValidationError: no JSON, or fields of wrong types.
    """
    content_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise UnsupportedMediaTypeError("Unsupported Media Type: Only 'application/json' is allowed")
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise _too_large(max_bytes)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
        parts.append(part)
    raw = b"".join(parts)
    _check_num_values(raw)
    return kind.model_validate_json(raw)


def _check_num_values(raw: bytes) -> None:
    """
    Raises:
        TooLargeError: so many values that making them would hold everybody up: 15 MiB of empty lists take seconds.
    """
    if _num_marks(raw) > MAX_VALUES and _num_marks(_STRING.sub(b"", raw)) > MAX_VALUES:
        raise TooLargeError(f"The request body holds more than {MAX_VALUES} values.")


def _num_marks(raw: bytes) -> int:
    """Commas and openings: as many as values, nearly. Counted a hundred times faster than parsed."""
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{")


def _too_large(max_bytes: int) -> TooLargeError:
    return TooLargeError(f"The request body is larger than {max_bytes} bytes.")


def body_schema(kind: type[Body]) -> dict[str, Any]:
    """For openapi.json, since the routes read their bodies themselves."""
    schema = kind.model_json_schema(ref_template="#/components/schemas/{model}")
    # References would need their targets in components; inlined they stand alone.
    definitions = schema.pop("$defs", {})
    content = {"application/json": {"schema": described(_inlined(schema, definitions))}}
    return {"requestBody": {"required": True, "content": content}}


def _inlined(value: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(value, dict):
        if "$ref" in value:
            return _inlined(definitions[value["$ref"].rsplit("/", 1)[1]], definitions)
        return {key: _inlined(item, definitions) for key, item in value.items()}
    return [_inlined(item, definitions) for item in value] if isinstance(value, list) else value
