"""Chat messages as clients send them to what a chat template takes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from biphase.errors import InvalidRequestError
from services.gateway.domain import Limits
from services.gateway.http_errors import shown
from services.gateway.parsing.lengths import too_long

_TEXT_PARTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
_MEDIA_PARTS = frozenset(
    {
        "image_url", "input_image", "image", "image_pil", "image_embeds", "input_audio", "audio_url", "audio",
        "audio_embeds", "video_url", "video", "file", "input_file",
    }
)  # fmt: skip
# Handed to the template as they are.
_PASSED = ("name", "tool_call_id", "reasoning", "reasoning_content")


def parse_messages(raw: Sequence[Any], *, limits: Limits, content_parts: bool) -> list[dict[str, Any]]:
    """
    Args:
        raw: the body's `messages`.
        content_parts: the template walks over content parts itself; else they are joined into one string.

    Raises:
        InvalidRequestError: no messages, or one that no text model can take.
    """
    if not raw:
        raise InvalidRequestError(
            "Cannot apply chat template to an empty conversation. Provide at least one message.", "messages"
        )
    if len(raw) > limits.max_model_len:
        # Every message is at least one token.
        raise too_long(len(raw), limits, at_least=True)
    return [_message(message, f"messages.{place}", content_parts) for place, message in enumerate(raw)]


def _message(raw: Any, where: str, content_parts: bool) -> dict[str, Any]:
    if not isinstance(raw, dict):
        raise InvalidRequestError(f"{where} must be an object.", where)
    role = raw.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}.role must be a string.", f"{where}.role")
    message: dict[str, Any] = {"role": role, "content": _content(raw.get("content"), where, content_parts)}
    for name in _PASSED:
        value = raw.get(name)
        if value is not None:
            if not isinstance(value, str):
                raise InvalidRequestError(f"{where}.{name} must be a string.", f"{where}.{name}")
            message[name] = value
    # Templates know one name or the other for the same thing.
    reasoning = message.get("reasoning") or message.get("reasoning_content")
    if reasoning:
        message["reasoning"] = message["reasoning_content"] = reasoning
    calls = raw.get("tool_calls")
    if calls:
        message["tool_calls"] = _tool_calls(calls, where)
    return message


def _content(content: Any, where: str, content_parts: bool) -> Any:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}.content must be a string or a list of parts.", f"{where}.content")
    texts = [_part(part, f"{where}.content.{place}") for place, part in enumerate(content)]
    if content_parts:
        return [{"type": "text", "text": text} for text in texts]
    return "\n".join(texts)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise InvalidRequestError(f"{where} must be a string or an object.", where)
    kind = part.get("type", "text" if "text" in part else None)
    if isinstance(kind, str) and kind in _MEDIA_PARTS:
        raise InvalidRequestError(
            f"{where}: this is not a multimodal model, so it cannot take a part of type {kind!r}.", where
        )
    field = _TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if field is None:
        raise InvalidRequestError(f"{where}: unknown part type {shown(kind)!r}.", f"{where}.type")
    text = part.get(field)
    if not isinstance(text, str):
        raise InvalidRequestError(f"{where}.{field} must be a string.", f"{where}.{field}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    where = f"{where}.tool_calls"
    if not isinstance(calls, list):
        raise InvalidRequestError(f"{where} must be a list.", where)
    parsed = []
    for place, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidRequestError(f"{where}.{place}.function.name must be a string.", f"{where}.{place}")
        arguments = _arguments(function.get("arguments"))
        parsed.append({**call, "type": "function", "function": {**function, "arguments": arguments}})
    return parsed


def _arguments(arguments: Any) -> Any:
    """An object, as templates want it. Text that is no JSON (a model's own broken output) stays text."""
    if arguments is None:
        return {}
    if not isinstance(arguments, str):
        return arguments
    if not arguments.strip():
        return {}
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
