"""Random schemas, random logits at temperature 1: whatever comes to its end is JSON, and valid."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from biphase.grammar import spec
from biphase.grammar.compiler import GrammarCompiler
from biphase.tokenizer.tokenizer import ModelTokenizer
from tests.grammar.walking import EOS, params_of, row_of, walk

_WORDS = ["alpha", "b", "quo\"te", "é", "x y", "Ωmega", ""]  # fmt: skip


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const"]
    if depth < 3:
        kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf"]
    kind = rng.choice(kinds) if depth else "object"
    if kind == "enum":
        return {"enum": rng.sample([1, 2.5, None, True, *_WORDS], 3)}
    if kind == "const":
        return {"const": rng.choice([0, "fixed", [1, "a"], {"k": None}])}
    if kind == "integer":
        low = rng.randint(-500, 500)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 2000)}
    if kind == "number":
        return {"type": "number", "minimum": -10, "exclusiveMaximum": 25.5}
    if kind == "string":
        return rng.choice(
            [
                {"type": "string", "minLength": 1, "maxLength": rng.randint(1, 12)},
                {"type": "string", "pattern": "^[a-f]{2,4}(-[0-9]+)?$"},
            ]
        )
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": random_schema(rng, depth + 1),
            "minItems": least,
            "maxItems": least + rng.randint(0, 3),
        }
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}
    if kind == "object":
        names = rng.sample(["a", "b", "name", "items", "we ird", "ü"], rng.randint(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(rng, depth + 1) for name in names},
            "required": [name for name in names if rng.random() < 0.7],
            "additionalProperties": False,
        }
    return {"type": kind}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """The keywords that random_schema uses, each by its definition."""
    if "anyOf" in schema:
        return any(is_valid(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return any(type(value) is type(option) and value == option for option in schema["enum"])
    if "const" in schema:
        return bool(value == schema["const"])
    kind = schema["type"]
    if kind == "null":
        return value is None
    if kind == "boolean":
        return isinstance(value, bool)
    if kind == "integer":
        return type(value) is int and schema["minimum"] <= value <= schema["maximum"]
    if kind == "number":
        return type(value) in (int, float) and schema["minimum"] <= value < schema["exclusiveMaximum"]
    if kind == "string":
        pattern = schema.get("pattern", "")
        return (
            isinstance(value, str)
            and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 10**6)
            and re.search(pattern, value) is not None
        )
    if kind == "array":
        return (
            isinstance(value, list)
            and schema["minItems"] <= len(value) <= schema["maxItems"]
            and all(is_valid(item, schema["items"]) for item in value)
        )
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= value.keys() <= schema["properties"].keys()
        and all(is_valid(item, schema["properties"][name]) for name, item in value.items())
    )


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_sampled_is_valid(
    grammar_compiler: GrammarCompiler, grammar_tokenizer: ModelTokenizer, seed: int
) -> None:
    schema = random_schema(random.Random(seed))
    asked = spec.json_schema(schema)
    for draw in range(3):
        params = params_of(asked, seed=draw, max_tokens=1500, top_p=0.98 if draw == 2 else 1.0)
        tokens = walk(row_of(grammar_compiler, params), seed * 10 + draw)
        assert tokens[-1] == EOS, "every one of these schemas has an end"
        text = grammar_tokenizer.decode(tokens[:-1])
        assert is_valid(json.loads(text), schema), (schema, text)
