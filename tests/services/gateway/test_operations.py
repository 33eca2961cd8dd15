from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphase.rpc.v1 import common_pb2
from biphase.telemetry import context, tracing
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import TOKENIZER_DIGEST, StartGateway

Says = Callable[..., FakeDecode]


async def test_models(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), served_model_name=("smol", "org/other"))
    body = (await running.client.get("/v1/models")).json()
    assert [model["id"] for model in body["data"]] == ["smol", "org/other"]
    golden = {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
    assert body["data"][0].keys() == golden and body["data"][0]["max_model_len"] == 2048
    one = (await running.client.get("/v1/models/org/other")).json()
    assert one["id"] == "org/other" and one["object"] == "model"


async def test_tokenize_and_back(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    post = running.client.post
    body = (await post("/tokenize", json={"prompt": "Hello wörld 🦙", "return_token_strs": True})).json()
    assert body == {
        "count": 7,
        "max_model_len": 2048,
        "tokens": [19556, 267, 29989, 400, 15107, 116, 243],
        "token_strs": ["Hello", "Ġw", "Ã¶r", "ld", "ĠðŁ", "¦", "Ļ"],
    }
    back = (await post("/detokenize", json={"tokens": body["tokens"]})).json()
    assert back == {"prompt": "Hello wörld 🦙"}
    chat = (await post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    assert chat["count"] == 31 and chat["tokens"][0] == 1 and chat["token_strs"] is None
    for body in ({"tokens": [-1]}, {"tokens": [10**9]}, {"tokens": "x"}, {}):
        assert (await post("/detokenize", json=body)).status_code == 400
    assert (await post("/tokenize", json={})).status_code == 400
    assert (await post("/tokenize", json={"prompt": ""})).json()["count"] == 0


async def test_health_and_friends(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(first_delay_seconds=0.3))
    for method, path in (("GET", "/health"), ("GET", "/ping"), ("POST", "/ping")):
        response = await running.client.request(method, path)
        assert response.status_code == 200 and response.content == b""
    assert (await running.client.get("/version")).json().keys() == {"version"}
    assert (await running.client.get("/load")).json() == {"server_load": 0}
    pending = asyncio.create_task(running.chat())
    await asyncio.sleep(0.1)
    assert (await running.client.get("/load")).json() == {"server_load": 1}
    await pending
    assert (await running.client.get("/load")).json() == {"server_load": 0}


async def test_reset_prefix_cache(start_gateway: StartGateway, says: Says) -> None:
    store = says(role="kvstore")
    await store.start()
    running = await start_gateway(says(), says(role="prefill"), api_key=("sk-1",))
    decode, prefill = running.workers
    running.workers.append(store)
    running.gateway.nodes.add_static([store.address])
    await running.settle(lambda: len(running.gateway.nodes.usable("kvstore")) == 1)
    path, key = "/reset_prefix_cache", {"Authorization": "Bearer sk-1"}
    # Everybody's answers get slower by it.
    assert (await running.client.post(path)).status_code == 401
    for query in ("", "?reset_running_requests=true&reset_external=false", "?reset_external"):
        response = await running.client.post(path + query, headers=key)
        assert response.status_code == 200 and response.json() == {"success": True}
    assert (decode.num_resets, prefill.num_resets, store.num_resets) == (3, 3, 1)
    prefill.keeps_cache = True
    assert (await running.client.post(path, headers=key)).json() == {"success": False}
    await prefill.stop()
    assert (await running.client.post(path, headers=key)).json() == {"success": False}
    response = await running.client.post(path + "?reset_external=perhaps", headers=key)
    assert response.status_code == 400 and response.json()["error"]["param"] == "reset_external"


def _value(text: str, name: str) -> float:
    (line,) = [line for line in text.splitlines() if line.startswith(name)]
    return float(line.rsplit(" ", 1)[1])


async def test_metrics(start_gateway: StartGateway, says: Says) -> None:
    report = common_pb2.RequestReport(
        prefill_mode="remote",
        reason="disaggregated",
        transport="tcp",
        num_transferred_tokens=20,
        num_computed_tokens=31,
    )
    worker = says(report=report, delay_seconds=0.01)
    running = await start_gateway(worker)
    await running.chat(max_tokens=5)
    await running.stream(max_tokens=3)
    response = await running.client.get("/metrics")
    text = response.text
    assert response.headers["content-type"].startswith("text/plain")
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_bucket",
        "vllm:request_queue_time_seconds_bucket", "vllm:request_prefill_time_seconds_bucket",
        "vllm:request_decode_time_seconds_bucket", "vllm:request_inference_time_seconds_bucket",
        "vllm:request_prompt_tokens_bucket", "vllm:request_generation_tokens_bucket", "vllm:num_preemptions_total",
        "vllm:cache_config_info", "vllm:external_prefix_cache_queries_total",
        "vllm:external_prefix_cache_hits_total", "biphase:requests_total", "biphase:routing_decisions_total",
    ):  # fmt: skip
        assert any(line.startswith(name) for line in text.splitlines()), name
    assert _value(text, "vllm:num_requests_running") == 0
    assert _value(text, "vllm:generation_tokens_total") == 8
    assert _value(text, 'vllm:request_success_total{engine="0",finished_reason="length"') == 2
    assert _value(text, "vllm:time_to_first_token_seconds_count") == 2
    assert _value(text, "vllm:inter_token_latency_seconds_count") == 6
    assert _value(text, 'biphase:requests_total{mode="remote",reason="disaggregated",transport="tcp"}') == 2


async def test_status(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(node_id="decode-a"), says(node_id="prefill-a", role="prefill"))
    await running.chat()
    body = (await running.client.get("/status")).json()
    nodes = {node["id"]: node for node in body["nodes"]}
    assert nodes.keys() == {"decode-a", "prefill-a"}
    node = nodes["decode-a"]
    assert (node["role"], node["pid"], node["state"]) == ("decode", 4242, "ready")
    assert node["blocks"] == {"total": 1000, "used": 10, "cached": 0, "leased": 2, "draining": 0}
    assert node["peers"][0]["transport"] == "shm" and node["incarnation"] and node["address"]
    (row,) = body["requests"]
    for name in ("request_id", "prefill_mode", "transport", "num_cached_tokens", "num_external_tokens", "seconds"):
        assert name in row
    candidates = running.workers[0].seen[0].request.prefill_candidates
    assert [candidate.node_id for candidate in candidates] == ["prefill-a"]


async def test_api_keys(start_gateway: StartGateway, says: Says, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# team\nfrom-file\n")
    running = await start_gateway(says(), api_key=("secret", "other"), api_key_file=str(path))
    client = running.client
    for key in ("secret", "other", "from-file"):
        response = await client.get("/v1/models", headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}, {"Authorization": "Bearer"}):
        response = await client.post("/v1/chat/completions", json={}, headers=headers)
        assert response.status_code == 401 and response.json()["error"]["code"] == 401
        assert "secret" not in response.text and response.headers["x-request-id"]
    for open_path in ("/health", "/metrics", "/version"):
        assert (await client.get(open_path)).status_code == 200
    path.write_text("rotated-key\n")
    running.gateway.keys._checked = 0.0
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer from-file"})).status_code == 401
    assert (await client.get("/v1/models", headers={"Authorization": "Bearer rotated-key"})).status_code == 200


async def test_a_stranger_starts_no_span(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[str, dict[str, Any]] = {}

    def span(name: str, *, is_server: bool = False, attributes: tracing.Attributes | None = None) -> tracing.Span:
        told[name] = {"under": context.traceparent.get(), **(attributes or {})}

        class Recorded(tracing.Span):
            def set(self, attributes: tracing.Attributes) -> None:
                told[name].update(attributes)

            @property
            def is_recording(self) -> bool:
                return True

        return Recorded()

    monkeypatch.setattr(tracing, "span", span)
    running = await start_gateway(says(), api_key=("first",))
    # The client decides whether its trace is kept: not everybody may.
    running.client.headers["traceparent"] = sampled = f"00-{'a' * 32}-{'b' * 16}-01"
    assert (await running.chat()).status_code == 401
    assert told == {}
    running.client.headers["authorization"] = "Bearer first"
    assert (await running.chat()).status_code == 200
    root = told.pop("POST /v1/chat/completions")
    assert (root["under"], root["http.response.status_code"]) == (sampled, 200)
    (sequence,) = told.values()
    assert sequence["gen_ai.response.finish_reasons"] == ("length",), "a list, by the conventions"


async def test_cors(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), api_key=("secret",))
    preflight: dict[str, Any] = {
        "Origin": "http://app.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = await running.client.options("/v1/chat/completions", headers=preflight)
    assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"
    refused = await running.client.get("/v1/models", headers={"Origin": "http://app.example"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "*"


async def test_a_worker_with_another_tokenizer_gets_no_work(start_gateway: StartGateway, says: Says) -> None:
    odd, same = await says(tokenizer_digest="e" * 64).start(), says(tokenizer_digest=TOKENIZER_DIGEST)
    alone = await start_gateway(redis_url="")
    alone.gateway.nodes.add_static([odd.address])
    await alone.settle(lambda: bool(alone.gateway.nodes.nodes[0].refused))
    for response in (await alone.chat(), await alone.client.get("/health")):
        assert response.status_code == 503
        assert f"{odd.node_id} is refused, since its tokenizer (eeeeeeeeeeee) is not" in response.text
    (node,) = (await alone.client.get("/status")).json()["nodes"]
    assert node["state"] == "refused" and "--model" in node["refused"]
    both = await start_gateway(same)
    both.gateway.nodes.add_static([odd.address])
    await both.settle(lambda: len(both.gateway.nodes.nodes) == 2)
    for _ in range(4):
        assert (await both.chat()).status_code == 200
    assert odd.seen == []
    await odd.stop()


ADMIN = "the key of whoever runs this"


async def test_drain_needs_the_admin_key(start_gateway: StartGateway, says: Says) -> None:
    without = await start_gateway(says())
    off = await without.client.post("/drain", json={"node": "x"})
    assert off.status_code == 404 and "BIPHASE_ADMIN_KEY" in off.json()["error"]["message"]
    running = await start_gateway(says(), admin_key=ADMIN, api_key=("client",))
    (node,) = running.gateway.nodes.nodes
    for header in [{}, {"Authorization": "Bearer client"}, {"Authorization": ADMIN}]:
        answer = await running.client.post("/drain", json={"node": node.node_id}, headers=header)
        assert answer.status_code == 401, header
    assert node.state == "ready" and ADMIN not in answer.text
    header = {"Authorization": f"Bearer {ADMIN}"}
    answer = await running.client.post("/drain", json={"node": "nobody"}, headers=header)
    assert answer.status_code == 404 and "nobody" in answer.json()["error"]["message"]
    for body in ({}, {"node": 3}, {"node": node.node_id, "timeout_seconds": -1}):
        assert (await running.client.post("/drain", json=body, headers=header)).status_code == 400


async def test_drain_of_the_gateway_itself(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), admin_key=ADMIN)
    header = {"Authorization": f"Bearer {ADMIN}"}
    answer = await running.client.post("/drain", json={"node": running.gateway.node_id}, headers=header)
    assert answer.json()["state"] == "draining"
    assert running.gateway.draining
