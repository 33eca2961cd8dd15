"""What readers make of a text must not depend on how it was cut, and must be right for each family's format."""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import replace
from typing import Any

import pytest

from services.gateway.message import reasoning, tool_formats
from services.gateway.message.parts import ToolCall, gather
from services.gateway.message.reader import MessageForm

NAMES = frozenset({"f", "get_weather"})
HERMES = MessageForm(tools=tool_formats.HERMES, tool_names=NAMES)
LLAMA = MessageForm(tools=tool_formats.LLAMA3, tool_names=NAMES)
MISTRAL = MessageForm(tools=tool_formats.MISTRAL, tool_names=NAMES)
THINK = MessageForm(reasoning=reasoning.FORMATS["think"])
OPEN = replace(THINK, reasoning_is_open=True)
BOTH = replace(HERMES, reasoning=reasoning.FORMATS["think"])
F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {}}'
LF = F.replace("arguments", "parameters")
W = '{"name": "get_weather", "arguments": {"city": "<tool_call> é </tool_call>"}}'


def read(form: MessageForm, pieces: list[str]) -> tuple[str, str, list[tuple[str, Any]], str]:
    """Content, reasoning, calls, and the finish reason for "stop"."""
    reader = form.reader()
    content = thoughts = ""
    calls: list[ToolCall] = []
    for place, piece in enumerate(pieces):
        part = reader.push(piece, is_last=place == len(pieces) - 1)
        content += part.content
        thoughts += part.reasoning
        for delta in part.tool_calls:
            # An id and a name once, at the beginning.
            assert (delta.index == len(calls)) == bool(delta.name) == bool(delta.call_id)
            gather(calls, [delta])
    return content, thoughts, [(call.name, call.arguments) for call in calls], reader.finish_reason("stop")


A = ("f", '{"a": 1}')
CITY = ("get_weather", '{"city": "<tool_call> é </tool_call>"}')

CASES: list[tuple[MessageForm, str, tuple[str, str, list[tuple[str, str]], str]]] = [
    (HERMES, "Hello.\n ", ("Hello.\n ", "", [], "stop")),
    (HERMES, " a < b <tool", (" a < b <tool", "", [], "stop")),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", ("", "", [A], "tool_calls")),
    (HERMES, f"\n<tool_call>{F}</tool_call>\n", ("", "", [A], "tool_calls")),
    (HERMES, f"I look.\n\n<tool_call>\n{W}\n</tool_call>\n<tool_call>\n{F}\n</tool_call>",
     ("I look.", "", [CITY, A], "tool_calls")),
    (HERMES, f"<tool_call>{F}", ("", "", [A], "tool_calls")),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": ', ("", "", [("f", '{"a": ')], "tool_calls")),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', ("", "", [("f", "")], "tool_calls")),
    (HERMES, f"<tool_call>{F}</tool_call> Done.", ("Done.", "", [A], "tool_calls")),
    (HERMES, f"<tool_call>\n{G}\n</tool_call>", (f"<tool_call>\n{G}\n</tool_call>", "", [], "stop")),
    (HERMES, "<tool_call>no json</tool_call>", ("<tool_call>no json</tool_call>", "", [], "stop")),
    (HERMES, '<tool_call>{"na', ('<tool_call>{"na', "", [], "stop")),
    (replace(HERMES, max_calls=1), f"<tool_call>{F}</tool_call><tool_call>{W}</tool_call>",
     ("", "", [A], "tool_calls")),
    (replace(HERMES, is_named=True), f"<tool_call>{F}</tool_call>", ("", "", [A], "stop")),
    (LLAMA, "Hello.", ("Hello.", "", [], "stop")),
    (LLAMA, LF, ("", "", [A], "tool_calls")),
    (LLAMA, f"<|python_tag|>{LF}; {LF}", ("", "", [A, A], "tool_calls")),
    (LLAMA, f"\n{LF}\n", ("", "", [A], "tool_calls")),
    (LLAMA, '{"answer": 5} and more', ('{"answer": 5} and more', "", [], "stop")),
    (LLAMA, f"The call is {LF}", (f"The call is {LF}", "", [], "stop")),
    (LLAMA, "<|pyth", ("<|pyth", "", [], "stop")),
    (MISTRAL, "Hello [TOOL", ("Hello [TOOL", "", [], "stop")),
    (MISTRAL, f"[TOOL_CALLS][{F}, {F}]", ("", "", [A, A], "tool_calls")),
    (MISTRAL, f"Well. [TOOL_CALLS] [{F}]", ("Well.", "", [A], "tool_calls")),
    (MISTRAL, '[TOOL_CALLS]f{"a": 1}', ("", "", [A], "tool_calls")),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', ("", "", [A, A], "tool_calls")),
    (MISTRAL, '[TOOL_CALLS]g[ARGS]{"a": 1}', ('g[ARGS]{"a": 1}', "", [], "stop")),
    (MISTRAL, "[TOOL_CALLS][5]", ("5]", "", [], "stop")),
    (THINK, "Hello </b>", ("Hello </b>", "", [], "stop")),
    (THINK, " <thin", (" <thin", "", [], "stop")),
    (THINK, "<think>\nhm, 1 < 2\n</think>\n\n Yes.\n", ("Yes.\n", "hm, 1 < 2", [], "stop")),
    (THINK, "<think>never done </thin", ("", "never done </thin", [], "stop")),
    (THINK, "<think>\n\n</think>\n\nYes", ("Yes", "", [], "stop")),
    (OPEN, "hm\n</think>Yes </think>", ("Yes </think>", "hm", [], "stop")),
    (OPEN, "<think>hm</think>Yes", ("Yes", "hm", [], "stop")),
    (OPEN, "hm", ("", "hm", [], "stop")),
    (replace(THINK, include_reasoning=False), "<think>hm</think>Yes", ("Yes", "", [], "stop")),
    (BOTH, f"<think>call <tool_call>?</think>\n<tool_call>{F}</tool_call>",
     ("", "call <tool_call>?", [A], "tool_calls")),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "expected"), CASES)
def test_however_it_is_cut(form: MessageForm, text: str, expected: tuple[str, str, list[tuple[str, str]], str]) -> None:
    assert read(form, [text]) == expected
    assert read(form, [*text, ""]) == expected
    rng = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(rng.sample(range(len(text) + 1), min(4, len(text))))
        pieces = [text[start:end] for start, end in itertools.pairwise([0, *cuts, len(text)])]
        assert read(form, pieces) == expected


def test_arguments_stream_as_they_come() -> None:
    for form, before in ((HERMES, "<tool_call>"), (LLAMA, ""), (MISTRAL, "[TOOL_CALLS][")):
        reader = form.reader()
        part = reader.push(before + '{"name": "f", ', is_last=False)
        assert [(delta.name, delta.arguments) for delta in part.tool_calls] == [("f", "")]
        assert len(part.tool_calls[0].call_id) >= 9
        part = reader.push('"arguments": {"a": "long', is_last=False)
        assert [delta.arguments for delta in part.tool_calls] == ['{"a": "long']


def test_random_texts_lose_nothing_of_their_content() -> None:
    """Without a call in it, what comes out is what went in, whatever bits of marks it holds."""
    rng = random.Random(1)
    bits = [
        "<tool_call>",
        "</tool_call>",
        "[TOOL",
        "_CALLS",
        "<|python_tag|",
        "{",
        "}",
        '"name"',
        ":",
        "x",
        " ",
        "\n",
        "<",
    ]
    for _ in range(500):
        text = "".join(rng.choice(bits) for _ in range(rng.randint(1, 12)))
        for form in (HERMES, LLAMA, MISTRAL):
            if "[TOOL_CALLS" in text:
                continue
            content, thoughts, calls, _ = read(form, [*text, ""])
            assert (content, thoughts, calls) == (text, "", [])


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{% if tools %}[TOOL_CALLS] [ {% endif %}", "mistral"),
        ("[TOOL_CALLS]name[ARGS]", "mistral_args"),
        ('<|start_header_id|> {"name": function name, "parameters": dictionary}', "llama3_json"),
        ("plain", "hermes"),
    ],
)
def test_formats_are_known_by_their_templates(template: str, name: str) -> None:
    assert tool_formats.detect(template).name == name


def test_reasoning_is_known_by_the_template_and_by_the_prompt() -> None:
    assert reasoning.detect("plain") is None
    think = reasoning.detect("{{ '<think>' }}{{ '</think>' }}")
    assert think is not None
    assert think.is_open_after("<|im_start|>assistant\n<think>\n")
    assert not think.is_open_after("<|im_start|>assistant\n")
    assert not think.is_open_after("<think>\n\n</think>\n\n")
    assert think.is_closed_after("<think>\n\n</think>\n\n")
    always = reasoning.FORMATS["deepseek_r1"]
    assert always.is_open_after("<|Assistant|>")
    assert not always.is_open_after("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("tool_format", tool_formats.FORMATS.values(), ids=lambda found: found.name)
def test_what_is_written_out_is_read_back(tool_format: tool_formats.ToolFormat) -> None:
    calls = [
        {"function": {"name": "f", "arguments": {"a": "é\n"}}},
        {"function": {"name": "get_weather", "arguments": {}}},
    ]
    form = MessageForm(tools=tool_format, tool_names=NAMES)
    content, _, found, _ = read(form, [tool_format.write(calls)])
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in found] == [("f", {"a": "é\n"}), ("get_weather", {})]


def test_tools_and_calls_for_templates_that_know_neither() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "does f"}}]
    messages = [{"role": "user", "content": "hi"}]
    (system, user) = tool_formats.described(messages, tools, tool_formats.HERMES)
    assert system["role"] == "system" and '"does f"' in system["content"] and "<tool_call>" in system["content"]
    assert user == messages[0]
    (system, _) = tool_formats.described(
        [{"role": "system", "content": "Be brief."}, *messages], tools, tool_formats.HERMES
    )
    assert system["content"].startswith("Be brief.\n\nYou can call")
    history = [
        {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "content": "21", "tool_call_id": "x"},
        {"role": "tool", "content": [{"type": "text", "text": "22"}]},
        {"role": "user", "content": "thanks"},
    ]
    written = tool_formats.written_out(history, tool_formats.HERMES)
    assert [message["role"] for message in written] == ["assistant", "user", "user"]
    assert written[0]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert "tool_calls" not in written[0]
    assert written[1]["content"] == ("<tool_response>\n21\n</tool_response>\n<tool_response>\n22\n</tool_response>")
