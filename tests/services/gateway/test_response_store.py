"""Events of background responses over a Redis that comes and goes; and the one end that a response has."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from biphase.index.connection import connect
from services.gateway.response_events import EventLog
from services.gateway.response_store import ResponseStore, StoredResponse
from tests.fakes import FakeDecode
from tests.index.servers import ServerProcess
from tests.services.gateway.conftest import Running, StartGateway

Says = Callable[..., FakeDecode]

EVENTS = [f"event: e\ndata: {number}\n\n".encode() for number in range(9)]


async def test_events_are_whole_once_redis_is_back(tmp_path: Path) -> None:
    server = ServerProcess(tmp_path / "server", "port {port}")
    client = connect(f"redis://127.0.0.1:{server.port}")
    try:
        store, other = (ResponseStore(client, "events", seconds=60) for _ in range(2))
        told = EventLog(store, "r")
        told.append(EVENTS[0])
        await told.flush()
        with_redis = Redis(port=server.port)
        await with_redis.config_set("maxmemory", 1)
        told.append(EVENTS[1] + EVENTS[2])
        await told.flush()
        await told.flush()
        assert await other.events("r", 0) == EVENTS[:1] == await store.events("r", 0), "nothing stands before Redis"
        await with_redis.config_set("maxmemory", 0)
        told.append(EVENTS[3])
        await told.flush()
        told.append(EVENTS[4])
        await asyncio.gather(told.flush(), told.flush(), told.flush())
        assert await store.events("r", 0) == EVENTS[:5] == await other.events("r", 0)
        assert 0 < await with_redis.pttl(store._key("r:events")) <= 60_000
        # An attempt that is cut short may have been carried out, or not.
        told.append(EVENTS[5])
        cut = asyncio.create_task(told.flush())
        for _ in range(3):
            await asyncio.sleep(0)
        cut.cancel()
        await asyncio.gather(cut, return_exceptions=True)
        await told.flush()
        assert await other.events("r", 4) == EVENTS[4:6]
        # Away until the end: here all of them are, from the first on.
        await with_redis.config_set("maxmemory", 1)
        told.append(EVENTS[6] + EVENTS[7])
        await told.flush()
        told.append(EVENTS[8])
        await told.flush(is_last=True)
        assert await store.events("r", 0) == EVENTS and await store.events("r", 7) == EVENTS[7:]
        assert await other.events("r", 0) == EVENTS[:6]
        await with_redis.aclose()
    finally:
        await client.aclose()
        server.stop()


async def test_without_redis_events_are_here_for_their_time() -> None:
    now = [0.0]
    store = ResponseStore(None, "events", seconds=60, clock=lambda: now[0])
    told = EventLog(store, "r")
    for event in EVENTS:
        told.append(event)
        await told.flush()
    assert await store.events("r", 0) == EVENTS
    now[0] = 61.0
    assert await store.events("r", 0) == []


async def begun(running: Running, stream: bool, num_tokens: int = 8) -> str:
    """The id of a response that runs in the background."""
    body = {"model": "smol", "input": "Say hi", "max_output_tokens": num_tokens, "background": True, "stream": stream}
    asking = asyncio.create_task(running.client.post("/v1/responses", json=body))
    await running.settle(lambda: bool(running.gateway.background.running_ids))
    (response_id,) = running.gateway.background.running_ids
    if not stream:
        await asking
    return response_id


async def ended(running: Running, response_id: str) -> dict[str, Any]:
    await running.settle(lambda: not running.gateway.background.running_ids)
    return dict((await running.client.get(f"/v1/responses/{response_id}")).json())


@pytest.mark.parametrize("stream", [False, True])
async def test_what_ended_while_somebody_asked_to_cancel_it_has_ended(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr("services.gateway.responding._CANCEL_POLL_SECONDS", 0.01)
    running = await start_gateway(says(delay_seconds=0.01))
    num_asked = 0

    async def asked_as_it_ends(_: str) -> bool:
        nonlocal num_asked
        num_asked += 1
        await running.settle(lambda: running.gateway.recorder.totals.num_finished == 1)
        await asyncio.sleep(0.02)
        return True

    monkeypatch.setattr(running.gateway.responses, "is_cancel_asked", asked_as_it_ends)
    response = await ended(running, await begun(running, stream))
    assert (response["status"], response["usage"]["output_tokens"], num_asked) == ("incomplete", 8, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_that_is_being_stored_is_not_cut_short(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    running = await start_gateway(says())
    put, storing, release = ResponseStore.put, asyncio.Event(), asyncio.Event()

    async def slow(store: ResponseStore, record: StoredResponse) -> bool:
        if record.response["status"] != "in_progress":
            storing.set()
            await release.wait()
        return await put(store, record)

    monkeypatch.setattr(ResponseStore, "put", slow)
    response_id = await begun(running, stream)
    await storing.wait()
    closing = asyncio.create_task(running.gateway.background.close())
    await asyncio.sleep(0.02)
    release.set()
    await closing
    assert (await ended(running, response_id))["status"] == "incomplete"
    if stream:
        last = (await running.gateway.responses.events(response_id, 0))[-1]
        assert last.startswith(b"event: response.incomplete")


async def test_what_runs_at_the_shutdown_has_failed(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(delay_seconds=0.05))
    response_id = await begun(running, stream=False, num_tokens=1000)
    await running.settle(lambda: running.workers[0].num_running == 1)
    await running.gateway.background.close()
    response = await ended(running, response_id)
    assert response["status"] == "failed" and "shut down" in response["error"]["message"]
