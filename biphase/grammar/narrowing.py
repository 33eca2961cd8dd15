"""Makes JSON schemas say what their authors mean: an object that lists its properties has no others.

By the letter of JSON Schema any further property is allowed. A model that may invent some does, small ones without end.
Output under the narrower schema is valid under the wider one too. Nothing is narrowed that could become unsatisfiable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Keywords whose values are schemas, lists of schemas, or schemas by name.
_SCHEMA = ("items", "additionalProperties", "contains")
_LISTS = ("anyOf", "oneOf", "prefixItems", "items")
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
# What says already what else an object may have, or looks at properties from another place.
_DECIDED = ("additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "anyOf", "oneOf")


def narrowed(schema: Any) -> Any:
    """The schema with `additionalProperties: false` where an object lists its properties and says nothing of others."""
    return schema if _has_all_of(schema) else _narrow(schema)


def _has_all_of(schema: Any) -> bool:
    """Parts of an allOf each see all properties: one that is closed would refuse the others'."""
    if isinstance(schema, Mapping):
        return "allOf" in schema or any(_has_all_of(value) for value in schema.values())
    return isinstance(schema, list) and any(_has_all_of(value) for value in schema)


def _narrow(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    found = dict(schema)
    for name in _SCHEMA:
        if isinstance(found.get(name), Mapping):
            found[name] = _narrow(found[name])
    for name in _LISTS:
        if isinstance(found.get(name), list):
            found[name] = [_narrow(item) for item in found[name]]
    for name in _NAMED:
        if isinstance(found.get(name), Mapping):
            found[name] = {key: _narrow(value) for key, value in found[name].items()}
    properties = found.get("properties")
    if isinstance(properties, Mapping) and not any(name in found for name in _DECIDED):
        required, least = found.get("required", []), found.get("minProperties", 0)
        if isinstance(required, list) and set(map(str, required)) <= properties.keys() and least == 0:
            found["additionalProperties"] = False
    return found
