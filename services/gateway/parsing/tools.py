"""The fields that concern tools: which there are, and whether the model may, must or must not call one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from biphase.errors import InvalidRequestError
from services.gateway.parsing.sampling import invalid
from services.gateway.wire import ChatRequest


@dataclass(frozen=True, slots=True)
class AskedTools:
    """
    Attributes:
        shown: what the chat template gets.
        callable: those that may be called; all, or the one that the client named.
        is_required: the answer is calls and nothing else.
        is_named: the client chose the one.
        many: more than one call may be made. Where calls are all that may come, only if the client says so: a model
            that is not sure whether it is done would go on calling, since the grammar offers nothing else to say.
    """

    shown: list[dict[str, Any]]
    callable: list[dict[str, Any]]
    is_required: bool
    is_named: bool
    many: bool


def parse_tools(body: ChatRequest) -> AskedTools | None:
    """None when there are no tools, or none may be called.

    Raises:
        InvalidRequestError: tools or a choice that make no sense.
    """
    if body.tools is not None and not body.tools:
        raise invalid(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
            "tools",
        )
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(body.tools or ())]
    choice = body.tool_choice
    if choice == "none":
        return None
    if not tools:
        if choice is not None:
            raise invalid("When using `tool_choice`, `tools` must be set.", "tool_choice")
        return None
    parallel = body.parallel_tool_calls
    if choice in (None, "auto"):
        return AskedTools(tools, tools, is_required=False, is_named=False, many=parallel is not False)
    if choice == "required":
        return AskedTools(tools, tools, is_required=True, is_named=False, many=parallel is True)
    name = _named_choice(choice)
    named = [tool for tool in tools if tool["function"]["name"] == name]
    if not named:
        raise invalid("The tool that `tool_choice` names is not among `tools`.", "tool_choice", name)
    return AskedTools(tools, named[:1], is_required=True, is_named=True, many=False)


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
