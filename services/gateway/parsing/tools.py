"""The `tools`, `tool_choice` and structured output fields: what is well formed, and what can be honoured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from biphase.errors import InvalidRequestError, UnsupportedError
from services.gateway.http_errors import shown
from services.gateway.parsing.sampling import invalid
from services.gateway.wire import ChatRequest, GenerationFields

_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")
_NOT_YET = "Structured output is not supported by this server yet; the request would not be constrained."


def parse_tools(body: ChatRequest) -> list[dict[str, Any]] | None:
    """The tools that the chat template gets; None when there are none or tool_choice is "none".

    Raises:
        InvalidRequestError: tools or a choice that make no sense.
        UnsupportedError: a choice that needs constrained output.
    """
    if body.tools is not None and not body.tools:
        raise invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if choice is None:
        return tools or None
    if choice == "none":
        return None
    if not tools:
        raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if choice == "auto":
        return tools
    if choice != "required":
        name = _named_choice(choice)
        if name not in [tool["function"]["name"] for tool in tools]:
            raise invalid("The tool that `tool_choice` names is not among `tools`.", "tool_choice", name)
    raise UnsupportedError(
        "tool_choice 'required' and named tools need structured output, which this server does not support yet.",
        "tool_choice",
    )


def _tool(tool: Any, where: str) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(tool, dict) or tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must be {{'type': 'function', 'function': {{...}}}}.", where)
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise InvalidRequestError(f"{where}.function.name must be a string.", f"{where}.function.name")
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequestError(f"{where}.function.parameters must be an object.", f"{where}.function.parameters")
    return {**tool, "type": "function"}


def _named_choice(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid("tool_choice must be 'none', 'auto', 'required' or name a function.", "tool_choice", choice)
    return str(function["name"])


def refuse_structured_output(body: GenerationFields) -> None:
    """Never silently unconstrained text: what cannot be honoured is refused, what is malformed is the caller's fault.

    Raises:
        InvalidRequestError: malformed.
        UnsupportedError: well formed.
    """
    if body.response_format is not None:
        _response_format(body.response_format)
    if body.structured_outputs is not None:
        _structured_outputs(body.structured_outputs)
    for name in _GUIDED:
        if getattr(body, name) is not None:
            raise invalid(f"{name} was removed; use structured_outputs instead.", name)


def _response_format(given: Any) -> None:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise invalid("response_format.json_schema.schema must be a JSON schema.", "response_format")
    elif kind not in ("json_object", "structural_tag"):
        raise invalid(
            "response_format.type must be text, json_object, json_schema or structural_tag.", "response_format", kind
        )
    raise UnsupportedError(_NOT_YET, "response_format")


def _structured_outputs(given: Any) -> None:
    if not isinstance(given, Mapping):
        raise invalid("structured_outputs must be an object.", "structured_outputs")
    kinds = [kind for kind in _KINDS if given.get(kind) is not None]
    if len(kinds) != 1:
        raise invalid(
            f"structured_outputs must have exactly one of {', '.join(_KINDS)}; it has {shown(len(kinds))}.",
            "structured_outputs",
        )
    raise UnsupportedError(_NOT_YET, "structured_outputs")
