"""A request's body: its size, its type, its JSON, and its fields' types."""

from __future__ import annotations

import asyncio
import time
from typing import Any, TypeVar

from fastapi import Request

from biphase.errors import InvalidRequestError, TooLargeError
from services.gateway.openapi_bodies import described
from services.gateway.wire import Body

B = TypeVar("B", bound=Body)

# Enough for a prompt of half a million token ids, or a hundred thousand messages.
MAX_VALUES = 500_000
# Larger ones take turns.
_LARGE_BYTES = 256 * 1024
_PIECE_BYTES = 128 * 1024


class UnsupportedMediaTypeError(InvalidRequestError):
    """The body claims to be something other than JSON."""


class BodyReader:
    """Reads the bodies of one gateway.

    What is small is parsed as it comes. Large bodies take turns, and after each the event loop has for others as long
    as it took: whoever sends nothing but large ones slows himself.

    Args:
        max_bytes: of one body.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._turn = asyncio.Lock()

    async def read(self, request: Request, kind: type[B]) -> B:
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
        if announced.isdigit() and int(announced) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_bytes:
                raise self._too_large()
            parts.append(part)
        if size <= _LARGE_BYTES:
            return kind.model_validate_json(b"".join(parts))
        async with self._turn:
            raw = b"".join(parts)
            parts.clear()
            if await _num_values(raw) > MAX_VALUES:
                raise TooLargeError(f"The request body holds more than {MAX_VALUES} values.")
            began = time.perf_counter()
            try:
                return kind.model_validate_json(raw)
            finally:
                await asyncio.sleep(time.perf_counter() - began)

    def _too_large(self) -> TooLargeError:
        return TooLargeError(f"The request body is larger than {self._max_bytes} bytes.")


async def _num_values(raw: bytes) -> int:
    """Commas and openings outside of strings: as many as values, nearly. Counted much faster than parsed, in pieces."""
    if _num_marks(raw) <= MAX_VALUES:
        return 0
    count, in_string, start = 0, False, 0
    while start < len(raw):
        end = start + _PIECE_BYTES
        while raw[end - 1 : end] == b"\\":
            # Not between a backslash and what it escapes.
            end += 1
        # What is escaped ends no string. In this order: a backslash may be escaped itself.
        piece = raw[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        parts = piece.split(b'"')
        count += sum(map(_num_marks, parts[in_string::2]))
        in_string ^= len(parts) % 2 == 0
        start = end
        await asyncio.sleep(0)
    return count


def _num_marks(text: bytes) -> int:
    return text.count(b",") + text.count(b"[") + text.count(b"{")


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
