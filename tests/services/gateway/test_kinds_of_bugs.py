"""Kinds of bugs that servers of this API have had, in further forms: what must be refused, survive, or stay the same.

The first form of each kind is in the tests of its own field; here are its relatives.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.fakes import FakeDecode
from tests.services.gateway.conftest import TEXT, Running, StartGateway, finishes, text_of
from tests.services.gateway.test_refusals import error_of

Says = Callable[..., FakeDecode]

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
LONE = "x\ud800y"


@pytest.fixture
async def running(start_gateway: StartGateway, says: Says) -> Running:
    return await start_gateway(says(ends=True))


async def post(running: Running, path: str, body: str) -> Any:
    return await running.client.post(path, content=body.encode(), headers={"Content-Type": "application/json"})


def schema_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


# ---- token ids that are none


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {key: 1}} for key in (" 5", "5 ", "1_0", "\u0665", "5.0", "0x5", "", "+5", "9" * 40, "-1")
    ] + [
        {"logit_bias": {"5": True}}, {"logit_bias": {"5": None}}, {"logit_bias": {"5": [1]}}, {"logit_bias": "5"},
        {"stop_token_ids": [True]}, {"stop_token_ids": [1.5]}, {"stop_token_ids": [2**64]}, {"stop_token_ids": [[5]]},
        {"allowed_token_ids": [2**31]}, {"allowed_token_ids": 5},
        {"logprobs": True, "logprob_token_ids": [-1]}, {"logprobs": True, "logprob_token_ids": [49152]},
    ],
)  # fmt: skip
async def test_token_ids_that_are_none(running: Running, fields: dict[str, Any]) -> None:
    error_of(await running.chat(**fields), 400)
    assert not running.workers[0].seen


async def test_prompts_that_are_none(running: Running) -> None:
    for prompt in (
        [[]], [[5], []], [5, "a"], ["a", 5], [[["a"]]], [True], [[True]], [5.0], [None], {"a": 1}, 5, True, [2**70],
        ["a"] * 1025, [[5]] * 1025, [5] * 5000, [""], "",
    ):  # fmt: skip
        error_of(await running.complete(prompt=prompt), 400)
    assert not running.workers[0].seen


async def test_nothing_left_to_sample(running: Running) -> None:
    word = running.gateway.model.tokenizer.encode("blue")
    assert len(word) == 1
    for fields in (
        {"allowed_token_ids": word, "bad_words": ["blue"]},
        {"allowed_token_ids": [2], "min_tokens": 2},
        {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1},
    ):
        assert error_of(await running.complete(**fields), 400)["param"] == "allowed_token_ids"
    assert (await running.complete(allowed_token_ids=[2])).status_code == 200
    assert (await running.complete(allowed_token_ids=[*word, 9], bad_words=["blue"])).status_code == 200


# ---- numbers


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e400", "-1e400"])
async def test_numbers_that_are_not_finite(running: Running, literal: str) -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"):
        body = f'{{"messages":[{{"role":"user","content":"hi"}}],"{name}":{literal}}}'
        error_of(await post(running, CHAT, body), 400)
    form = f'{{"type":"json_schema","json_schema":{{"schema":{{"maximum":{literal}}}}}}}'
    for field in (f'"logit_bias":{{"5":{literal}}}', f'"seed":{literal}', f'"n":{literal}', f'"max_tokens":{literal}',
                  f'"response_format":{form}'):  # fmt: skip
        error_of(await post(running, CHAT, f'{{"messages":[{{"role":"user","content":"hi"}}],{field}}}'), 400)


async def test_numbers_at_the_edge(running: Running) -> None:
    for fields in ({"temperature": 1e-320}, {"temperature": -0.0}, {"top_p": 1e-300}, {"repetition_penalty": 1e-30},
                   {"seed": -(2**63)}, {"seed": 2**63 - 1}, {"top_k": 2**62}, {"min_p": 1.0}, {"priority": -(2**31)},
                   {"max_tokens": 2048}, {"min_tokens": 8}):  # fmt: skip
        response = await running.chat(**fields)
        assert response.status_code == 200, (fields, response.text)


# ---- bytes and characters


async def test_lone_surrogates_wherever_text_may_stand(running: Running) -> None:
    tool = {"type": "function", "function": {"name": "f", "description": LONE, "parameters": {}}}
    named = {"type": "function", "function": {"name": LONE}}
    chats: tuple[dict[str, Any], ...] = (
        {"model": LONE}, {"stop": [LONE]}, {"user": LONE}, {"cache_salt": LONE}, {"request_id": LONE},
        {"bad_words": [LONE]}, {"tools": [tool]}, {"tools": [named]}, {"tools": [named], "tool_choice": "required"},
        {"response_format": {"type": LONE}}, schema_of({"const": LONE}), schema_of({"type": "string", "pattern": LONE}),
        {"structured_outputs": {"regex": LONE}}, {"structured_outputs": {"choice": [LONE]}},
        {"structured_outputs": {"grammar": LONE}}, {"reasoning_effort": LONE}, {"truncation_side": LONE},
        {"chat_template_kwargs": {"x": LONE}}, {"chat_template_kwargs": {LONE: 1}}, {"logit_bias": {LONE: 1}},
        {"messages": [{"role": LONE, "content": "hi"}]}, {LONE: LONE},
        {"messages": [{"role": "user", "content": [{"type": LONE, "text": "a"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": [named | {"id": LONE}]}]},
    )  # fmt: skip
    base = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
    for fields in chats:
        response = await post(running, CHAT, json.dumps(base | fields))
        assert response.status_code in (200, 400, 404), (fields, response.text)
        response.json()
    for fields in ({"metadata": {"a": LONE}}, {"metadata": {LONE: "a"}}, {"user": LONE}, {"instructions": LONE},
                   {"input": [{"role": "user", "content": LONE}]}, {"previous_response_id": LONE},
                   {"tools": [{"type": "function", "name": "f", "description": LONE}]}, {"tools": [{"type": LONE}]},
                   {"text": {"format": {"type": "text", "name": LONE}}}):  # fmt: skip
        for extra in ({}, {"stream": True}, {"background": True}):
            body: dict[str, Any] = {"input": "hi", "max_output_tokens": 2, **fields, **extra}
            response = await post(running, RESPONSES, json.dumps(body))
            assert response.status_code in (200, 400, 404), (fields, response.text)
    error_of(await post(running, "/tokenize", json.dumps({"prompt": LONE})), 400)


async def test_bodies_in_other_clothes(running: Running) -> None:
    good = json.dumps({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
    headers = {"Content-Type": "application/json"}
    for content in ("\ufeff" + good, good.encode("utf-16"), good + "x", good + good, "[" + good + "]", '"' + "x" * 99):
        raw = content if isinstance(content, bytes) else content.encode()
        error_of(await running.client.post(CHAT, content=raw, headers=headers), 400)
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json", "APPLICATION/JSON"):
        response = await running.client.post(CHAT, content=good.encode(), headers={"Content-Type": kind})
        assert response.status_code == 200
    for kind in ("text/plain", "multipart/form-data; boundary=x", "application/x-www-form-urlencoded", "x"):
        error_of(await running.client.post(CHAT, content=good.encode(), headers={"Content-Type": kind}), 400)

    async def pieces() -> Any:
        for place in range(0, len(good), 7):
            yield good[place : place + 7].encode()

    assert (await running.client.post(CHAT, content=pieces(), headers=headers)).status_code == 200


@pytest.mark.parametrize("name", ["tools", "messages", "metadata", "documents", "chat_template_kwargs", "logit_bias",
                                  "response_format", "structured_outputs", "stop", "user", "unknown"])  # fmt: skip
@pytest.mark.parametrize("opening, closing", [("[", "]"), ('{"a":', "}")])
async def test_deep_nesting_anywhere(running: Running, name: str, opening: str, closing: str) -> None:
    for depth in (150, 3000):
        inner = opening * depth + "1" + closing * depth
        body = f'{{"messages":[{{"role":"user","content":"hi"}}],"max_tokens":2,"{name}":{inner}}}'
        response = await post(running, CHAT, body)
        assert response.status_code in (200, 400), response.text
    assert (await running.chat()).status_code == 200


async def test_deep_nesting_inside_of_strings(running: Running) -> None:
    deep = "[" * 50_000 + "]" * 50_000
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": deep}}
    history = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [call]}]
    for fields in ({"messages": history}, {"guided_json": deep}, {"structured_outputs": {"structural_tag": deep}},
                   {"structured_outputs": {"grammar": "root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000}},
                   {"structured_outputs": {"regex": "(" * 20_000 + "a" + ")" * 20_000}}):  # fmt: skip
        assert (await running.chat(**fields)).status_code == 400, str(fields)[:80]
    assert (await running.chat()).status_code == 200


# ---- messages


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user"}],
        [{"role": "user", "content": []}],
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": None}],
        [{"role": "user", "content": "hi", "name": None, "tool_calls": None, "function_call": None}],
        [{"role": "tool", "content": "21", "tool_call_id": "nobody"}],
        [{"role": "developer", "content": "d"}, {"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
        [{"role": "function", "name": "f", "content": "x"}, {"role": "user", "content": "u"}],
        [{"role": "user", "content": [{"type": "text", "text": ""}, {"text": "no type"}, "a string"]}],
        [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": []}],
        [{"role": "user", "content": "x", "unknown": {"a": [1]}}],
        [{"role": "assistant", "content": "", "refusal": "no"}, {"role": "user", "content": "u"}],
    ],
)
async def test_odd_messages_are_answered(running: Running, messages: list[dict[str, Any]]) -> None:
    response = await running.chat(messages=messages)
    assert response.status_code == 200, response.text


@pytest.mark.parametrize("arguments", ["null", "[1]", "5", '"text"', "{", "{'a': 1}", '{"a": NaN}', {"a": 1}, None, ""])
async def test_odd_arguments_in_a_history(running: Running, arguments: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
    history = [{"role": "user", "content": "w"}, {"role": "assistant", "content": None, "tool_calls": [call]},
               {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "21"}]}]  # fmt: skip
    for more in ({}, {"tools": [{"type": "function", "function": {"name": "f"}}]}):
        response = await running.chat(messages=history, **more)
        assert response.status_code == 200, response.text


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text"}, {"type": "text", "text": None}, {"type": "text", "text": 5}, 5, None, [], {},
        {"type": "input_audio"},
        {"type": "file", "file": {}}, {"type": "video_url"},
    ],
)  # fmt: skip
async def test_odd_parts_are_refused(running: Running, part: Any) -> None:
    for role in ("user", "system", "assistant", "tool"):
        error_of(await running.chat(messages=[{"role": role, "content": [part]}]), 400)
    assert not running.workers[0].seen


# ---- schemas, expressions, grammars


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "http://169.254.169.254/x"}, {"$ref": "file:///etc/passwd"}, {"$ref": "#/nowhere"}, {"$ref": 5},
        {"allOf": [{"$ref": "#"}]}, {"enum": []}, {"type": []}, {"type": "string", "pattern": "(?<=a)b"},
        {"type": "string", "pattern": "(a)\\1"}, {"type": "string", "pattern": "["},
        {"type": "integer", "minimum": 2, "maximum": 1},
        {"type": "string", "minLength": 5, "maxLength": 2}, {"required": "a"}, {"properties": []}, {"items": 5},
        {"type": "object", "properties": {"a": False}, "required": ["a"]}, {"minItems": -1, "type": "array"},
        {"type": "string", "format": "no-such-format"}, {"if": {}, "then": {}}, {"type": "integer", "multipleOf": 0},
    ],
)  # fmt: skip
async def test_schemas_that_nothing_follows_are_refused(running: Running, schema: Any) -> None:
    error_of(await running.chat(**schema_of(schema)), 400)
    tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    error_of(await running.chat(tools=[tool], tool_choice="required"), 400)
    assert not running.workers[0].seen


async def test_odd_grammars_are_refused(running: Running) -> None:
    for text in ("root ::= root", "root ::= nobody", "start: start", 'x ::= "a"', 'root ::= "\\uD800"', "root ::= [",
                 "root", "\0", 'root ::= "a"{2,1}', "%import python",
                 'start: "a" %json {"type": 5}'):  # fmt: skip
        error_of(await running.chat(structured_outputs={"grammar": text}), 400)
    for choice in ([], [""], [1], "ab", [None], {"a": 1}, [["a"]]):
        error_of(await running.chat(structured_outputs={"choice": choice}), 400)
    for pattern in ("", "a{9999999}", "(?<name>a)\\k<name>", "(?!a)", "*", "a**b(", "\\", "[z-a]", "\\p{Nope}"):
        error_of(await running.chat(structured_outputs={"regex": pattern}), 400)
    assert not running.workers[0].seen


# ---- streams


@pytest.mark.parametrize("stops", [["of", "of France"], ["France", "of Fr"], [" Paris"], ["e."], ["\n", "capital"]])
@pytest.mark.parametrize("include", [False, True])
async def test_overlapping_stops_streamed_and_whole(
    start_gateway: StartGateway, says: Says, stops: list[str], include: bool
) -> None:
    running = await start_gateway(says(ends=True, tokens_per_message=2))
    fields = {"max_tokens": 60, "stop": stops, "include_stop_str_in_output": include}
    whole = (await running.chat(**fields)).json()["choices"][0]
    found, place = min(
        ((stop, TEXT.index(stop)) for stop in stops if stop in TEXT), key=lambda hit: (hit[1] + len(hit[0]), hit[1])
    )
    assert whole["message"]["content"] == TEXT[: place + (len(found) if include else 0)]
    assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", found)
    chunks = await running.stream(**fields)
    assert text_of(chunks) == whole["message"]["content"] and finishes(chunks) == {0: ["stop"]}
    counted = (await running.complete(**fields, logprobs=0)).json()
    assert len(counted["choices"][0]["logprobs"]["tokens"]) == counted["usage"]["completion_tokens"]


async def test_stops_of_characters_that_are_several_tokens(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says("Ein 🦙 und日本 noch eins", ends=True))
    for stop, before in (("🦙", "Ein "), ("日本", "Ein 🦙 und"), ("本", "Ein 🦙 und日"), ("und日", "Ein 🦙 ")):
        assert (await running.chat(stop=stop, max_tokens=60)).json()["choices"][0]["message"]["content"] == before
        assert text_of(await running.stream(stop=stop, max_tokens=60)) == before


async def test_every_choice_of_every_stream_begins_and_ends_once(running: Running) -> None:
    chunks = await running.stream(n=5, temperature=1, max_tokens=3, stream_options={"include_usage": True})
    roles = [choice["index"] for chunk in chunks for choice in chunk["choices"] if choice["delta"].get("role")]
    assert sorted(roles) == list(range(5)) and {tuple(ends) for ends in finishes(chunks).values()} == {("length",)}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert [bool(chunk.get("usage")) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    prompts = await running.stream(COMPLETIONS, prompt=["a", [5, 6]], n=2, temperature=1, max_tokens=2)
    assert {index: len(ends) for index, ends in finishes(prompts).items()} == dict.fromkeys(range(4), 1)


async def test_a_first_token_that_ends_it_all(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(FakeDecode(script=lambda request: [2]))
    body = (await running.chat()).json()
    assert body["choices"][0]["message"]["content"] == "" and body["usage"]["completion_tokens"] == 1
    chunks = await running.stream()
    assert text_of(chunks) == "" and finishes(chunks) == {0: ["stop"]}
    assert any(choice["delta"].get("role") for chunk in chunks for choice in chunk["choices"])
    assert (await running.complete(echo=True)).json()["choices"][0]["text"] == "The sky is"


async def test_clients_that_go_away_leave_nothing(start_gateway: StartGateway, says: Says) -> None:
    worker = says(delay_seconds=0.02, first_delay_seconds=0.05)
    running = await start_gateway(worker)
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1500}
    bodies = [
        (CHAT, base), (CHAT, base | {"stream": True}), (CHAT, base | {"n": 8, "temperature": 1}),
        (CHAT, base | {"n": 8, "temperature": 1, "stream": True}),
        (COMPLETIONS, {"prompt": ["a"] * 20, "max_tokens": 900}),
        (RESPONSES, {"input": "hi"}), (RESPONSES, {"input": "hi", "stream": True}),
    ]  # fmt: skip
    for after in (0.02, 0.2):
        tasks = [asyncio.create_task(running.client.post(path, json=body)) for path, body in bodies]
        await asyncio.sleep(after)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await running.settle(lambda: worker.num_running == 0 and running.gateway.dispatcher.num_running == 0)
        await running.settle(lambda: running.gateway.queue.num_waiting == 0 and running.gateway.recorder.num_open == 0)


# ---- paths and methods


async def test_every_path_and_method_has_an_answer_of_the_form(running: Running) -> None:
    client = running.client
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v2/chat/completions",
        "/v1/engines",
        "/v1/chat",
        "//v1/models",
        "/%00",
        "/v1/%ff",
    ):
        error_of(await client.get(path), 404)
    for method in ("PUT", "PATCH", "DELETE", "HEAD"):
        response = await client.request(method, CHAT)
        assert response.status_code == 405 and "POST" in response.headers["allow"]
    for path in ("/v1/responses/nope", "/v1/responses/" + "x" * 5000, "/v1/models/nope", "/v1/models/a/b/c"):
        error_of(await client.get(path), 404)
    names = await asyncio.gather(
        *(running.chat(model=name) for name in ("SMOL", "smol ", " smol", "smol\0", "../smol"))
    )
    assert [response.status_code for response in names] == [404] * 5
