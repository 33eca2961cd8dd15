"""Chat completions through a real gateway over fake workers: shapes, streams, and what reaches the workers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from biphase.errors import InternalError
from biphase.rpc.v1 import common_pb2
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import TEXT, StartGateway, finishes, text_of

Says = Callable[..., FakeDecode]


async def test_whole_answer_has_the_golden_shape(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    response = await running.chat(logprobs=True, top_logprobs=2, max_tokens=4)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion" and body["model"] == "smol"
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": " Paris is the capital",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    entries = choice["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == [" Paris", " is", " the", " capital"]
    assert entries[0]["bytes"] == list(b" Paris") and len(entries[0]["top_logprobs"]) == 2
    usage = body["usage"]
    assert usage["completion_tokens"] == 4 and usage["total_tokens"] == usage["prompt_tokens"] + 4
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_golden_keys_are_all_there(start_gateway: StartGateway, says: Says, golden: Callable[[str], Any]) -> None:
    """What a client of vLLM finds, it finds here: at the top, in a choice, in a message."""
    running = await start_gateway(says())
    theirs = golden("chat.txt")
    ours = (await running.chat(logprobs=True, top_logprobs=2, max_tokens=4)).json()
    # Of no meaning in this server.
    absent = {"prompt_text", "ec_transfer_params", "metrics"}
    assert theirs.keys() - ours.keys() <= absent
    assert theirs["choices"][0].keys() - ours["choices"][0].keys() <= {"routed_experts"}
    assert theirs["choices"][0]["message"].keys() == ours["choices"][0]["message"].keys()
    entry, golden_entry = (body["choices"][0]["logprobs"]["content"][0] for body in (ours, theirs))
    assert (
        entry.keys() == golden_entry.keys()
        and entry["top_logprobs"][0].keys() == golden_entry["top_logprobs"][0].keys()
    )


async def test_stream_order_and_sum(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    whole = (await running.chat(max_tokens=10)).json()
    chunks = await running.stream(max_tokens=10, stream_options={"include_usage": True})
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {
        (chunks[0]["id"], chunks[0]["created"], "smol")
    }
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]
    assert finishes(chunks) == {0: ["length"]}
    assert [place for place, chunk in enumerate(chunks) if "usage" in chunk] == [len(chunks) - 1]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


async def test_no_usage_unless_asked_and_on_every_chunk_when_continuous(
    start_gateway: StartGateway, says: Says
) -> None:
    running = await start_gateway(says())
    assert not any("usage" in chunk for chunk in await running.stream())
    assert not any("usage" in chunk for chunk in await running.stream(stream_options={}))
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = await running.stream(max_tokens=3, stream_options=options)
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == [0, 1, 2, 3, 3, 3]


async def test_end_of_sequence_is_counted_but_not_shown(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(" Paris.", ends=True))
    body = (await running.chat(max_tokens=20)).json()
    (choice,) = body["choices"]
    assert choice["message"]["content"] == " Paris." and choice["finish_reason"] == "stop"
    assert choice["stop_reason"] is None and body["usage"]["completion_tokens"] == 3
    shown = (await running.chat(max_tokens=20, skip_special_tokens=False)).json()
    assert shown["choices"][0]["message"]["content"] == " Paris."
    kept = (await running.chat(max_tokens=20, skip_special_tokens=False, include_stop_str_in_output=True)).json()
    assert kept["choices"][0]["message"]["content"] == " Paris.<|im_end|>"


async def test_stop_token_is_named(start_gateway: StartGateway, says: Says, gateway_tokenizer: Any) -> None:
    running = await start_gateway(says())
    (token_id,) = gateway_tokenizer.tokenizer.encode(" capital")
    body = (await running.chat(stop_token_ids=[token_id], max_tokens=20)).json()
    assert body["choices"][0]["message"]["content"] == " Paris is the"
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", token_id)


@pytest.mark.parametrize("stop", ["capital of", "e capi", "of Fra", "al o"])
@pytest.mark.parametrize("per_message", [1, 3])
async def test_stop_strings_across_tokens(start_gateway: StartGateway, says: Says, stop: str, per_message: int) -> None:
    worker = says(tokens_per_message=per_message, delay_seconds=0.001)
    running = await start_gateway(worker)
    cut = TEXT[: TEXT.index(stop)]
    body = (await running.chat(stop=stop, max_tokens=40)).json()
    assert body["choices"][0]["message"]["content"] == cut
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", stop)
    chunks = await running.stream(stop=[stop, "never"], max_tokens=40)
    assert text_of(chunks) == cut and finishes(chunks) == {0: ["stop"]}
    included = await running.stream(stop=[stop], include_stop_str_in_output=True, max_tokens=40)
    assert text_of(included) == cut + stop
    # The call at the worker is ended, not left to run.
    await running.settle(lambda: worker.num_running == 0)
    assert all(seen.cancelled for seen in worker.seen)


async def test_stop_strings_wait_for_min_tokens(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(" a b a b a b a b"))
    body = (await running.chat(stop=" b", min_tokens=5, max_tokens=12)).json()
    assert body["choices"][0]["message"]["content"] == " a b a b a"


async def test_unfinished_characters_are_never_shown(start_gateway: StartGateway, says: Says) -> None:
    text = " 🦙😀 日本語 👩‍👩‍👧 \u2028end"
    running = await start_gateway(says(text))
    for max_tokens in range(1, 30):
        body = (await running.chat(max_tokens=max_tokens)).json()
        chunks = await running.stream(max_tokens=max_tokens)
        content = body["choices"][0]["message"]["content"]
        assert "�" not in content and content == text_of(chunks)


async def test_line_separators_are_escaped_on_the_wire(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says("a\u2028b\u2029c\x85d"))
    for stream in (True, False):
        response = await running.chat(stream=stream, max_tokens=20)
        assert not any(char in response.text for char in "\u2028\u2029\x85")
        assert "\\u2028" in response.text


async def test_several_choices(start_gateway: StartGateway, says: Says) -> None:
    worker = says()
    running = await start_gateway(worker)
    body = (await running.chat(n=3, seed=7, max_tokens=5, temperature=1)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["completion_tokens"] == 15
    seeds = [seen.request.sampling.seed for seen in worker.seen]
    assert len(set(seeds)) == 3 and 7 in seeds
    names = {seen.request.request_id for seen in worker.seen}
    assert names == {f"{body['id']}-{place}" for place in range(3)}
    chunks = await running.stream(n=3, seed=7, max_tokens=5)
    assert finishes(chunks) == {0: ["length"], 1: ["length"], 2: ["length"]}
    assert sorted(seen.request.sampling.seed for seen in worker.seen[3:]) == sorted(seeds)
    for index in range(3):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"].get("role") == "assistant"
        assert sum("role" in choice["delta"] for choice in own) == 1


async def test_what_a_worker_gets(start_gateway: StartGateway, says: Says, gateway_tokenizer: Any) -> None:
    worker = says()
    running = await start_gateway(worker, request_timeout=50.0)
    await running.chat(
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.1,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        repetition_penalty=1.2,
        seed=-1,
        logit_bias={"5": -100, "7": 3.5},
        stop_token_ids=[9],
        allowed_token_ids=[5, 6, 7, 9],
        bad_words=["blue"],
        ignore_eos=True,
        min_tokens=2,
        priority=-3,
        cache_salt="tenant",
        max_completion_tokens=6,
        unknown_field={"x": 1},
    )
    (seen,) = worker.seen
    request, sampling = seen.request, seen.request.sampling
    assert sampling.temperature == 0.5 and round(sampling.top_p, 3) == 0.9 and sampling.top_k == 40
    assert (round(sampling.min_p, 3), sampling.frequency_penalty, sampling.presence_penalty) == (0.1, 0.5, -0.5)
    assert sampling.seed == 2**64 - 1 and dict(sampling.logit_bias) == {5: -100.0, 7: 3.5}
    assert list(sampling.stop_token_ids) == [9] and list(sampling.eos_token_ids) == [2] and sampling.ignore_eos
    assert list(sampling.allowed_token_ids) == [5, 6, 7, 9] and sampling.min_tokens == 2 and sampling.max_tokens == 6
    tokenizer = gateway_tokenizer.tokenizer
    words = {tokenizer.decode(list(word.token_ids)) for word in sampling.bad_words}
    assert words == {"blue", " blue"}
    assert request.priority == -3 and request.cache_salt == "tenant" and request.namespace == b"n" * 32
    assert request.num_prompt_tokens == len(request.token_ids)
    assert tokenizer.decode(list(request.token_ids)).endswith("Say hi<|im_end|>\n<|im_start|>assistant\n")
    assert seen.deadline_seconds is not None and 40 < seen.deadline_seconds <= 50


async def test_defaults(start_gateway: StartGateway, says: Says) -> None:
    worker = says(max_model_len=100)
    running = await start_gateway(worker)
    await running.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
    sampling = worker.seen[0].request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (1.0, 1.0, 0, 1.0)
    assert sampling.max_tokens == 100 - len(worker.seen[0].request.token_ids)
    assert not sampling.HasField("logprobs") and sampling.seed > 0
    await running.chat(max_tokens=99)
    assert worker.seen[1].request.sampling.max_tokens == 100 - len(worker.seen[1].request.token_ids)


async def test_cached_tokens_are_hits_and_never_what_was_transferred(start_gateway: StartGateway, says: Says) -> None:
    report = common_pb2.RequestReport(
        prefill_mode="remote",
        reason="disaggregated",
        prefill_node_id="prefill-9",
        transport="shm",
        num_transferred_tokens=30,
        num_computed_tokens=13,
    )
    worker = says(report=report)
    running = await start_gateway(worker)
    assert (await running.chat()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    report.num_cached_tokens, report.num_prefill_cached_tokens, report.num_external_tokens = 1, 4, 8
    body = (await running.chat(n=2, temperature=1)).json()
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 13}
    rows = (await running.client.get("/status")).json()["requests"]
    assert rows[0]["transport"] == "shm" and rows[0]["num_transferred_tokens"] == 30


async def test_content_forms_are_equal(start_gateway: StartGateway, says: Says) -> None:
    worker = says()
    running = await start_gateway(worker)
    for content in (
        "Say hi",
        [{"type": "text", "text": "Say hi"}],
        ["Say hi"],
        [{"type": "input_text", "text": "Say hi"}],
    ):
        await running.chat(messages=[{"role": "user", "content": content}])
    assert len({tuple(seen.request.token_ids) for seen in worker.seen}) == 1
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    for content in (None, "", []):
        response = await running.chat(
            messages=[
                {"role": "user", "content": "x"},
                {"role": "assistant", "content": content, "tool_calls": calls},
                {"role": "tool", "tool_call_id": "c", "content": [{"type": "text", "text": "21 C"}]},
            ]
        )
        assert response.status_code == 200, response.text


async def test_continue_final_message(start_gateway: StartGateway, says: Says, gateway_tokenizer: Any) -> None:
    worker = says()
    running = await start_gateway(worker)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "The answer"}]
    await running.chat(messages=messages, continue_final_message=True)
    text = gateway_tokenizer.tokenizer.decode(list(worker.seen[0].request.token_ids))
    assert text.endswith("<|im_start|>assistant\nThe answer")


async def test_token_ids_come_back_when_asked(start_gateway: StartGateway, says: Says, gateway_tokenizer: Any) -> None:
    running = await start_gateway(says())
    body = (await running.chat(return_token_ids=True, logprobs=True, return_tokens_as_token_ids=True)).json()
    expected = gateway_tokenizer.tokenizer.encode(TEXT)[:8]
    assert (
        body["choices"][0]["token_ids"] == expected and len(body["prompt_token_ids"]) == body["usage"]["prompt_tokens"]
    )
    assert body["choices"][0]["logprobs"]["content"][0]["token"] == f"token_id:{expected[0]}"
    chunks = await running.stream(return_token_ids=True)
    assert [i for chunk in chunks for c in chunk["choices"] for i in c.get("token_ids", [])] == expected


async def test_logprobs_of_named_tokens(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    body = (await running.chat(logprobs=True, top_logprobs=1, logprob_token_ids=[7, 9, 7], max_tokens=2)).json()
    assert list(running.workers[0].seen[-1].request.sampling.logprob_token_ids) == [7, 9]
    for entry in body["choices"][0]["logprobs"]["content"]:
        assert [other["token"] for other in entry["top_logprobs"]][1:] == ["<gh_stars>", "<issue_comment>"]
    completion = (await running.complete(logprobs=0, logprob_token_ids=[19556], max_tokens=1)).json()
    assert "Hello" in completion["choices"][0]["logprobs"]["top_logprobs"][0]
    for wrong in ({"logprob_token_ids": [5]}, {"logprobs": True, "logprob_token_ids": [10**6]},
                  {"logprobs": True, "logprob_token_ids": list(range(129))}):  # fmt: skip
        assert (await running.chat(**wrong)).json()["error"]["param"] == "logprob_token_ids"


async def test_logprobs_in_streams(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(" 🦙 x"))
    chunks = await running.stream(logprobs=True, top_logprobs=1, max_tokens=5)
    entries = [
        entry for chunk in chunks for c in chunk["choices"] for entry in (c["logprobs"] or {"content": []})["content"]
    ]
    assert len(entries) == 5
    assert bytes(value for entry in entries for value in entry["bytes"]).decode(errors="replace").startswith(" 🦙")
    assert all(entry["token"] for entry in entries)
    assert json.dumps(entries, allow_nan=False)


async def test_comments_keep_a_silent_stream_alive(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(
        says(first_delay_seconds=0.3, delay_seconds=0.12, fails_after=(5, InternalError("broke"))),
        sse_keep_alive_seconds=0.05,
    )
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "stream": True}
    raw = (await running.client.post("/v1/chat/completions", json=body)).text
    # Before the first token, and between tokens.
    assert raw.startswith(": keep-alive\n\n" * 4) and raw.count(": keep-alive\n\n") > 5
    events = [part for part in raw.removesuffix("\n\n").split("\n\n") if part != ": keep-alive"]
    assert events[-1] == "data: [DONE]" and len(events) == 6
    responses = {"input": "hi", "max_output_tokens": 3, "stream": True}
    raw = (await running.client.post("/v1/responses", json=responses)).text
    assert raw.startswith(": keep-alive\n\n") and "response.incomplete" in raw
    # It has begun, so what fails is told in the stream.
    running.workers[0].refuses = InternalError("broke")
    running.workers[0].first_delay_seconds = 0.0
    assert (await running.chat(stream=True)).status_code == 500
    running.workers[0].refuses, running.workers[0].fails_after = None, (0, InternalError("broke"))
    running.workers[0].first_delay_seconds = 0.2
    raw = (await running.client.post("/v1/chat/completions", json=body)).text
    assert '"code":500' in raw and raw.endswith("data: [DONE]\n\n")
    running.workers[0].fails_after = None
    # A client that leaves between two comments.
    async with running.client.stream("POST", "/v1/chat/completions", json=body | {"max_tokens": 1000}) as response:
        async for _ in response.aiter_bytes():
            break
    await running.settle(lambda: running.workers[0].num_running == 0)
