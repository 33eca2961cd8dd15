"""What may be asked, in what form: sizes, nesting, exactly one meaning."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from biphase.errors import InvalidRequestError
from biphase.grammar import spec
from biphase.grammar.limits import MAX_CHOICES, MAX_NESTING, MAX_SPEC_CHARACTERS


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


def test_equal_wishes_are_equal_keys() -> None:
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    assert spec.json_schema(schema) == spec.json_schema(json.dumps(schema, indent=3))
    # The order of properties is the order of the output.
    assert spec.json_schema(schema) != spec.json_schema({"type": "object", "properties": {"a": {}, "b": {}}})
    assert spec.choice(["a", "b", "a"]) == spec.choice(["a", "b"])


def test_nesting_is_bounded_without_recursion() -> None:
    spec.json_schema(nested(MAX_NESTING))
    for depth in (MAX_NESTING + 1, 200, 100_000):
        with pytest.raises(InvalidRequestError, match="nested more than 64"):
            spec.json_schema(nested(depth))


@pytest.mark.parametrize(
    ("build", "value", "words"),
    [
        (spec.json_schema, 5, "must be an object"),
        (spec.json_schema, "{", "no JSON"),
        (spec.json_schema, '"[' * 50_000, "no JSON"),
        (spec.json_schema, "[" * 100_000, "no JSON"),
        (spec.json_schema, {"maximum": float("inf")}, "not finite"),
        (spec.regex, "", "regex"),
        (spec.regex, None, "regex"),
        (spec.regex, "\ud800", "UTF-8"),
        (spec.regex, "a" * (MAX_SPEC_CHARACTERS + 1), "characters"),
        (spec.grammar, ["root"], "grammar"),
        (spec.choice, "abc", "list"),
        (spec.choice, [], "at least one"),
        (spec.choice, ["a", ""], "not empty"),
        (spec.choice, ["a", 5], "strings"),
        (spec.choice, ["x"] * (MAX_CHOICES + 1), "at most"),
        (spec.choice, ["x" * 1000 + str(i) for i in range(2000)], "characters"),
        (spec.structural_tag, "{", "no JSON"),
        (spec.structural_tag, [], "object"),
        (spec.structural_tag, {"format": {}}, "not supported"),
        (spec.structural_tag, {"structures": [], "triggers": ["<"]}, "lists"),
        (spec.structural_tag, {"structures": [{"begin": "<a>"}], "triggers": []}, "lists"),
        (spec.structural_tag, {"structures": [{"begin": 5}], "triggers": ["<"]}, "begin"),
        (spec.structural_tag, {"structures": [{"begin": "[a"}], "triggers": ["<"]}, "triggers"),
    ],
)
def test_refusals_say_what_is_wrong(build: Callable[[Any], Any], value: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words):
        build(value)
