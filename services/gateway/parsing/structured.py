"""The fields that ask for a form of the output: one of them, or none. `biphase.grammar.spec` says what they mean."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from biphase.errors import InvalidRequestError
from biphase.grammar import spec
from biphase.request import StructuredOutput
from services.gateway.http_errors import shown
from services.gateway.parsing.sampling import invalid
from services.gateway.wire import GenerationFields

_KINDS: dict[str, Callable[[Any], StructuredOutput]] = {
    "json": spec.json_schema,
    "regex": spec.regex,
    "choice": spec.choice,
    "grammar": spec.grammar,
    "json_object": lambda _: spec.json_object(),
    "structural_tag": spec.structural_tag,
}
# The names that vLLM had before, which clients still send.
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


@dataclass(frozen=True, slots=True)
class AskedForm:
    """What was asked, and by which field: errors name it."""

    structured: StructuredOutput
    param: str


def parse_structured(body: GenerationFields) -> AskedForm | None:
    """
    Raises:
        InvalidRequestError: malformed, too large, or more than one of them.
    """
    found = [form for form in (_response_format(body.response_format), _structured_outputs(body.structured_outputs))
             if form is not None]  # fmt: skip
    for name, kind in _GUIDED.items():
        value = getattr(body, name)
        if value is not None:
            found.append(_built(kind, value, name, whitespace=_whitespace(body.guided_whitespace_pattern, None, name)))
    if len(found) > 1:
        raise invalid(
            f"Only one of {', '.join(form.param for form in found)} may be given: each says the output's form.",
            found[1].param,
        )
    return found[0] if found else None


def _response_format(given: Any) -> AskedForm | None:
    if given is None:
        return None
    param = "response_format"
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return AskedForm(spec.json_object(), param)
    if kind == "json_schema":
        inner = given.get("json_schema")
        schema = inner.get("schema") if isinstance(inner, Mapping) else None
        if not isinstance(schema, Mapping | bool):
            raise invalid("response_format.json_schema.schema must be a JSON schema.", param)
        return _built("json", schema, "response_format.json_schema")
    if kind == "structural_tag":
        return _built("structural_tag", given, param)
    raise invalid("response_format.type must be text, json_object, json_schema or structural_tag.", param, kind)


def _structured_outputs(given: Any) -> AskedForm | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise invalid("structured_outputs must be an object.", "structured_outputs")
    # json_object is a switch; false is the same as absent.
    kinds = [kind for kind in _KINDS if given.get(kind) is not None and (kind, given[kind]) != ("json_object", False)]
    if len(kinds) != 1:
        raise invalid(
            f"structured_outputs must have exactly one of {', '.join(_KINDS)}; it has {shown(len(kinds))}.",
            "structured_outputs",
        )
    if given.get("disable_additional_properties"):
        raise invalid(
            "structured_outputs.disable_additional_properties is not supported; say it in the schema.",
            "structured_outputs",
        )
    whitespace = _whitespace(given.get("whitespace_pattern"), given.get("disable_any_whitespace"), "structured_outputs")
    return _built(kinds[0], given[kinds[0]], f"structured_outputs.{kinds[0]}", whitespace=whitespace)


def _whitespace(pattern: Any, disabled: Any, param: str) -> str | None:
    if disabled:
        return spec.NO_WHITESPACE
    if pattern is None:
        return spec.USUAL_SPACING
    if not isinstance(pattern, str):
        raise invalid("whitespace_pattern must be a regular expression.", param)
    return pattern


def _built(kind: str, value: Any, param: str, *, whitespace: str | None = spec.USUAL_SPACING) -> AskedForm:
    try:
        if kind == "json":
            return AskedForm(spec.json_schema(value, whitespace=whitespace), param)
        if kind == "json_object":
            return AskedForm(spec.json_object(whitespace=whitespace), param)
        return AskedForm(_KINDS[kind](value), param)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{param}: {error.message}", param) from None
