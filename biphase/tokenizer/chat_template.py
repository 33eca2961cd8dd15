"""Renders a chat into the text the model was trained on, by the model's own Jinja template.

The environment follows transformers (trim_blocks, lstrip_blocks, loop controls, `tojson` that does not escape HTML,
`raise_exception`, `strftime_now`, a `generation` block that is transparent). Templates come with models, so they run
in Jinja's immutable sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox
from jinja2 import nodes

from biphase.errors import InvalidRequestError, ModelLoadError


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant wrote, for training; in serving it is transparent."""

    tags = {"generation"}  # noqa: RUF012  (declared so by Jinja)

    def parse(self, parser: jinja2.parser.Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class ChatTemplate:
    """
    Args:
        templates: by name; "default", and "tool_use" where the model has one for calls with tools.
        special_tokens: "bos_token" and so on, as variables of the template.

    Raises:
        ModelLoadError: a template does not parse.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        environment = _environment()
        try:
            self._compiled = {name: environment.from_string(text) for name, text in templates.items()}
            self._lists_content = {name: _iterates_content(environment, text) for name, text in templates.items()}
            self._names = set().union(*(_names(environment, text) for text in templates.values()))
        except jinja2.TemplateSyntaxError as error:
            raise ModelLoadError(f"The chat template does not parse: line {error.lineno}: {error.message}") from error
        self._special_tokens = dict(special_tokens)
        # All templates' source.
        self.text = "\n".join(templates.values())

    def wants_content_parts(self, *, with_tools: bool) -> bool:
        """True when the template walks over a message's content parts itself, False when it wants one string."""
        return self._lists_content[self._name(with_tools)]

    def uses(self, name: str) -> bool:
        """Whether a template reads a variable, or a message's field, of that name ("tools", "tool_calls")."""
        return name in self._names

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """
        Args:
            continue_final_message: the text ends with the last message's content, so that the model goes on with it.
            variables: what else the template may ask for (`enable_thinking`, ...).

        Raises:
            InvalidRequestError: the template refuses the messages, or fails on them.
        """
        values = {
            **self._special_tokens,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "documents": documents,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            text = self._compiled[self._name(tools is not None)].render(values)
        except jinja2.exceptions.SecurityError as error:
            raise InvalidRequestError("the chat template did something the sandbox forbids", "messages") from error
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses these messages: {error}"[:500], "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, IndexError, ArithmeticError) as error:
            raise InvalidRequestError(
                f"the chat template fails on these messages: {error}"[:500], "messages"
            ) from error
        except RecursionError as error:
            raise InvalidRequestError("the messages are nested too deeply", "messages") from error
        return _cut_after_final_message(text, messages) if continue_final_message else text

    def _name(self, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._compiled:
            return "tool_use"
        return "default" if "default" in self._compiled else next(iter(self._compiled))


def _cut_after_final_message(text: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """What the template put after the last message's text (end marks) goes away."""
    final = messages[-1].get("content") or ""
    if not isinstance(final, str):
        parts = [part.get("text", "") for part in final if isinstance(part, Mapping)]
        final = parts[-1] if parts else ""
    stripped = final.strip()
    place = text.rfind(stripped)
    if place < 0:
        raise InvalidRequestError(
            "continue_final_message is set, but the chat template does not render the final message's text",
            "continue_final_message",
        )
    whole = text.rfind(final)
    return text[: whole + len(final)] if whole >= 0 and final else text[: place + len(stripped)]


def _iterates_content(environment: jinja2.Environment, text: str) -> bool:
    """Whether some loop runs over `message.content` (or a variable set from it)."""
    tree = environment.parse(text)
    aliases = {
        node.target.name
        for node in tree.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node, frozenset())
    }
    return any(_is_content(loop.iter, frozenset(aliases)) for loop in tree.find_all(nodes.For))


def _names(environment: jinja2.Environment, text: str) -> set[str]:
    """Names of all variables and fields that a template reads."""
    found: set[str] = set()
    for node in environment.parse(text).find_all((nodes.Name, nodes.Getattr, nodes.Getitem, nodes.Const)):
        if isinstance(node, nodes.Name):
            found.add(node.name)
        elif isinstance(node, nodes.Getattr):
            found.add(node.attr)
        elif isinstance(node, nodes.Const) and isinstance(node.value, str):
            # `message['tool_calls']`, `'tool_calls' in message`.
            found.add(node.value)
    return found


def _is_content(node: nodes.Node, aliases: frozenset[str]) -> bool:
    if isinstance(node, nodes.Filter) and node.node is not None:
        return _is_content(node.node, aliases)
    if isinstance(node, nodes.Name):
        return node.name in aliases
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return False
