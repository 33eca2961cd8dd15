"""Structured output and tools on the whole stack with the real model: valid, and nobody disturbed."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.stack import Stack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 16},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "mood": {"enum": ["good", "bad"]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]{1,8}$"}, "maxItems": 3},
    },
    "required": ["name", "age", "mood", "tags"],
}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 20}},
            "required": ["city"],
        },
    },
}
HOSTILE: list[dict[str, Any]] = [
    {"guided_choice": [f"choice number {i}" for i in range(40_000)]},
    {"structured_outputs": {"regex": "(.{1,5000}){1,5000}x"}},
    {"structured_outputs": {"json": {"enum": [f"value {i}" for i in range(60_000)]}}},
    {"structured_outputs": {"grammar": 'start: start start | "x" | ""'}},
]


@pytest.fixture(scope="module")
def forming_stack() -> Iterator[Stack]:
    """Every prompt crosses, however short and however busy the machine: the grammar's state has to cross with it."""
    with running_stack(
        "--prefill", "1", "--decode", "2", "--kvstore", "false", "--max-model-len", "1024",
        "--gateway-args", "--max-busy-local-tokens 0",
        "--decode-args", "--max-local-suffix-tokens 0 --max-slow-local-tokens 0",
    ) as stack:  # fmt: skip
        yield stack


def chat(stack: Stack, text: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 120, **fields}
    answer: dict[str, Any] = stack.post("/v1/chat/completions", body)["choices"][0]
    return answer


def test_whatever_is_sampled_is_valid(forming_stack: Stack) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}

    def one(seed: int) -> None:
        fields = {"response_format": schema, "temperature": 1.0, "seed": seed}
        choice = chat(forming_stack, "Describe somebody.", **fields)
        assert choice["finish_reason"] == "stop", choice
        person = json.loads(choice["message"]["content"])
        assert list(person) == ["name", "age", "mood", "tags"]
        assert len(person["name"]) <= 16 and 0 <= person["age"] <= 120 and person["mood"] in ("good", "bad")
        assert all(tag.islower() and len(tag) <= 8 for tag in person["tags"])
        # The same seed, the same person, on whichever worker and in whatever company.
        assert chat(forming_stack, "Describe somebody.", **fields)["message"] == choice["message"]

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(one, range(12)))
    reasons = {request["reason"] for request in forming_stack.status()["requests"]}
    assert "disaggregated" in reasons


def test_tools_are_called_as_the_schema_says(forming_stack: Stack) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        answer = chat(forming_stack, "What is the weather in Rome?", tools=[TOOL], tool_choice=choice, temperature=0)
        (call,) = answer["message"]["tool_calls"]
        assert call["function"]["name"] == "get_weather"
        assert list(json.loads(call["function"]["arguments"])) == ["city"]


def test_hostile_grammars_disturb_nobody(forming_stack: Stack) -> None:
    chat(forming_stack, "hi", guided_choice=["warm"])
    usual = sorted(_timed(forming_stack) for _ in range(8))[4]
    stop = threading.Event()

    def attack() -> None:
        while not stop.is_set():
            for fields in HOSTILE:
                try:
                    chat(forming_stack, "hi", max_tokens=8, **fields)
                except urllib.error.HTTPError as error:
                    assert error.code in (400, 429), error.read()

    attackers = [threading.Thread(target=attack) for _ in range(2)]
    for thread in attackers:
        thread.start()
    time.sleep(0.5)
    beside = sorted(_timed(forming_stack) for _ in range(12))
    stop.set()
    for thread in attackers:
        thread.join()
    assert beside[6] < max(2.0 * usual, usual + 0.25), (usual, beside)


def _timed(stack: Stack) -> float:
    began = time.monotonic()
    chat(stack, "Tell me something.", max_tokens=16, temperature=0, ignore_eos=True)
    return time.monotonic() - began
