"""Whatever JSON is posted to whatever route: no status that /openapi.json does not name, always an error object."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from services.gateway import bodies
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import Running, StartGateway

Says = Callable[..., FakeDecode]

_MESSAGES = [{"role": "user", "content": "hi"}]
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_VALID: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 2, "tools": [_TOOL]},
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": [{"role": "user", "content": "hi"}], "max_output_tokens": 2},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1, 2]},
    "/drain": {"node": "decode-0"},
}
# Words that mean something somewhere, so that values get past the first look.
_WORDS = st.sampled_from(
    [
        "user", "assistant", "tool", "text", "function", "json_schema", "json_object", "auto", "required",
        "none", "message", "function_call", "high", "left", "smol", "function_call_output", "reasoning",
        "input_text", "image_url", "allowed_tokens", "allowed_tools", "resp_x", "x", "5", "-1", "", "\ud800",
        "\0",
    ]
)  # fmt: skip
_KEYS = st.sampled_from(
    [
        "type", "role", "content", "text", "name", "function", "parameters", "arguments", "tool_calls",
        "call_id", "output", "schema", "json_schema", "regex", "choice", "json", "grammar", "format",
        "effort", "include_usage", "mode", "tools", "5", "99999", "$ref", "properties", "items",
    ]
)  # fmt: skip
_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, -(2**63), 2**64, 10**40, 1e308, -0.0, 0.5, float("nan"), float("inf")]),
    _WORDS,
    st.text(max_size=8),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


def _body_of(data: st.DataObject, fields: list[str], valid: dict[str, Any]) -> Any:
    if data.draw(st.integers(0, 19)) == 0:
        return data.draw(_VALUES)
    chosen = data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=3))
    return valid | {name: data.draw(_VALUES) for name in chosen}


def _check(response: httpx.Response, declared: set[str]) -> None:
    assert str(response.status_code) in declared, (response.status_code, response.text)
    assert response.status_code not in (500, 503, 504), response.text
    if response.status_code != 200:
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"} and error["code"] == response.status_code
        assert len(response.content) < 4096
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"error":{' not in response.text.replace(" ", "").replace('"error":null', ""), response.text[-500:]
    else:
        response.json()


async def test_any_body(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    document = (await running.client.get("/openapi.json")).json()
    posted = {
        path: operation["post"]
        for path, operation in document["paths"].items()
        if "requestBody" in operation.get("post", {})
    }
    assert posted.keys() == _VALID.keys()
    await asyncio.to_thread(_fuzz, running, posted)
    assert (await running.chat()).status_code == 200
    await running.settle(lambda: running.gateway.dispatcher.num_running == 0)


def _fuzz(running: Running, posted: dict[str, Any]) -> None:
    with httpx.Client(base_url=f"http://127.0.0.1:{running.port}", timeout=30) as client:
        for path, operation in posted.items():
            _fuzz_route(client, path, operation)


def _fuzz_route(client: httpx.Client, path: str, operation: dict[str, Any]) -> None:
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    fields, declared = sorted(schema["properties"]), set(operation["responses"])

    @seed(1)
    @settings(max_examples=40, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.data())
    def post(data: st.DataObject) -> None:
        body = json.dumps(_body_of(data, fields, _VALID[path]))
        _check(client.post(path, content=body, headers={"content-type": "application/json"}), declared)

    post()


async def test_bodies_of_very_many_values_are_not_parsed(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    for content in (b'{"prompt":[' + b"[]," * 400_000 + b"[]]}", b'{"prompt":"x","y":[' + b"{}," * 400_000 + b"{}]}"):
        response = await running.client.post("/v1/completions", content=content)
        assert response.status_code == 413 and "values" in response.json()["error"]["message"]
    # The same marks within a string are text.
    answer = await running.complete(prompt="hi", user='[{,\\"' * 300_000, max_tokens=1)
    assert answer.status_code == 200


async def test_values_are_counted_outside_of_strings_wherever_a_piece_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_VALUES", -1)
    rng = random.Random(3)
    string = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
    for _ in range(300):
        monkeypatch.setattr(bodies, "_PIECE_BYTES", rng.randrange(1, 20))
        texts = ["".join(rng.choice('\\",[{ax') for _ in range(rng.randrange(12))) for _ in range(rng.randrange(6))]
        raw = json.dumps({"a": texts, "b": [texts, {}]}).encode()
        outside = string.sub(b"", raw)
        assert await bodies._num_values(raw) == sum(map(outside.count, (b",", b"[", b"{"))), raw


async def test_allow_names_every_method(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    for path, methods in (("/v1/responses/x", "DELETE, GET"), ("/ping", "GET, POST"), ("/v1/completions", "POST")):
        response = await running.client.put(path)
        assert response.status_code == 405 and response.headers["allow"] == methods, (path, response.headers)
