from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest

from biphase.index.embedded import EmbeddedValkey
from biphase.model.source import resolve_model
from biphase.settings import parse_flags
from biphase.tokenizer.loader import LoadedTokenizer, load_tokenizer
from services.gateway.app import build_app
from services.gateway.gateway import Gateway
from services.gateway.server import GatewayServer, make_server, open_socket
from services.gateway.settings import GATEWAY_FLAGS, GatewaySettings
from tests.fakes import FakeDecode

TOKENIZER_DIGEST = "d" * 64
TEXT = " Paris is the capital of France, and it has been so for a very long time."


@pytest.fixture(scope="session")
def gateway_tokenizer() -> LoadedTokenizer:
    return load_tokenizer(resolve_model(""))


@dataclass
class Running:
    """A gateway with its port open, its workers, and a client."""

    gateway: Gateway
    server: GatewayServer
    workers: list[FakeDecode]
    client: httpx.AsyncClient
    port: int

    async def chat(self, **fields: Any) -> httpx.Response:
        body = {"model": "smol", "messages": [{"role": "user", "content": "Say hi"}], "max_tokens": 8} | fields
        return await self.client.post("/v1/chat/completions", json=body)

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "smol", "prompt": "The sky is", "max_tokens": 8} | fields
        return await self.client.post("/v1/completions", json=body)

    async def stream(self, path: str = "/v1/chat/completions", **fields: Any) -> list[dict[str, Any]]:
        """All chunks; asserts that [DONE] ends them."""
        body: dict[str, Any] = {"model": "smol", "max_tokens": 8, "stream": True} | fields
        if "chat" in path:
            body.setdefault("messages", [{"role": "user", "content": "Say hi"}])
        else:
            body.setdefault("prompt", "The sky is")
        async with self.client.stream("POST", path, json=body) as response:
            assert response.status_code == 200, await response.aread()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            raw = (await response.aread()).decode()
        return parse_events(raw)

    async def settle(self, holds: Callable[[], bool], seconds: float = 5.0) -> None:
        """Waits until something holds."""
        for _ in range(int(seconds / 0.01)):
            if holds():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it never came to hold")


def parse_events(raw: str) -> list[dict[str, Any]]:
    parts = raw.split("\n\n")
    assert parts[-1] == "" and parts[-2] == "data: [DONE]", raw[-200:]
    assert all(part.startswith("data: ") for part in parts[:-1])
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def text_of(chunks: Sequence[dict[str, Any]], index: int = 0) -> str:
    text = ""
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            if choice["index"] == index:
                text += (choice["delta"].get("content") or "") if "delta" in choice else choice["text"]
    return text


def finishes(chunks: Sequence[dict[str, Any]]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for chunk in chunks:
        for choice in chunk.get("choices", []):
            if choice["finish_reason"]:
                found.setdefault(choice["index"], []).append(choice["finish_reason"])
    return found


def gateway_settings(**overrides: Any) -> GatewaySettings:
    settings = parse_flags("gateway", "", GATEWAY_FLAGS, GatewaySettings, ["--served-model-name", "smol"], {})
    return replace(settings, port=0, drain_timeout=5.0, **overrides)


@asynccontextmanager
async def running_gateway(
    loaded: LoadedTokenizer, workers: Sequence[FakeDecode] = (), **overrides: Any
) -> AsyncIterator[Running]:
    for worker in workers:
        if not worker.address:
            await worker.start()
    if "redis_url" not in overrides:
        overrides["decode_nodes"] = tuple(worker.address for worker in workers if worker.role == "decode")
        overrides["prefill_nodes"] = tuple(worker.address for worker in workers if worker.role == "prefill")
    settings = gateway_settings(**overrides)
    gateway = Gateway(settings, loaded, settings.served_model_name, "smol", TOKENIZER_DIGEST)
    listener = open_socket("127.0.0.1", 0)
    port = listener.getsockname()[1]
    gateway.address = f"127.0.0.1:{port}"
    server = make_server(build_app(gateway), gateway)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    limits = httpx.Limits(max_connections=500)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30, limits=limits) as client:
        running = Running(gateway, server, list(workers), client, port)
        while not server.started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.005)
        usable = len(overrides.get("decode_nodes", ()))
        usable += len(overrides.get("prefill_nodes", ()))
        await running.settle(
            lambda: len(gateway.nodes.usable("decode")) + len(gateway.nodes.usable("prefill")) == usable
        )
        try:
            yield running
        finally:
            server.should_exit = True
            await client.aclose()
            await serving
            for worker in running.workers:
                await worker.stop()


StartGateway = Callable[..., Awaitable[Running]]


@pytest.fixture
async def start_gateway(gateway_tokenizer: LoadedTokenizer) -> AsyncIterator[StartGateway]:
    """Starts a gateway over fake workers; everything is stopped when the test ends."""
    async with asyncio.timeout(60):
        stack: list[Any] = []

        async def start(*workers: FakeDecode, **overrides: Any) -> Running:
            context = running_gateway(gateway_tokenizer, workers, **overrides)
            stack.append(context)
            return await context.__aenter__()

        yield start
        for context in reversed(stack):
            await context.__aexit__(None, None, None)


@pytest.fixture
def gateway_redis() -> Iterator[EmbeddedValkey]:
    with EmbeddedValkey() as server:
        yield server


@pytest.fixture
def says(gateway_tokenizer: LoadedTokenizer) -> Callable[..., FakeDecode]:
    """A decode worker that says a text, over and over."""

    def make(text: str = TEXT, *, ends: bool = False, **fields: Any) -> FakeDecode:
        token_ids = gateway_tokenizer.tokenizer.encode(text)
        if ends:
            token_ids = [*token_ids, 2]
        return FakeDecode(script=lambda request: token_ids, **fields)

    return make


# Answers of a live vLLM 0.32, as JSON; only the ones that tests compare with.
_GOLDEN = {
    "chat.txt": (
        '{"id":"chatcmpl-a447","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
        '{"role":"assistant","content":"I","refusal":null,"annotations":null,"audio":null,"function_call":null,'
        '"reasoning":null},"logprobs":{"content":[{"token":"I","logprob":-2.3,"bytes":[73],"top_logprobs":[{"token":'
        '"I","logprob":-2.3,"bytes":[73]}]}]},"finish_reason":"length","stop_reason":null,"token_ids":null,'
        '"routed_experts":null}],"service_tier":null,"system_fingerprint":"x","usage":{"prompt_tokens":32,'
        '"total_tokens":36,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":0},'
        '"completion_tokens_details":null},"prompt_logprobs":null,"prompt_token_ids":null,"prompt_text":null,'
        '"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    ),
    "comp.txt": (
        '{"id":"cmpl-98","object":"text_completion","created":1,"model":"m","choices":[{"index":0,"text":"The",'
        '"logprobs":{"text_offset":[0],"token_logprobs":[null],"tokens":["The"],"top_logprobs":[null]},'
        '"finish_reason":"length","stop_reason":null,"token_ids":null,"prompt_logprobs":[null],'
        '"prompt_token_ids":null,"routed_experts":null}],"service_tier":null,"system_fingerprint":"x","usage":'
        '{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":0},'
        '"completion_tokens_details":null},"kv_transfer_params":null,"ec_transfer_params":null,"metrics":null}'
    ),
}


@pytest.fixture
def golden() -> Callable[[str], Any]:
    return lambda name: json.loads(_GOLDEN[name])
