"""Events of background responses over a Redis that comes and goes; and the one end that a response has."""

from __future__ import annotations

import asyncio
from pathlib import Path

from redis.asyncio import Redis

from biphase.index.connection import connect
from services.gateway.response_events import EventLog
from services.gateway.response_store import ResponseStore
from tests.index.servers import ServerProcess

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
