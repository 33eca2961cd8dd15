"""Calls in JSON, however they are cut into pieces."""

from __future__ import annotations

import json

import pytest

from services.gateway.message.json_call import JsonCall

CALLS = [
    ('{"name": "f", "arguments": {"a": [1, {"b": "}]\\" {"}], "c": null}}', "f", {"a": [1, {"b": '}]" {'}], "c": None}),
    ('{"arguments":{"x":1.5e3},"name":"g"}', "g", {"x": 1500.0}),
    (' {\n "id": 7, "name" : "f" , "parameters" : { } , "more": [true] } ', "f", {}),
    ('{"name": "caf\\u00e9", "arguments": "{\\"a\\": 1}"}', "café", {"a": 1}),
    ('{"name": "f", "arguments": 5}', "f", 5),
]


@pytest.mark.parametrize(("text", "name", "arguments"), CALLS)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_name_and_arguments(text: str, name: str, arguments: object, size: int) -> None:
    call = JsonCall()
    found = ""
    taken = 0
    for start in range(0, len(text), size):
        taken += call.push(text[start : start + size])
        found += call.take_arguments()
    assert call.name == name
    assert json.loads(found) == arguments
    assert call.is_done and not call.is_broken
    assert call.raw == text[:taken]
    assert text[taken:].strip() == ""


def test_arguments_stream_once_the_name_is_known() -> None:
    call = JsonCall()
    call.push('{"name": "f", "arguments": {"a": "x')
    assert call.take_arguments() == '{"a": "x'
    call.push('y"}')
    assert call.take_arguments() == 'y"}'
    late = JsonCall()
    late.push('{"arguments": {"a": 1}, ')
    assert late.take_arguments() == ""
    late.push('"name": "f"')
    assert late.take_arguments() == '{"a": 1}'


@pytest.mark.parametrize(
    "text", ["hello", '[{"name": 1}]', '{"name": 5}', '{"name": ""}', "{}", '{"a": 1}', "{5}", '{"a" 1']
)
def test_what_is_no_call(text: str) -> None:
    call = JsonCall()
    call.push(text)
    assert call.is_broken


def test_what_follows_is_left(  # the caller goes on with it
) -> None:
    call = JsonCall()
    text = '{"name": "f", "arguments": {}}</tool_call>'
    assert text[call.push(text) :] == "</tool_call>"
