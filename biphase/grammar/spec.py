"""What a client may ask of the output's form, as the text that travels to the workers. Standard library only.

Each builder takes values as they came in JSON, checks form and size, and returns a StructuredOutput whose `spec` is in
one canonical form, so that equal wishes are equal keys. Whether it compiles is for `checker` to say.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from biphase.errors import InvalidRequestError
from biphase.grammar.limits import MAX_CHOICES, MAX_NESTING, MAX_SPEC_CHARACTERS
from biphase.request import StructuredOutput

# White space in JSON that is neither: a space after each comma and colon, as most JSON in the world is written. A model
# that may write white space without end sometimes does, and one that may leave it out stumbles over it.
USUAL_SPACING = None
NO_WHITESPACE = ""


@dataclass(frozen=True, slots=True)
class ToolCallForm:
    """One callable tool: the text before and after its arguments, and their schema."""

    begin: str
    schema: Mapping[str, Any]
    end: str
    # Schema keywords that cannot be enforced are refused instead of left out.
    strict: bool = False


def json_schema(schema: Any, *, whitespace: str | None = USUAL_SPACING) -> StructuredOutput:
    """
    Args:
        schema: a JSON schema: an object, true or false, or the JSON text of one.
        whitespace: regular expression of what may stand between two parts, where it is not the usual.

    Raises:
        InvalidRequestError: no schema, too deep or too large.
    """
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"The JSON schema is no JSON: {error}"[:300]) from None
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequestError("A JSON schema must be an object.")
    if isinstance(schema, Mapping):
        _check_nesting(schema)
    return StructuredOutput("json_schema", _json({"schema": schema, "whitespace": whitespace}))


def json_object(*, whitespace: str | None = USUAL_SPACING) -> StructuredOutput:
    """Any JSON object."""
    return StructuredOutput("json_object", _json({"whitespace": whitespace}))


def regex(pattern: Any) -> StructuredOutput:
    """The whole output matches `pattern`, which has no look-around and no back-references."""
    return StructuredOutput("regex", _text(pattern, "regex"))


def grammar(text: Any) -> StructuredOutput:
    """A context-free grammar: EBNF in GBNF's form (`root ::= ...`) or Lark's (`start: ...`)."""
    return StructuredOutput("grammar", _text(text, "grammar"))


def choice(options: Any) -> StructuredOutput:
    """One of some texts.

    Raises:
        InvalidRequestError: none, too many, or something that is no text.
    """
    if not isinstance(options, Sequence) or isinstance(options, str) or not options:
        raise InvalidRequestError("choice must be a list of at least one string.")
    if len(options) > MAX_CHOICES:
        raise InvalidRequestError(f"choice may hold at most {MAX_CHOICES} strings, got {len(options)}.")
    if not all(isinstance(option, str) and option for option in options):
        raise InvalidRequestError("choice must hold strings that are not empty.")
    return StructuredOutput("choice", _json(list(dict.fromkeys(options))))


def structural_tag(given: Any) -> StructuredOutput:
    """Free text in which every trigger begins one of the tags, whose inside follows its schema.

    Args:
        given: {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, or its JSON text.

    Raises:
        InvalidRequestError: another form, or a tag that no trigger begins.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequestError("structural_tag is no JSON.") from None
    if not isinstance(given, Mapping):
        raise InvalidRequestError("structural_tag must be an object.")
    if "format" in given:
        raise InvalidRequestError("structural_tag.format is not supported; use structures and triggers.")
    structures: Any = given.get("structures")
    triggers: Any = given.get("triggers")
    if not _is_list_of(structures, Mapping) or not _is_list_of(triggers, str):
        raise InvalidRequestError("structural_tag must have lists of structures and of triggers.")
    tags = [_tag(structure, f"structures.{place}", triggers) for place, structure in enumerate(structures)]
    return StructuredOutput("structural_tag", _json({"tags": tags}))


def tool_calls(
    calls: Sequence[ToolCallForm],
    *,
    prefix: str,
    suffix: str,
    separator: str,
    many: bool,
    content: StructuredOutput | None = None,
) -> StructuredOutput:
    """One call, or several, of some tools in a model's own format: prefix, calls with separators between, suffix.

    Args:
        content: what may come in place of calls; None: nothing.
    """
    for call in calls:
        _check_nesting(call.schema)
    return StructuredOutput(
        "tool_calls",
        _json(
            {
                "prefix": prefix,
                "suffix": suffix,
                "separator": separator,
                "many": many,
                "content": None if content is None else {"kind": content.kind, "spec": content.spec},
                "calls": [
                    {"begin": call.begin, "schema": call.schema, "end": call.end, "strict": call.strict}
                    for call in calls
                ],
            }
        ),
    )


def _tag(structure: Mapping[str, Any], where: str, triggers: Sequence[str]) -> dict[str, Any]:
    begin, end, schema = structure.get("begin"), structure.get("end", ""), structure.get("schema", {})
    if not isinstance(begin, str) or not isinstance(end, str) or not isinstance(schema, Mapping | bool):
        raise InvalidRequestError(f"structural_tag.{where} must have begin, schema and end.")
    found = [trigger for trigger in triggers if trigger and begin.startswith(trigger)]
    if not found:
        raise InvalidRequestError(f"structural_tag.{where}.begin starts with none of the triggers.")
    if isinstance(schema, Mapping):
        _check_nesting(schema)
    return {"trigger": max(found, key=len), "begin": begin, "schema": schema, "end": end}


def _is_list_of(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, kind) for item in value)


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(f"{name} must be a string that is not empty.")
    _check_size(value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequestError(f"{name} holds characters that have no UTF-8 form.") from None
    return value


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        raise InvalidRequestError("The JSON schema holds a number that is not finite.") from None
    _check_size(text)
    return text


def _check_size(text: str) -> None:
    if len(text) > MAX_SPEC_CHARACTERS:
        raise InvalidRequestError(
            f"The description of the output has {len(text)} characters; at most {MAX_SPEC_CHARACTERS} are allowed."
        )


def _check_nesting(schema: Any) -> None:
    level = [schema]
    for _ in range(MAX_NESTING):
        children = [item.values() if isinstance(item, Mapping) else item for item in level]
        level = [child for group in children for child in group if isinstance(child, Mapping | list)]
        if not level:
            return
    raise InvalidRequestError(f"The JSON schema is nested more than {MAX_NESTING} levels deep.")
