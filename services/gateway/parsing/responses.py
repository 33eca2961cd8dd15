"""POST /v1/responses: its items and flat tools become a chat request, which goes through the same door as any other.

Owns the translation only. What is checked for chat is checked there; errors get the names that fields have here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from biphase.errors import InvalidRequestError, UnsupportedError
from services.gateway.domain import Limits
from services.gateway.http_errors import shown
from services.gateway.parsing.lengths import too_long
from services.gateway.parsing.sampling import invalid
from services.gateway.wire import ChatRequest, GenerationFields
from services.gateway.wire_responses import ResponsesRequest

Item = dict[str, Any]

_LOGPROBS = "message.output_text.logprobs"
# Chat's names for what has another one here; the longer ones first.
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("response_format", "text.format"),
    ("max_tokens", "max_output_tokens"),
    ("messages", "input"),
    (".function.", "."),
)
# What OpenAI runs itself.
_HOSTED_TOOLS = frozenset(
    {
        "apply_patch", "code_interpreter", "computer", "computer_use_preview", "custom", "file_search",
        "image_generation", "local_shell", "mcp", "namespace", "shell", "tool_search", "web_search",
        "web_search_2025_08_26", "web_search_preview", "web_search_preview_2025_03_11",
    }
)  # fmt: skip
_MAX_METADATA = 16
_MAX_METADATA_CHARACTERS = 512


def new_items(body: ResponsesRequest, limits: Limits) -> list[Item]:
    """The request's own input as items.

    Raises:
        InvalidRequestError: no input, or something that is no item.
    """
    given = body.input
    if given is None or given == "" or given == []:
        raise invalid("input must be provided and non-empty.", "input")
    if isinstance(given, str):
        return [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": given}]}]
    if not isinstance(given, list):
        raise invalid("input must be a string or a list of items.", "input")
    if len(given) > limits.max_model_len:
        raise too_long(len(given), limits, at_least=True)
    for place, item in enumerate(given):
        if not isinstance(item, dict):
            raise InvalidRequestError(f"input.{place} must be an object.", f"input.{place}")
    return given


def chat_request(body: ResponsesRequest, items: Sequence[Item]) -> ChatRequest:
    """
    Args:
        items: the whole conversation, what earlier responses left included.

    Raises:
        BiphaseError: a field that cannot be honoured.
    """
    _refuse(body)
    tools, choice = _tools(body)
    logprobs = _LOGPROBS in (body.include or ()) or bool(body.top_logprobs)
    fields = {name: getattr(body, name) for name in GenerationFields.model_fields}
    fields |= {
        "n": None,
        "max_tokens": None,
        "stream_options": None,
        "max_completion_tokens": body.max_output_tokens,
        "messages": _messages(body.instructions, items),
        "tools": tools,
        "tool_choice": choice,
        "parallel_tool_calls": body.parallel_tool_calls,
        "logprobs": logprobs,
        "top_logprobs": body.top_logprobs if logprobs else None,
        "chat_template_kwargs": body.chat_template_kwargs,
        "reasoning_effort": _effort(body.reasoning),
    }
    if body.text is not None:
        fields["response_format"] = _format(body.text.get("format")) or body.response_format
    if body.truncation == "auto" and body.truncate_prompt_tokens is None:
        fields["truncate_prompt_tokens"] = -1
    # Each value has been through the same types already.
    return ChatRequest.model_construct(**fields)


def rename(error: InvalidRequestError | UnsupportedError) -> None:
    """Gives the error the names that fields have in this body."""
    message, param = error.message, error.param
    for chat_name, name in _NAMES:
        message = message.replace(chat_name, name)
        param = param.replace(chat_name, name) if param else param
    error.message, error.param = message, param


def _refuse(body: ResponsesRequest) -> None:
    if body.conversation is not None:
        raise UnsupportedError("conversation is not supported; use previous_response_id.", "conversation")
    if body.prompt is not None:
        raise UnsupportedError("Stored prompts are not supported; send instructions and input.", "prompt")
    if body.truncation not in (None, "auto", "disabled"):
        raise invalid("truncation must be auto or disabled.", "truncation", body.truncation)
    if body.background and body.store is False:
        raise invalid("A background response must be stored.", "store")
    metadata = body.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        not isinstance(value, str) or len(name) + len(value) > _MAX_METADATA_CHARACTERS
        for name, value in metadata.items()
    ):
        raise invalid(
            f"metadata may have {_MAX_METADATA} strings of {_MAX_METADATA_CHARACTERS} characters, names included.",
            "metadata",
        )


def _effort(reasoning: Mapping[str, Any] | None) -> str | None:
    effort = (reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("reasoning.effort must be a string.", "reasoning.effort", effort)
    return effort


def _format(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise invalid("text.format must be an object.", "text.format", given)
    if given.get("type") == "json_schema":
        inner = {name: given[name] for name in ("name", "schema", "strict", "description") if name in given}
        return {"type": "json_schema", "json_schema": inner}
    if given.get("type") not in ("text", "json_object"):
        raise invalid("text.format.type must be text, json_object or json_schema.", "text.format", given.get("type"))
    return {"type": given["type"]}


def _tools(body: ResponsesRequest) -> tuple[list[dict[str, Any]] | None, Any]:
    """Nested tools and the choice among them."""
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if isinstance(choice, Mapping):
        if choice.get("type") == "allowed_tools":
            allowed = choice.get("tools")
            allowed = allowed if isinstance(allowed, list) else []
            names = [entry.get("name") for entry in allowed if isinstance(entry, Mapping)]
            tools = [tool for tool in tools if tool["function"].get("name") in names]
            choice = choice.get("mode", "auto")
        elif choice.get("type") == "function":
            choice = {"type": "function", "function": {"name": choice.get("name")}}
        else:
            raise invalid("tool_choice must be 'none', 'auto', 'required' or name a function.", "tool_choice")
    if not tools and choice in ("auto", "none"):
        choice = None
    return tools or None, choice


def _tool(tool: Any, where: str) -> dict[str, Any]:
    if not isinstance(tool, dict) or not isinstance(tool.get("type"), str):
        raise InvalidRequestError(f"{where} must be {{'type': 'function', 'name': ...}}.", where)
    if tool["type"] in _HOSTED_TOOLS:
        raise UnsupportedError(f"{where}: tools of type {tool['type']!r} are not supported.", where)
    if tool["type"] != "function":
        raise InvalidRequestError(f"{where}: there are no tools of type {shown(tool['type'])!r}.", f"{where}.type")
    kept = ("name", "description", "parameters", "strict")
    return {"type": "function", "function": {name: tool[name] for name in kept if tool.get(name) is not None}}


def _messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    # A model's turn comes as several items: reasoning, text, calls.
    turn: dict[str, Any] | None = None
    for place, item in enumerate(items):
        where = f"input.{place}"
        kind = item.get("type", "message" if "role" in item else None)
        if kind == "message":
            if item.get("role") != "assistant":
                turn = None
                messages.append({"role": item.get("role"), "content": item.get("content")})
                continue
            if turn is None or turn["content"] is not None or "tool_calls" in turn:
                messages.append(turn := {"role": "assistant", "content": None})
            turn["content"] = item.get("content")
        elif kind == "reasoning":
            messages.append(turn := {"role": "assistant", "content": None, "reasoning": _reasoning(item)})
        elif kind == "function_call":
            if turn is None:
                messages.append(turn := {"role": "assistant", "content": None})
            turn.setdefault("tool_calls", []).append(_call(item, where))
        elif kind == "function_call_output":
            turn = None
            messages.append(_call_output(item, where))
        else:
            raise InvalidRequestError(f"{where}: items of type {shown(kind)!r} are not supported.", f"{where}.type")
    return messages


def _reasoning(item: Item) -> str:
    parts = item.get("content") or item.get("summary") or ()
    if not isinstance(parts, list):
        return ""
    return "".join(part["text"] for part in parts if isinstance(part, Mapping) and isinstance(part.get("text"), str))


def _call(item: Item, where: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if not isinstance(item.get(name), str):
            raise InvalidRequestError(f"{where}.{name} must be a string.", f"{where}.{name}")
    function = {"name": item["name"], "arguments": item["arguments"]}
    return {"id": item["call_id"], "type": "function", "function": function}


def _call_output(item: Item, where: str) -> dict[str, Any]:
    if not isinstance(item.get("call_id"), str):
        raise InvalidRequestError(f"{where}.call_id must be a string.", f"{where}.call_id")
    output = item.get("output")
    if not isinstance(output, str | list):
        output = json.dumps(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": output}
