"""Whatever is wrong with a request: one form of error, the right status, nothing dispatched, nothing large echoed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from biphase.errors import InternalError, InvalidRequestError, OverloadedError
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import Running, StartGateway

Says = Callable[..., FakeDecode]
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
BAD_TOOL = {"type": "function", "function": {"name": "g", "parameters": {"type": "nonsense"}}}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["code"] == status and body["error"]["message"]
    assert len(response.content) < 4096
    return body["error"]  # type: ignore[no-any-return]


BAD_CHAT: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "empty conversation"),
    ({"messages": "hi"}, "body.messages", "list"),
    ({"messages": [1]}, "messages.0", "object"),
    ({"messages": [{"content": "x"}]}, "messages.0.role", "role"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content", "string or a list"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages.0.content.0",
        "not a multimodal model",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "odd"}]}]}, "messages.0.content.0.type", "unknown part"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages.0.tool_calls.0", "name"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": -1}, "max_tokens", "at least 1, got -1"),
    ({"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": 10**30}, "max_tokens", "max_model_len=2048"),
    ({"max_tokens": "many"}, "body.max_tokens", "integer"),
    ({"temperature": -1}, "temperature", "non-negative"),
    ({"temperature": 2.5}, "temperature", "at most 2"),
    ({"temperature": "hot"}, "body.temperature", "hot"),
    ({"top_p": 0}, "top_p", "(0, 1]"),
    ({"top_p": 1.5}, "top_p", "(0, 1]"),
    ({"top_k": -2}, "top_k", "top_k"),
    ({"min_p": 1.5}, "min_p", "[0, 1]"),
    ({"presence_penalty": 3}, "presence_penalty", "[-2, 2]"),
    ({"frequency_penalty": -3}, "frequency_penalty", "[-2, 2]"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than zero"),
    ({"n": 0}, "n", "at least 1"),
    ({"n": 10**6}, "n", "at most 16384"),
    ({"seed": 2**63}, "seed", "64-bit"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": ["a", ""]}, "stop", "empty string"),
    ({"stop": list("abcde")}, "stop", "at most 4"),
    ({"stop": [1]}, "body.stop", "stop"),
    ({"stop": "x" * 5000}, "stop", "characters"),
    ({"stop_token_ids": [50000]}, "stop_token_ids", "out-of-vocab"),
    ({"stop_token_ids": ["a"]}, "body.stop_token_ids", "integers"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "empty"),
    ({"allowed_token_ids": [-1]}, "allowed_token_ids", "out-of-vocab"),
    ({"logit_bias": {"foo": 1}}, "logit_bias", "cannot be converted"),
    ({"logit_bias": {"99999": 1}}, "logit_bias", "Vocabulary size: 49152"),
    ({"logit_bias": {"5": "x"}}, "logit_bias", "finite"),
    ({"logit_bias": [1]}, "logit_bias", "object"),
    ({"bad_words": ["x"] * 200}, "bad_words", "at most 128"),
    ({"bad_words": [""]}, "bad_words", "bad_words"),
    ({"top_logprobs": 2}, "top_logprobs", "must be set to true"),
    ({"logprobs": True, "top_logprobs": 50}, "top_logprobs", "max allowed: 20"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs", "negative"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not available"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=True"),
    ({"min_tokens": 9}, "min_tokens", "less than or equal"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal"),
    ({"cache_salt": ""}, "cache_salt", "1 to 128"),
    ({"cache_salt": "a/b"}, "cache_salt", "none of"),
    ({"priority": 2**40}, "priority", "32-bit"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "at least 1"),
    ({"truncation_side": "up", "truncate_prompt_tokens": 5}, "truncation_side", "left or right"),
    ({"tools": []}, "tools", "empty array"),
    ({"tools": [{"type": "x"}]}, "tools.0", "function"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name", "name"),
    ({"tool_choice": "required"}, "tool_choice", "`tools` must be set"),
    ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "tool_choice must be"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "not among"),
    ({"response_format": {"type": "yaml"}}, "response_format", "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "must be a JSON schema"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
    ({"structured_outputs": 5}, "structured_outputs", "object"),
    ({"guided_choice": ["a"], "guided_regex": "a"}, "guided_choice", "Only one of guided_regex, guided_choice"),
    ({"guided_choice": "a"}, "guided_choice", "list"),
    ({"guided_regex": "foo[["}, "guided_regex", "unclosed character class"),
    ({"structured_outputs": {"regex": "foo[["}}, "structured_outputs.regex", "unclosed character class"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "look-around"),
    ({"structured_outputs": {"grammar": 'root ::= ("a" | '}}, "structured_outputs.grammar", "line 1"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json", 'unsupported keywords: "not"'),
    ({"structured_outputs": {"json": {}, "whitespace_pattern": 5}}, "structured_outputs", "whitespace_pattern"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "response_format.json_schema",
        "nonsense",
    ),
    (
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
        "Only one",
    ),
    ({"tools": [BAD_TOOL], "tool_choice": "required"}, "tools", "nonsense"),
    ({"chat_template": "{{ 1 }}"}, "chat_template", "not accepted"),
    ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template", "not accepted"),
    ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message", "Cannot set both"),
]


@pytest.fixture
async def refusing(start_gateway: StartGateway, says: Says) -> Running:
    return await start_gateway(says())


async def test_bad_values_in_chat(refusing: Running) -> None:
    for fields, param, words in BAD_CHAT:
        for stream in (False, True):
            if stream and "stream_options" in fields:
                continue
            error = error_of(await refusing.chat(**{"stream": stream, **fields}), 400)
            assert error["param"] == param, (fields, error)
            assert words in error["message"], (fields, error)
            assert error["type"] in ("BadRequestError", "Bad Request")
    assert refusing.workers[0].seen == []


async def test_bad_values_in_completions(refusing: Running) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"prompt": ""}, "non-empty"),
        ({"prompt": None}, "non-empty"),
        ({"prompt": []}, "at least one prompt"),
        ({"prompt": [""]}, "empty"),
        ({"prompt": [[]]}, "empty"),
        ({"prompt": [1, "a"]}, "list"),
        ({"prompt": [True]}, "list"),
        ({"prompt": {"a": 1}}, "string"),
        ({"prompt": [-1]}, "Token id -1 is out of vocabulary"),
        ({"prompt": [[5], [49152]]}, "Token id 49152 is out of vocabulary"),
        ({"prompt": [10**40]}, "out of vocabulary"),
        ({"prompt": ["x"] * 1025}, "at most 1024"),
        ({"prompt": ["x"] * 1000, "n": 17}, "16384"),
        ({"max_tokens": 0}, "at least 1"),
        ({"logprobs": 21}, "max allowed: 20"),
        ({"logprobs": -1}, "negative"),
        ({"prompt": "word " * 3000}, "maximum context length is 2048 tokens"),
        ({"prompt": "word " * 3000, "stream": True}, "maximum context length is 2048 tokens"),
        ({"prompt": "x" * 3_000_000}, "maximum context length is 2048 tokens"),
        ({"prompt": "word " * 60_000}, "maximum context length is 2048 tokens"),
        ({"prompt": [5] * 100_000}, "maximum context length is 2048 tokens"),
        ({"prompt": [5] * 2048}, "maximum context length is 2048 tokens"),
    ]
    for fields, words in cases:
        error = error_of(await refusing.complete(**fields), 400)
        assert words in error["message"], (fields, error)
    assert refusing.workers[0].seen == []
    # Many characters, few tokens.
    assert (await refusing.complete(prompt="x" + " " * 30_000)).status_code == 200


async def test_numbers_that_are_none(refusing: Running) -> None:
    for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        for value in ("NaN", "Infinity", "-Infinity", "1e999"):
            body = f'{{"messages":[{{"role":"user","content":"x"}}],"{field}":{value}}}'
            response = await refusing.client.post(
                "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
            )
            assert error_of(response, 400)["param"] == field


async def test_bytes_that_are_no_request(refusing: Running) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        for content in (b'{"model":', b"[]", b"null", b"", b"{}", b"\xff\xfe{", b'"x"', b"1", b"{" * 5000, b"[" * 5000):
            response = await refusing.client.post(path, content=content, headers={"content-type": "application/json"})
            error_of(response, 400)
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
            response = await refusing.client.post(path, content=b'{"a":1}', headers={"content-type": kind})
            assert "Unsupported Media Type" in error_of(response, 400)["message"]
    deep = b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 3000 + b"]" * 3000 + b"}"
    response = await refusing.client.post("/v1/chat/completions", content=deep)
    error_of(response, 400)


async def test_lone_surrogates(refusing: Running) -> None:
    body = b'{"messages":[{"role":"user","content":"x\\ud800y"}],"max_tokens":2,"stream":true}'
    response = await refusing.client.post("/v1/chat/completions", content=body)
    error_of(response, 400)


async def test_a_huge_bad_body_is_not_echoed(refusing: Running) -> None:
    bad = ["x"] * 40_000
    for fields in (
        {"stop_token_ids": bad},
        {"allowed_token_ids": bad},
        {"stop": [1] * 40_000},
        {"logit_bias": {f"k{place}": 1 for place in range(40_000)}},
        {"messages": [{"role": "x" * 10**6, "content": 5}]},
        {"model": "m" * 10**6},
        {"n": 10**400},
    ):
        response = await refusing.chat(**fields)
        error_of(response, 404 if "model" in fields else 400)


async def test_unknown_fields_are_ignored_but_never_what_changes_the_text(refusing: Running) -> None:
    ignored = {
        "user": 5, "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "prompt_cache_key": "k", "foo": [1],
        "safety_identifier": "s", "kv_transfer_params": {"do_remote_decode": True}, "best_of": 4, "suffix": "x",
        "stream_interval": 3, "length_penalty": 1.1, "vllm_xargs": {},
    }  # fmt: skip
    assert (await refusing.chat(**ignored)).status_code == 200
    response = await refusing.chat(use_beam_search=True)
    assert error_of(response, 501)["type"] == "NotImplementedError"
    # Clients would send it again.
    assert response.headers["x-should-retry"] == "false"
    assert (await refusing.chat(response_format={"type": "text"})).status_code == 200
    assert (await refusing.chat(tools=[TOOL], tool_choice="auto")).status_code == 200
    error_of(await refusing.complete(suffix="x"), 501)


async def test_paths_methods_and_models(refusing: Running) -> None:
    client = refusing.client
    assert error_of(await client.get("/v1/nope"), 404)["type"] == "NotFoundError"
    assert error_of(await client.get("/v1/chat/completions"), 405)["type"] == "MethodNotAllowedError"
    assert error_of(await client.post("/v1/embeddings", json={}), 404)
    error = error_of(await refusing.chat(model="nope"), 404)
    assert error["param"] == "model" and "`nope` does not exist" in error["message"]
    assert (await refusing.chat(model=None)).status_code == 200
    error_of(await client.get("/v1/models/nope"), 404)


async def test_bodies_over_the_limit(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), max_request_bytes=1000)
    error_of(await running.chat(messages=[{"role": "user", "content": "x" * 2000}]), 413)

    async def parts() -> Any:
        for _ in range(50):
            yield b" " * 100

    response = await running.client.post(
        "/v1/chat/completions", content=parts(), headers={"content-type": "application/json"}
    )
    error_of(response, 413)
    assert (await running.chat()).status_code == 200


async def test_no_worker_is_a_503(start_gateway: StartGateway) -> None:
    running = await start_gateway()
    for response in (await running.chat(), await running.complete(), await running.client.get("/health")):
        assert error_of(response, 503)["type"] == "ServiceUnavailableError"
        assert response.headers["retry-after"] == "1"
    assert (await running.client.get("/v1/models")).status_code == 200


async def test_what_a_worker_refuses(start_gateway: StartGateway, says: Says) -> None:
    worker = says(refuses=InvalidRequestError("too odd"))
    running = await start_gateway(worker)
    assert "too odd" in error_of(await running.chat(stream=True), 400)["message"]
    worker.refuses = InternalError("broke")
    error_of(await running.chat(), 500)
    worker.refuses = OverloadedError("full")
    response = await running.chat()
    assert error_of(response, 429)["type"] == "RateLimitError" and int(response.headers["retry-after"]) >= 1


async def test_an_error_after_the_stream_has_begun(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(fails_after=(3, InternalError("broke"))))
    chunks = await running.stream(max_tokens=8)
    assert chunks[-1]["error"]["code"] == 500 and "broke" in chunks[-1]["error"]["message"]
    assert not any(choice["finish_reason"] for chunk in chunks[:-1] for choice in chunk["choices"])
    several = await running.stream(max_tokens=8, n=2, temperature=1)
    assert several[-1]["error"]["code"] == 500
    error_of(await running.chat(), 500)


async def test_requests_have_ids(refusing: Running) -> None:
    response = await refusing.client.post(
        "/v1/chat/completions", json={"messages": HI, "max_tokens": 1}, headers={"X-Request-Id": "abc-1"}
    )
    assert response.headers["x-request-id"] == "abc-1" and response.json()["id"] == "chatcmpl-abc-1"
    seen = refusing.workers[0].seen[-1].request.request_id
    assert seen.startswith("chatcmpl-abc-1-") and seen.endswith("-0")
    for odd in ("a b", "x" * 500, 'a"b', "a/../b"):
        response = await refusing.client.get("/v1/nope", headers={"X-Request-Id": odd})
        assert response.headers["x-request-id"] not in ("", odd)


async def test_openapi_describes_the_bodies(refusing: Running) -> None:
    document = (await refusing.client.get("/openapi.json")).json()
    schema = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert "messages" in schema["required"] and "$ref" not in json.dumps(schema)
    assert (await refusing.client.get("/docs")).status_code == 200
