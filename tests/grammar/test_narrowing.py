"""Objects that list their properties have no others, unless their schema says so or could not be met without."""

from __future__ import annotations

from typing import Any

import pytest

from biphase.grammar.narrowing import narrowed

A: dict[str, Any] = {"properties": {"a": {"type": "integer"}}}
CLOSED = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (A, CLOSED),
        ({"properties": {}}, {"properties": {}, "additionalProperties": False}),
        ({"properties": {"b": A}}, {"properties": {"b": CLOSED}, "additionalProperties": False}),
        ({"items": A, "$defs": {"x": A}}, {"items": CLOSED, "$defs": {"x": CLOSED}}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"prefixItems": [A]}, {"prefixItems": [CLOSED]}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED}),
        # A property of that name is no keyword.
        ({"properties": {"anyOf": A}}, {"properties": {"anyOf": CLOSED}, "additionalProperties": False}),
    ],
)
def test_what_is_narrowed(schema: dict[str, Any], expected: dict[str, Any]) -> None:
    before = repr(schema)
    assert narrowed(schema) == expected
    assert repr(schema) == before


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "patternProperties": {"^x": {}}},
        {**A, "required": ["a", "b"]},
        {**A, "minProperties": 2},
        {**A, "$ref": "#/$defs/x"},
        {**A, "anyOf": [{"required": ["b"]}]},
        {"allOf": [A, {"properties": {"b": {}}}]},
        {"properties": {"b": {"allOf": [A, A]}}},
        True,
    ],
)
def test_what_is_left_alone(schema: Any) -> None:
    assert narrowed(schema) == schema
