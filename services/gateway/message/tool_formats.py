"""The tool-call formats of model families: which one a model uses, how to ask for it, how to read it.

A template that knows tools shows them its own way. For one that does not, the tools are described in the system message
and earlier calls are written out in the format, so that any instruction-tuned model can be asked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from biphase.grammar import spec
from biphase.request import StructuredOutput
from services.gateway.message.tool_readers import HermesReader, LlamaReader, MistralReader, ToolReader

Tool = Mapping[str, Any]
Message = dict[str, Any]

# A tool that says nothing of its parameters takes none.
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one family writes calls: `call` for each, with `separator` between, and `prefix` and `suffix` around all."""

    name: str
    # NAME stands for the name, which is JSON text unless bare, and ARGUMENTS for the arguments' JSON.
    call: str
    separator: str
    # Texts that mark calls; where they are special tokens, they have to stay in the text.
    marks: tuple[str, ...]
    reader: Callable[[Collection[str], int], ToolReader]
    # Words of a chat template that show that its model writes so.
    template_words: tuple[str, ...]
    prefix: str = ""
    suffix: str = ""
    has_bare_names: bool = False

    def grammar(
        self, tools: Sequence[Tool], *, many: bool, content: StructuredOutput | None = None
    ) -> StructuredOutput:
        """Output that is one call, or several where `many`, of these tools; or else `content`."""
        forms = []
        for tool in tools:
            function = tool["function"]
            begin, end = self._around_arguments(function["name"])
            schema = function.get("parameters") or _NO_PARAMETERS
            forms.append(spec.ToolCallForm(begin, schema, end, strict=bool(function.get("strict"))))
        return spec.tool_calls(
            forms, prefix=self.prefix, suffix=self.suffix, separator=self.separator, many=many, content=content
        )

    def write(self, calls: Sequence[Mapping[str, Any]]) -> str:
        """Calls of an earlier turn as the model would have written them."""
        return self.prefix + self.separator.join(self._written(call["function"]) for call in calls) + self.suffix

    def _written(self, function: Mapping[str, Any]) -> str:
        begin, end = self._around_arguments(function["name"])
        return begin + json.dumps(function["arguments"], ensure_ascii=False) + end

    def _around_arguments(self, name: str) -> tuple[str, str]:
        begin, _, end = self.call.partition("ARGUMENTS")
        return begin.replace("NAME", name if self.has_bare_names else json.dumps(name), 1), end


HERMES = ToolFormat(
    name="hermes",
    call='<tool_call>\n{"name": NAME, "arguments": ARGUMENTS}\n</tool_call>',
    separator="\n",
    marks=(HermesReader.begin, HermesReader.end),
    reader=HermesReader,
    template_words=("<tool_call>",),
)
LLAMA3 = ToolFormat(
    name="llama3_json",
    call='{"name": NAME, "parameters": ARGUMENTS}',
    separator="; ",
    marks=(LlamaReader.begin,),
    reader=LlamaReader,
    template_words=("<|python_tag|>", "<|eom_id|>", '{"name": function name, "parameters":'),
)
MISTRAL = ToolFormat(
    name="mistral",
    call='{"name": NAME, "arguments": ARGUMENTS}',
    prefix="[TOOL_CALLS][",
    suffix="]",
    separator=", ",
    marks=(MistralReader.begin, MistralReader.args_mark),
    reader=MistralReader,
    template_words=("[TOOL_CALLS]",),
)
# Models since 2025: the name stands bare, and arguments follow their own mark.
MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    call="[TOOL_CALLS]NAME[ARGS]ARGUMENTS",
    separator="",
    marks=(MistralReader.begin, MistralReader.args_mark),
    reader=MistralReader,
    template_words=("[ARGS]",),
    has_bare_names=True,
)

FORMATS = {tool_format.name: tool_format for tool_format in (HERMES, LLAMA3, MISTRAL_ARGS, MISTRAL)}


def detect(template: str) -> ToolFormat:
    """The format of a chat template's model; that of most when the template says nothing."""
    for tool_format in (MISTRAL_ARGS, MISTRAL, HERMES, LLAMA3):
        if any(word in template for word in tool_format.template_words):
            return tool_format
    return HERMES


def described(messages: Sequence[Message], tools: Sequence[Tool], tool_format: ToolFormat) -> list[Message]:
    """The messages with the tools in the system message, for a template that shows none."""
    shown = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = tool_format.write([{"function": {"name": "NAME", "arguments": {"PARAMETER": "VALUE"}}}])
    text = (
        f"You can call these functions, each described by a JSON schema:\n{shown}\n\n"
        f"To call one, answer with nothing but this, with its name and its arguments filled in:\n{example}\n\n"
        "When no function helps, answer in words."
    )
    first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
    if first is None:
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": _joined(first["content"], text)}, *messages[1:]]


def written_out(messages: Sequence[Message], tool_format: ToolFormat) -> list[Message]:
    """Earlier calls and their results as plain text, for a template that knows neither."""
    written: list[Message] = []
    for place, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            kept = {name: value for name, value in message.items() if name != "tool_calls"}
            written.append({**kept, "content": _joined(message["content"], tool_format.write(calls), "\n")})
        elif message["role"] == "tool":
            content = _joined("<tool_response>", _plain(message["content"]), "\n") + "\n</tool_response>"
            if place and messages[place - 1]["role"] == "tool":
                # Results of one turn's calls come in one turn.
                written[-1]["content"] += "\n" + content
            else:
                written.append({"role": "user", "content": content})
        else:
            written.append(dict(message))
    return written


def _plain(content: Any) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)


def _joined(content: Any, text: str, between: str = "\n\n") -> Any:
    """`text` after `content`, which may be a list of parts."""
    if isinstance(content, list):
        return [*content, {"type": "text", "text": text}]
    return f"{content}{between}{text}" if content else text
