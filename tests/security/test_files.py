"""Which files are opened is decided by flags at start: no request, registry entry or peer's word has a say in it.

Every file that this process opens is noted by an audit hook while a gateway, with real routes and a real Redis, is told
names of files wherever it can be told anything.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from biphase.index.connection import connect, key
from biphase.index.embedded import EmbeddedValkey
from biphase.index.registry import NodeRecord
from biphase.model.source import resolve_model
from biphase.tokenizer.loader import load_tokenizer
from tests.fakes import BLOCK_SIZE, NAMESPACE, FakeDecode
from tests.services.gateway.conftest import Running, running_gateway

SECRET = "what stands in the file and nowhere else"
_watched: list[str] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if _watched is not None and event in ("open", "os.listdir", "os.scandir", "os.rename", "os.remove", "os.mkdir"):
        _watched.append(str(arguments[0]))


sys.addaudithook(_hook)


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Paths that are opened during the test."""
    global _watched
    _watched = []
    yield _watched
    _watched = None


@pytest.fixture
def target(tmp_path: Path) -> str:
    path = tmp_path / "the-target"
    path.write_text(SECRET)
    return str(path)


@asynccontextmanager
async def gateway(**overrides: Any) -> AsyncIterator[Running]:
    loaded = load_tokenizer(resolve_model(""))
    token_ids = loaded.tokenizer.encode(" Paris, of course.")
    async with running_gateway(loaded, [FakeDecode(script=lambda request: token_ids)], **overrides) as running:
        yield running


def requests(name: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Method, path and body of requests that say a file's name in every place where a client says something."""
    messages = [{"role": "user", "content": "hi"}]
    for form in (f"file://{name}", f"../../../../../..{name}"):
        schema = {"$ref": f"file://{name}"}
        chat = [
            {"model": form},
            {"messages": [{"role": "user", "content": form, "name": form}]},
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": form}}]}]},
            {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_id": form}}]}]},
            {"messages": [{"role": form, "content": "hi"}]},
            {"chat_template": f"{{% include '{form}' %}}"},
            {"chat_template": form},
            {"chat_template_kwargs": {"tools": form, "path": form}},
            {"documents": [{"title": form, "text": form}]},
            {"cache_salt": form},
            {"user": form},
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}},
            {"structured_outputs": {"json": schema}},
            {"structured_outputs": {"grammar": f'start: "a"\n%import {form}'}},
            {"structured_outputs": {"regex": form}},
            {"structured_outputs": {"structural_tag": form}},
            {"kv_transfer_params": {"remote_host": form, "path": form}},
            {"lora_request": {"lora_path": form}},
        ]
        yield from (("POST", "/v1/chat/completions", {"model": "smol", "messages": messages} | body) for body in chat)
        yield "POST", "/v1/completions", {"model": "smol", "prompt": form, "suffix": form}
        for body in ({"previous_response_id": form}, {"input": form}, {"instructions": form, "input": "x"}):
            yield "POST", "/v1/responses", {"model": "smol", "input": "hi"} | body
        yield "POST", "/tokenize", {"model": form, "prompt": form}
        yield "POST", "/drain", {"node": form}
        for path in ("/v1/responses", "/v1/models", "/ui", "/status"):
            yield "GET", path + "/" + form.replace("/", "%2f"), {}
            yield "GET", f"{path}/../../../../../..{name}", {}


async def test_no_request_opens_a_file_it_names(target: str, opened: list[str]) -> None:
    async with gateway(max_logprobs=5) as running:
        # What is loaded once is loaded.
        assert (await running.chat()).status_code == 200
        del opened[:]
        statuses = set()
        for method, path, body in requests(target):
            headers = {"X-Request-Id": target, "Authorization": f"Bearer {target}"}
            answer = await running.client.request(method, path, json=body or None, headers=headers)
            assert answer.status_code < 500 or answer.status_code == 501, (path, body, answer.text)
            assert SECRET not in answer.text
            statuses.add(answer.status_code)
        assert {200, 400, 404} <= statuses
        assert (await running.chat()).status_code == 200
    assert not [path for path in opened if "the-target" in path]


def hostile_records(name: str, worker: FakeDecode) -> Iterator[str]:
    good = json.loads(
        NodeRecord("n", "decode", "i", 1, worker.address, namespace=NAMESPACE.hex(), block_size=BLOCK_SIZE).to_json()  # type: ignore[arg-type]
    )
    for address in (
        f"unix:{name}",
        f"unix://{name}",
        name,
        "unix-abstract:x",
        "dns:///x:1",
        "127.0.0.1:1/../x",
        "a b:1",
    ):
        yield json.dumps(good | {"node_id": "address", "address": address})
    for field in good:
        for value in (name, 5, None, [], {}, [name], {name: name}, "x" * 100_000):
            yield json.dumps(good | {"node_id": f"x-{field}", field: value})
    for field in good["transfer"]:
        yield json.dumps(good | {"node_id": "transfer", "transfer": good["transfer"] | {field: name}})
    yield from ("", "null", "5", "[]", "{", "[" * 100_000, '{"node_id": 5}', "\x00\xff")


async def test_no_registry_entry_opens_a_file_or_ends_the_watch(target: str, opened: list[str]) -> None:
    with EmbeddedValkey() as server:
        worker = await FakeDecode(script=lambda request: [260]).start()
        redis = connect(server.url)
        async with gateway(redis_url=server.url, cluster="files") as running:
            running.workers.append(worker)
            del opened[:]
            for number, text in enumerate(hostile_records(target, worker)):
                name = f"hostile-{number}"
                await redis.set(key("files", "node", name), text, px=60_000)
                await redis.zadd(key("files", "nodes"), {name: 1e12})
            await asyncio.sleep(1.5)
            good = NodeRecord(worker.node_id, "decode", worker.incarnation, 1, worker.address)  # type: ignore[arg-type]
            await redis.set(key("files", "node", worker.node_id), good.to_json(), px=60_000)
            await redis.zadd(key("files", "nodes"), {worker.node_id: 1e12})
            await running.settle(lambda: bool(running.gateway.nodes.usable("decode")), 10.0)
            assert (await running.chat(max_tokens=2)).status_code == 200
            addresses = [node.address for node in running.gateway.nodes.nodes]
            assert not [address for address in addresses if "/" in address or "unix" in address]
        await redis.aclose()
    assert not [path for path in opened if "the-target" in path]
