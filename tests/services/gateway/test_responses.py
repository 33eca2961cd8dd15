"""POST /v1/responses: objects, events, stored conversations, background runs; and what the openai SDK makes of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from biphase.errors import InternalError
from biphase.index.embedded import EmbeddedValkey
from biphase.telemetry import tracing
from services.gateway import recorder
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import TEXT, Running, StartGateway

Says = Callable[..., FakeDecode]


async def create(running: Running, **fields: Any) -> httpx.Response:
    body = {"model": "smol", "input": "Say hi", "max_output_tokens": 8} | fields
    return await running.client.post("/v1/responses", json=body)


def events_of(raw: str) -> list[dict[str, Any]]:
    events = []
    for part in raw.removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


@pytest.fixture
async def responding(start_gateway: StartGateway, says: Says) -> Running:
    return await start_gateway(says(ends=True))


async def test_a_whole_response(responding: Running) -> None:
    response = await create(responding, instructions="Be brief.", metadata={"a": "b"}, reasoning={"effort": "low"})
    assert response.status_code == 200, response.text
    body = response.json()
    Response.model_validate(body)
    assert body["id"].startswith("resp_") and body["object"] == "response" and body["metadata"] == {"a": "b"}
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    (item,) = body["output"]
    assert item["type"] == "message" and item["status"] == "incomplete"
    assert TEXT.startswith(item["content"][0]["text"])
    assert body["usage"]["output_tokens"] == 8
    assert body["usage"]["total_tokens"] == body["usage"]["input_tokens"] + 8
    tokenizer = responding.gateway.model.tokenizer
    prompt = tokenizer.decode(responding.workers[0].seen[0].request.token_ids)
    assert "Be brief." in prompt and "Say hi" in prompt
    whole = (await create(responding, max_output_tokens=100)).json()
    assert whole["status"] == "completed" and whole["output"][0]["content"][0]["text"] == TEXT


async def test_a_stream_tells_what_the_whole_response_says(responding: Running) -> None:
    whole = (await create(responding, max_output_tokens=100, top_logprobs=1)).json()
    response = await create(responding, max_output_tokens=100, top_logprobs=1, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = events_of(response.text)
    names = [event["type"] for event in events]
    assert names[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert names[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    assert set(names[4:-4]) == {"response.output_text.delta"}
    assert events[0]["response"]["output"] == [] and events[0]["response"]["status"] == "in_progress"
    assert "".join(event["delta"] for event in events[4:-4]) == TEXT == events[-4]["text"]
    final = events[-1]["response"]
    Response.model_validate(final)
    for changing in ("id", "created_at", "completed_at"):
        final.pop(changing), whole.pop(changing)
    final["output"][0].pop("id"), whole["output"][0].pop("id")
    assert final == whole and len(whole["output"][0]["content"][0]["logprobs"]) == whole["usage"]["output_tokens"]


async def test_a_conversation_goes_on_from_a_stored_response(responding: Running) -> None:
    first = (await create(responding, instructions="Rhyme.", input="One", max_output_tokens=100)).json()
    second = (await create(responding, input="Two", previous_response_id=first["id"])).json()
    assert second["previous_response_id"] == first["id"]
    third = await create(responding, input="Three", previous_response_id=second["id"], stream=True)
    assert third.status_code == 200
    tokenizer = responding.gateway.model.tokenizer
    prompt = tokenizer.decode(responding.workers[0].seen[-1].request.token_ids)
    places = [prompt.index(word) for word in ("One", TEXT.strip()[:20], "Two", "Three")]
    assert places == sorted(places) and "Rhyme." not in prompt
    path = f"/v1/responses/{first['id']}"
    assert (await responding.client.get(path)).json() == first
    items = (await responding.client.get(path + "/input_items")).json()
    assert items["data"][0]["content"] == [{"type": "input_text", "text": "One"}]
    assert (await responding.client.delete(path)).json()["deleted"] is True
    assert (await responding.client.get(path)).status_code == 404
    refused = await create(responding, previous_response_id=first["id"])
    assert refused.status_code == 404 and refused.json()["error"]["code"] == 404


@pytest.mark.parametrize("background", [False, True])
async def test_the_id_is_told_to_the_client_alone(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    """It is a secret that gives access to what is stored."""
    told: list[object] = []

    def span(name: str, *, is_server: bool = False, attributes: tracing.Attributes | None = None) -> tracing.Span:
        told.append((name, attributes))
        return tracing.NO_SPAN

    monkeypatch.setattr(tracing, "span", span)
    monkeypatch.setattr(recorder.log, "info", lambda *words, **fields: told.append((words, fields)))
    running = await start_gateway(says())
    body = (await create(running, background=background)).json()
    await running.settle(lambda: running.gateway.recorder.totals.num_finished == 1)
    status = (await running.client.get("/status")).text
    (seen,) = running.workers[0].seen
    assert seen.request.request_id in status and len(told) > 1
    secret = body["id"].removeprefix("resp_")
    assert len(secret) == 24 and secret not in status + repr(told) + str(seen.request) + str(seen.carried)


async def test_what_is_not_to_be_stored_is_not(responding: Running) -> None:
    body = (await create(responding, store=False)).json()
    assert body["store"] is False
    assert (await responding.client.get(f"/v1/responses/{body['id']}")).status_code == 404


async def test_others_do_not_see_a_response(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), api_key=("k1", "k2"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in ("k1", "k2"))
    fields = {"input": "hi", "max_output_tokens": 2}
    body = (await running.client.post("/v1/responses", json=fields, headers=mine)).json()
    path = f"/v1/responses/{body['id']}"
    assert (await running.client.get(path)).status_code == 401
    assert (await running.client.get(path, headers=theirs)).status_code == 404
    assert (await running.client.get(path, headers=mine)).status_code == 200
    again = await running.client.post(
        "/v1/responses", json=fields | {"previous_response_id": body["id"]}, headers=theirs
    )
    assert again.status_code == 404


async def test_items_become_the_conversation(responding: Running) -> None:
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Sun."}]},
        {"role": "user", "content": "Thanks"},
    ]
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}, "strict": True}
    response = await create(responding, input=items, tools=[tool], tool_choice="auto")
    assert response.status_code == 200, response.text
    assert response.json()["tools"] == [tool]
    prompt = responding.gateway.model.tokenizer.decode(responding.workers[0].seen[-1].request.token_ids)
    places = [prompt.index(word) for word in ("Be kind.", "Weather?", "sunny", "Sun.", "Thanks")]
    assert places == sorted(places)


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({"input": None}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": 5}, 400, "input"),
    ({"input": [5]}, 400, "input.0"),
    ({"input": [{"type": "web_search_call"}]}, 400, "input.0.type"),
    ({"input": [{"role": "user", "content": 5}]}, 400, "input.0.content"),
    ({"input": [{"content": "x"}]}, 400, "input.0.type"),
    ({"input": [{"type": "function_call", "call_id": "x", "name": "f"}]}, 400, "input.0.arguments"),
    ({"input": [{"type": "function_call_output", "output": "f"}]}, 400, "input.0.call_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, 400, "input.0.content.0"),
    ({"max_output_tokens": 0}, 400, "max_output_tokens"),
    ({"temperature": 9}, 400, "temperature"),
    ({"text": {"format": {"type": "yaml"}}}, 400, "text.format"),
    ({"text": {"format": {"type": "json_schema"}}}, 400, "text.format"),
    ({"text": 5}, 400, "body.text"),
    ({"tools": [{"type": "web_search"}]}, 501, "tools.0"),
    ({"tools": [{"type": "nonsense"}]}, 400, "tools.0.type"),
    ({"tools": [{"type": "function"}]}, 400, "tools.0.name"),
    ({"tools": [5]}, 400, "tools.0"),
    ({"tool_choice": "required"}, 400, "tool_choice"),
    ({"tool_choice": {"type": "mcp"}}, 400, "tool_choice"),
    ({"truncation": "maybe"}, 400, "truncation"),
    ({"metadata": {"a": 5}}, 400, "metadata"),
    ({"reasoning": {"effort": 5}}, 400, "reasoning.effort"),
    ({"conversation": "conv_1"}, 501, "conversation"),
    ({"prompt": {"id": "p"}}, 501, "prompt"),
    ({"background": True, "store": False}, 400, "store"),
    ({"previous_response_id": "resp_nope"}, 404, "response_id"),
    ({"model": "nope"}, 404, "model"),
    ({"input": "word " * 3000}, 400, "input_tokens"),
]


async def test_bad_values(responding: Running) -> None:
    for fields, status, param in BAD:
        response = await create(responding, **fields)
        assert response.status_code == status, (fields, response.text)
        error = response.json()["error"]
        assert error["param"] == param and error["code"] == status, (fields, error)
        assert "messages" not in error["message"] and "max_completion" not in error["message"], error
    assert responding.workers[0].seen == []


async def test_background_responses(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(delay_seconds=0.01))
    queued = (await create(running, background=True)).json()
    assert queued["status"] == "queued" and queued["background"] is True
    path = f"/v1/responses/{queued['id']}"
    done: dict[str, Any] = {"status": "in_progress"}
    while done["status"] == "in_progress":
        done = (await running.client.get(path)).json()
    assert done["status"] == "incomplete" and TEXT.startswith(done["output"][0]["content"][0]["text"])
    assert (await running.client.post(path + "/cancel")).json()["status"] == "incomplete"
    long = (await create(running, background=True, max_output_tokens=1500)).json()
    path = f"/v1/responses/{long['id']}"
    unfinished = await create(running, previous_response_id=long["id"])
    assert unfinished.status_code == 400 and "not finished" in unfinished.text
    cancelled = (await running.client.post(path + "/cancel")).json()
    assert cancelled["status"] == "cancelled" == (await running.client.get(path)).json()["status"]
    await running.settle(lambda: running.workers[0].num_running == 0)
    plain = (await create(running)).json()
    refused = await running.client.post(f"/v1/responses/{plain['id']}/cancel")
    assert refused.status_code == 400


async def test_background_responses_are_streamed(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(delay_seconds=0.02))
    body = {"model": "smol", "input": "Say hi", "max_output_tokens": 30, "background": True, "stream": True}
    async with running.client.stream("POST", "/v1/responses", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        first = await anext(response.aiter_text())
    # The client went away; the response goes on.
    created = json.loads(first.split("\n")[1].removeprefix("data: "))["response"]
    path = f"/v1/responses/{created['id']}"
    assert (await running.client.get(path)).json()["status"] == "in_progress"
    live = events_of((await running.client.get(path + "?stream=true")).text)
    done = (await running.client.get(path)).json()
    assert live[0]["type"] == "response.created" and live[-1]["response"] == done
    assert done["status"] == "incomplete" and done["usage"]["output_tokens"] == 30
    text = "".join(event["delta"] for event in live if event["type"] == "response.output_text.delta")
    assert text == done["output"][0]["content"][0]["text"]
    assert events_of((await running.client.get(path + "?stream=1")).text) == live
    rest = (await running.client.get(path + "?stream=true&starting_after=4")).text
    numbers = [json.loads(line[6:])["sequence_number"] for line in rest.splitlines() if line.startswith("data: ")]
    assert numbers == list(range(5, len(live)))
    for query in ("?stream=maybe", "?stream=true&starting_after=-1"):
        assert (await running.client.get(path + query)).status_code == 400
    await running.client.delete(path)
    assert (await running.client.get(path + "?stream=true")).status_code == 404


async def test_a_cancelled_stream_ends(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(delay_seconds=0.02))
    task = asyncio.create_task(create(running, background=True, stream=True, max_output_tokens=1500))
    await running.settle(lambda: bool(running.workers[0].seen))
    (response_id,) = running.gateway.background.running_ids
    assert (await running.client.post(f"/v1/responses/{response_id}/cancel")).json()["status"] == "cancelled"
    events = events_of((await task).text)
    assert events[-1]["type"] == "response.incomplete" and events[-1]["response"]["status"] == "cancelled"


async def test_stored_responses_are_streamed(responding: Running) -> None:
    body = (await create(responding, max_output_tokens=100)).json()
    streamed = events_of((await create(responding, max_output_tokens=100, stream=True)).text)
    path = f"/v1/responses/{body['id']}?stream=true"
    events = events_of((await responding.client.get(path)).text)
    assert events[-1]["response"] == body
    kinds = [event["type"] for event in streamed]
    first = kinds.index("response.output_text.delta")
    assert [event["type"] for event in events] == [
        *kinds[: first + 1],
        *(kind for kind in kinds[first:] if kind != "response.output_text.delta"),
    ]
    assert [event["delta"] for event in events if "delta" in event] == [TEXT]
    queued = (await create(responding, background=True, max_output_tokens=1500)).json()
    await responding.client.post(f"/v1/responses/{queued['id']}/cancel")


async def test_another_gateway_streams_a_background_response(
    start_gateway: StartGateway, says: Says, gateway_redis: EmbeddedValkey
) -> None:
    worker = says(delay_seconds=0.02)
    await worker.start()
    one = await start_gateway(worker, redis_url=gateway_redis.url, decode_nodes=(worker.address,))
    other = await start_gateway(redis_url=gateway_redis.url)
    task = asyncio.create_task(create(one, background=True, stream=True, max_output_tokens=30))
    await one.settle(lambda: bool(worker.seen))
    (response_id,) = one.gateway.background.running_ids
    told = events_of((await other.client.get(f"/v1/responses/{response_id}?stream=true")).text)
    assert told == events_of((await task).text) and told[-1]["type"] == "response.incomplete"


async def test_the_openai_sdk(responding: Running) -> None:
    async with openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{responding.port}/v1", api_key="none", max_retries=0
    ) as client:
        response = await client.responses.create(model="smol", input="Say hi", max_output_tokens=100)
        assert response.output_text == TEXT
        async with client.responses.stream(model="smol", input="Say hi", max_output_tokens=100) as stream:
            text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])
            final = await stream.get_final_response()
        assert text == TEXT == final.output_text
        assert (await client.responses.retrieve(final.id)).output_text == TEXT
        await client.responses.delete(final.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(final.id)


async def test_a_stream_that_breaks_says_so(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(fails_after=(3, InternalError("broke"))))
    events = events_of((await create(running, stream=True)).text)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed" and events[-1]["response"]["error"]["code"] == "server_error"
    Response.model_validate(events[-1]["response"])
    assert (await create(running)).status_code == 500


async def test_calls_and_forms_of_output(start_gateway: StartGateway, says: Says) -> None:
    said = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    running = await start_gateway(says(said, ends=True), tool_call_parser="hermes")
    tool = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    fields = {"tools": [tool], "max_output_tokens": 100}
    body = (await create(running, **fields)).json()
    Response.model_validate(body)
    (call,) = [item for item in body["output"] if item["type"] == "function_call"]
    assert call["name"] == "f" and json.loads(call["arguments"]) == {"a": 1} and call["status"] == "completed"
    events = events_of((await create(running, stream=True, **fields)).text)
    deltas = [event["delta"] for event in events if event["type"] == "response.function_call_arguments.delta"]
    assert json.loads("".join(deltas)) == {"a": 1}
    assert events[-1]["response"]["output"][-1]["arguments"] == call["arguments"]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    answer = await create(running, text=form)
    assert answer.status_code == 200 and answer.json()["text"] == form
    assert running.workers[0].seen[-1].request.sampling.HasField("structured_output")
