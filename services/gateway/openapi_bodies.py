"""What the bodies' models leave open, for /openapi.json: ranges, and the form of fields that parsers check by hand.

A description for clients and their tools. Nothing here refuses anything; the parsers do.
"""

from __future__ import annotations

from typing import Any

_STRINGS = {"type": "array", "items": {"type": "string"}}
_OBJECT = {"type": "object"}
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "required": ["type", "text"],
                "properties": {
                    "type": {"enum": ["text", "input_text", "output_text"]},
                    "text": {"type": "string"},
                },
            },
        },
        {"type": "null"},
    ]
}
_CALL = {
    "type": "object",
    "required": ["id", "type", "function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string"}},
        },
    },
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string", "minLength": 1, "examples": ["system", "user", "assistant", "tool"]},
            "content": _CONTENT,
            "name": {"type": ["string", "null"]},
            "tool_call_id": {"type": ["string", "null"]},
            "tool_calls": {"type": ["array", "null"], "items": _CALL},
        },
    },
}
_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
    },
}
_TOOL = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {"type": {"const": "function"}, "function": _FUNCTION},
}
_FLAT_TOOL = {
    **_FUNCTION,
    "required": ["type", "name"],
    "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},  # type: ignore[dict-item]
}
_SCHEMA_FORMAT = {
    "type": "object",
    "required": ["type"],
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}, "json_schema": _OBJECT},
}

# Ranges, merged into the field's numbers.
_RANGES: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2},
    "top_p": {"exclusiveMinimum": 0, "maximum": 1},
    "top_k": {"minimum": -1},
    "min_p": {"minimum": 0, "maximum": 1},
    "frequency_penalty": {"minimum": -2, "maximum": 2},
    "presence_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"exclusiveMinimum": 0},
    "n": {"minimum": 1},
    "seed": {"minimum": -(2**63), "maximum": 2**63 - 1},
    "max_tokens": {"minimum": 1},
    "max_completion_tokens": {"minimum": 1},
    "max_output_tokens": {"minimum": 1},
    "min_tokens": {"minimum": 0},
    "top_logprobs": {"minimum": 0, "maximum": 20},
    "prompt_logprobs": {"minimum": 0, "maximum": 20},
    "priority": {"minimum": -(2**31), "maximum": 2**31 - 1},
    "cache_salt": {"minLength": 1, "maxLength": 128, "pattern": r"^[^@/\\\x00]*$"},
    "truncation_side": {"enum": ["left", "right"]},
    "truncation": {"enum": ["auto", "disabled"]},
}
# Fields whose type is left open where they are parsed; null means absent.
_FORMS: dict[str, dict[str, Any]] = {
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}},
    "response_format": _SCHEMA_FORMAT,
    "structured_outputs": {"type": "object", "description": "one of json, regex, choice, grammar, json_object"},
    "prompt": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            _TOKEN_IDS,
            {"type": "array", "minItems": 1, "items": _TOKEN_IDS},
        ]
    },
    "input": {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "minItems": 1, "items": {**_MESSAGES["items"], "required": ["role", "content"]}},  # type: ignore[dict-item]
        ]
    },
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
    "include": {**_STRINGS, "examples": [["message.output_text.logprobs"]]},
}


def described(schema: dict[str, Any]) -> dict[str, Any]:
    """A body's schema with what is known beyond its model. `schema` is changed."""
    properties = schema.get("properties", {})
    for name, field in properties.items():
        for branch in (field, *field.get("anyOf", ())):
            if name in _RANGES and branch.get("type") in ("integer", "number", "string"):
                branch.update(_RANGES[name])
    for name, form in _FORMS.items():
        if name in properties and not properties[name].keys() & {"type", "anyOf"}:
            properties[name] |= {"anyOf": [form, {"type": "null"}]}
    if "messages" in properties:
        required = "messages" in schema.get("required", ())
        properties["messages"] = _MESSAGES if required else {"anyOf": [_MESSAGES, {"type": "null"}]}
    if "tools" in properties:
        tool = _FLAT_TOOL if "input" in properties else _TOOL
        properties["tools"] = {"anyOf": [{"type": "array", "minItems": 1, "items": tool}, {"type": "null"}]}
    return schema
