"""Forms of output through the gateway: what reaches the workers, and that hostile ones hurt nobody."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from biphase.request import SamplingParams, StructuredOutput
from biphase.rpc.messages import sampling_from_proto
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import Running, StartGateway

Says = Callable[..., FakeDecode]
POINT = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}


@pytest.fixture
async def forming(start_gateway: StartGateway, says: Says) -> Running:
    return await start_gateway(says('{"n": 3}', ends=True))


def sampling_of(running: Running) -> SamplingParams:
    return sampling_from_proto(running.workers[0].seen[-1].request.sampling)


@pytest.mark.parametrize(
    ("fields", "kind", "has"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": POINT}}}, "json_schema", '"n"'),
        ({"structured_outputs": {"json": json.dumps(POINT)}}, "json_schema", '"n"'),
        ({"structured_outputs": {"json": POINT, "disable_any_whitespace": True}}, "json_schema", '"whitespace":""'),
        ({"structured_outputs": {"regex": "[ab]+", "choice": None}}, "regex", "[ab]+"),
        ({"structured_outputs": {"choice": ["a", "b"]}}, "choice", '["a","b"]'),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, "grammar", "root"),
        ({"structured_outputs": {"json_object": True}}, "json_object", ""),
        ({"guided_json": POINT, "guided_whitespace_pattern": "[ ]?"}, "json_schema", '"[ ]?"'),
        ({"guided_regex": "[ab]+"}, "regex", "[ab]+"),
        ({"guided_choice": ["a", "b"]}, "choice", '["a","b"]'),
        ({"guided_grammar": 'root ::= "a"'}, "grammar", "root"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<f"],
                              "structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}]}}, "structural_tag", "<f"),
    ],
)  # fmt: skip
async def test_what_reaches_the_worker(forming: Running, fields: dict[str, Any], kind: str, has: str) -> None:
    for path, ask in (("chat", forming.chat), ("completions", forming.complete)):
        response = await ask(**fields)
        assert response.status_code == 200, (path, response.text)
        structured = sampling_of(forming).structured_output
        assert isinstance(structured, StructuredOutput)
        assert structured.kind == kind
        assert has in structured.spec


async def test_no_form_asks_nothing(forming: Running) -> None:
    for fields in ({}, {"response_format": {"type": "text"}}, {"response_format": None}):
        assert (await forming.chat(**fields)).status_code == 200
        assert sampling_of(forming).structured_output is None
    assert not forming.gateway.model._grammars._busy
    assert all(process is None for process in forming.gateway.model._grammars._idle)


async def test_all_choices_and_streams_have_it(forming: Running) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "p", "schema": POINT}}
    response = await forming.chat(response_format=schema, n=3, max_tokens=20)
    assert [json.loads(choice["message"]["content"]) for choice in response.json()["choices"]] == [{"n": 3}] * 3
    assert all(seen.request.sampling.structured_output.kind == "json_schema" for seen in forming.workers[0].seen)
    chunks = await forming.stream(response_format=schema, max_tokens=20)
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_an_end_ends_structured_output_whatever_else_is_asked(forming: Running) -> None:
    fields = {"response_format": {"type": "json_object"}, "max_tokens": 40, "min_tokens": 30, "ignore_eos": True}
    response = await forming.chat(**fields)
    # The fake goes on, as it was told to; a worker with the grammar would have ended. What counts is the text.
    assert response.json()["choices"][0]["message"]["content"].startswith('{"n": 3}')


HOSTILE: list[dict[str, Any]] = [
    {"guided_choice": [f"choice number {i}" for i in range(40_000)]},
    {"structured_outputs": {"regex": "((a{0,1000}){0,1000}){0,1000}"}},
    {"structured_outputs": {"regex": "(a+)+$"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": list(range(60_000))}}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {
                "name": "x",
                "schema": {
                    "type": "object",
                    "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,100}$"} for i in range(5000)},
                },
            },
        }
    },
    {"structured_outputs": {"json": {"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}}},
    {"structured_outputs": {"json": "[" * 3000 + "]" * 3000}},
    {"structured_outputs": {"grammar": "root ::= " + "(" * 3000 + '"a"' + ")" * 3000}},
    {"structured_outputs": {"grammar": "start: " + " ".join(f"r{i}" for i in range(5000)) + "\n"
                            + "\n".join(f'r{i}: "x{i}"' for i in range(5000))}},
]  # fmt: skip


async def test_hostile_forms_end_soon_and_disturb_nobody(forming: Running) -> None:
    await forming.chat(guided_choice=["warm"])
    stop = asyncio.Event()
    waits: list[float] = []

    async def bystander() -> None:
        while not stop.is_set():
            began = time.monotonic()
            response = await forming.chat(max_tokens=4)
            waits.append(time.monotonic() - began)
            assert response.status_code == 200
            await asyncio.sleep(0.01)

    async def attack(fields: dict[str, Any]) -> httpx.Response:
        return await forming.chat(**fields, max_tokens=4)

    watching = asyncio.create_task(bystander())
    await asyncio.sleep(0.2)
    began = time.monotonic()
    responses = await asyncio.gather(*(attack(fields) for fields in HOSTILE))
    assert time.monotonic() - began < 30.0
    stop.set()
    await watching
    for response in responses:
        assert response.status_code in (200, 400), response.text[:300]
        assert len(response.content) < 4000
    waits.sort()
    assert waits[len(waits) // 2] < 0.25
    assert waits[-1] < 1.0
