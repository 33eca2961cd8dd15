"""From a StructuredOutput to the grammar text that llguidance compiles.

Owns the form of each kind's grammar. Output of models that think first is free text up to the mark that ends it, and
only then the grammar. Texts that are special tokens of the model (marks of tool calls, of reasoning) are asked for by
their ids, since no text spells them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from biphase.errors import InvalidRequestError
from biphase.grammar import gbnf
from biphase.grammar.narrowing import narrowed
from biphase.grammar.spec import USUAL_SPACING
from biphase.request import StructuredOutput

# What may stand between the end of reasoning and the answer.
_AFTER_REASONING = r"/\s{0,4}/"


def to_engine(asked: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """
    Args:
        special_tokens: ids by text, of tokens that text never makes.

    Raises:
        InvalidRequestError: it has no grammar.
    """
    body = _body(asked.kind, asked.spec, special_tokens)
    grammars = [body]
    if asked.kind == "tool_calls" and (content := json.loads(asked.spec)["content"]) is not None:
        grammars.append({"name": "content", **_body(content["kind"], content["spec"], special_tokens)})
    if asked.reasoning_end:
        body["name"] = "body"
        grammars.insert(0, {"lark_grammar": _reasoning(asked, special_tokens)})
    return json.dumps({"grammars": grammars})


def _body(kind: str, spec: str, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    if kind not in _BODIES:
        raise InvalidRequestError(f"unknown kind of structured output: {kind[:40]}")
    return _BODIES[kind](spec, special_tokens)


def _reasoning(asked: StructuredOutput, special_tokens: Mapping[str, int]) -> str:
    """Free text up to the mark. When the model opens its reasoning itself, it may also answer at once."""
    if asked.reasoning_end in special_tokens:
        free = f"/(?s:.)*/ <[{special_tokens[asked.reasoning_end]}]>"
        rules = f"free: {free}"
    else:
        rules = f"free[lazy]: /(?s:.)*{_in_regex(asked.reasoning_end)}/"
    begin = f"{_literal(asked.reasoning_start, special_tokens)} free {_AFTER_REASONING}"
    whole = f"({begin})? @body" if asked.reasoning_start else f"free {_AFTER_REASONING} @body"
    return f"start: {whole}\n{rules}\n"


def _json_schema(spec: str, _: Mapping[str, int]) -> dict[str, Any]:
    given = json.loads(spec)
    return {"json_schema": _with_options(given["schema"], given["whitespace"])}


def _json_object(spec: str, _: Mapping[str, int]) -> dict[str, Any]:
    return {"json_schema": _with_options({"type": "object"}, json.loads(spec)["whitespace"])}


def _regex(spec: str, _: Mapping[str, int]) -> dict[str, Any]:
    return {"lark_grammar": f"start: /{_slashes_escaped(spec)}/"}


def _choice(spec: str, _: Mapping[str, int]) -> dict[str, Any]:
    # One terminal: 40,000 choices are one automaton instead of as many lexemes to tell apart.
    options = " | ".join(json.dumps(option, ensure_ascii=False) for option in json.loads(spec))
    return {"lark_grammar": f"start: CHOICE\nCHOICE: {options}\n"}


def _grammar(spec: str, _: Mapping[str, int]) -> dict[str, Any]:
    return {"lark_grammar": spec if gbnf.is_lark(spec) else gbnf.to_lark(spec)}


def _structural_tag(spec: str, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    tags = json.loads(spec)["tags"]
    lines = [f"start: ({' | '.join(f'tag_{number}' for number in range(len(tags)))})* TEXT", "TEXT: /(?s:.)*/"]
    for number, tag in enumerate(tags):
        trigger = tag["trigger"]
        rest = _literal(tag["begin"].removeprefix(trigger), special_tokens)
        inner = f"{rest} {_json_rule(tag['schema'], strict=True)} {_literal(tag['end'], special_tokens)}"
        if trigger in special_tokens:
            lines.append(f"tag_{number}: TEXT <[{special_tokens[trigger]}]> {inner}")
        else:
            # Lazy: it ends where the trigger is complete, and no free text may hold the trigger.
            lines.append(f"head_{number}[lazy]: TEXT {json.dumps(trigger)}")
            lines.append(f"tag_{number}: head_{number} {inner}")
    return {"lark_grammar": "\n".join(lines) + "\n"}


def _tool_calls(spec: str, special_tokens: Mapping[str, int]) -> dict[str, Any]:
    given = json.loads(spec)

    def literal(name: str) -> str:
        return _literal(given[name], special_tokens)

    more = f"({literal('separator')} call)*" if given["many"] else ""
    calls = given["calls"]
    otherwise = " | @content" if given["content"] is not None else ""
    lines = [
        f"start: {literal('prefix')} call {more} {literal('suffix')}{otherwise}",
        f"call: {' | '.join(f'call_{number}' for number in range(len(calls)))}",
    ]
    for number, call in enumerate(calls):
        arguments = _json_rule(call["schema"], strict=call["strict"])
        begin, end = (_literal(call[name], special_tokens) for name in ("begin", "end"))
        lines.append(f"call_{number}: {begin} {arguments} {end}")
    return {"lark_grammar": "\n".join(lines) + "\n"}


_BODIES = {
    "json_schema": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "structural_tag": _structural_tag,
    "tool_calls": _tool_calls,
}


def _json_rule(schema: Any, *, strict: bool) -> str:
    return "%json " + json.dumps(_with_options(schema, USUAL_SPACING, strict=strict))


def _with_options(schema: Any, whitespace: str | None, *, strict: bool = True) -> Any:
    """The schema with the compiler's options set by us: the client's own would let keywords pass unenforced."""
    if schema is False:
        raise InvalidRequestError("nothing matches the schema false")
    options: dict[str, Any] = {
        "lenient": not strict,
        "coerce_one_of": not strict,
        "whitespace_flexible": bool(whitespace),
    }
    if whitespace is None:
        options |= {"key_separator": ": ", "item_separator": ", "}
    elif whitespace:
        options["whitespace_pattern"] = whitespace
    return {**(narrowed(schema) if isinstance(schema, Mapping) else {}), "x-guidance": options}


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """A Lark expression for a fixed text, with the special tokens in it by their ids."""
    inside = [token for token in special_tokens if token and token in text]
    if not inside:
        return json.dumps(text, ensure_ascii=False) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, sorted(inside, key=len, reverse=True))) + ")", text)
    return " ".join(
        f"<[{special_tokens[part]}]>" if part in special_tokens else json.dumps(part, ensure_ascii=False)
        for part in parts
        if part
    )


def _in_regex(text: str) -> str:
    return "".join(char if char.isalnum() else f"\\u{{{ord(char):x}}}" for char in text)


def _slashes_escaped(pattern: str) -> str:
    """The pattern as it stands between slashes in Lark."""
    return re.sub(r"(\\.)|(/)|(\n)", lambda found: found[1] or ("\\/" if found[2] else "\\n"), pattern, flags=re.DOTALL)
