"""The registry against a real server: time to live, farewell, and every way Redis goes away and comes back."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from redis.asyncio import Redis

from biphase.index.embedded import EmbeddedValkey
from biphase.index.registry import (
    NodeLoad,
    NodeRecord,
    Registry,
    RegistryWatch,
    TransferAddress,
    keep_alive,
    new_incarnation,
)
from biphase.request import NodeId

TTL = 0.6


def node(name: str = "prefill-0", incarnation: str = "one") -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(name),
        role="prefill",
        incarnation=incarnation,
        pid=1,
        address="127.0.0.1:1",
        served_names=("a", "b"),
        load=NodeLoad(num_running=3, prefill_tokens_per_second=10.5),
        transfer=TransferAddress(tcp_address="127.0.0.1:2", transports=("shm", "tcp")),
    )


@pytest.fixture
def registry(index_client: Redis) -> Registry:
    return Registry(index_client, ttl_seconds=TTL)


async def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.02)


def names(nodes: list[NodeRecord]) -> list[str]:
    return [record.node_id for record in nodes]


def test_record_survives_json_and_its_neighbours() -> None:
    assert NodeRecord.from_json(node().to_json()) == node()
    newer = node().to_json()[:-1] + ',"colour":"red"}'
    assert NodeRecord.from_json(newer) == node()
    for bad in ("[]", "{", '{"node_id":"a"}'):
        with pytest.raises(ValueError):
            NodeRecord.from_json(bad)


def test_incarnations_differ_and_sort_by_time() -> None:
    drawn = [new_incarnation() for _ in range(100)]
    assert len(set(drawn)) == 100
    first = new_incarnation()
    time.sleep(0.001)
    assert first < new_incarnation()


async def test_a_node_is_listed_until_its_time_to_live_ends(registry: Registry) -> None:
    assert await registry.list() == []
    assert await registry.heartbeat(node())
    assert await registry.heartbeat(node("decode-0"))
    assert await registry.list() == [node("decode-0"), node()]
    await asyncio.sleep(TTL / 2)
    await registry.heartbeat(node())
    await asyncio.sleep(TTL * 0.7)
    assert names(await registry.list()) == ["prefill-0"]


async def test_leaving_is_at_once_and_only_for_oneself(registry: Registry, index_client: Redis) -> None:
    other = Registry(index_client, ttl_seconds=TTL)
    await registry.heartbeat(node(incarnation="two"))
    await registry.leave(NodeId("prefill-0"), "one")
    assert names(await other.list()) == ["prefill-0"]
    await registry.leave(NodeId("prefill-0"), "two")
    assert await other.list() == []
    await registry.heartbeat(node(incarnation="three"))
    assert [r.incarnation for r in await other.list()] == ["three"]


async def test_clusters_do_not_see_each_other(registry: Registry, index_client: Redis) -> None:
    await registry.heartbeat(node())
    assert await Registry(index_client, "elsewhere").list() == []


async def test_an_unreadable_record_is_skipped(registry: Registry, index_client: Redis) -> None:
    await registry.heartbeat(node())
    await registry.heartbeat(node("decode-0"))
    await index_client.set("biphase:{default}:node:decode-0", b"\xff{")
    assert names(await registry.list()) == ["prefill-0"]


async def test_last_known_nodes_while_redis_is_stopped(registry: Registry, index_server: EmbeddedValkey) -> None:
    await registry.heartbeat(node())
    await registry.list()
    os.kill(index_server.pid, signal.SIGKILL)
    for _ in range(3):
        assert names(await registry.list()) == ["prefill-0"]
        assert not registry.available
        assert not await registry.heartbeat(node())
        assert not await registry.leave(NodeId("prefill-0"), "one")
        await asyncio.sleep(TTL / 2)
    index_server.start()
    # Back and empty: nobody could renew, so nobody is dropped yet; whoever stays silent is, one time to live later.
    await registry.heartbeat(node("decode-0"))
    assert names(await registry.list()) == ["decode-0", "prefill-0"]
    assert registry.available
    await asyncio.sleep(TTL / 2)
    await registry.heartbeat(node("decode-0"))
    await asyncio.sleep(TTL * 0.7)
    assert names(await registry.list()) == ["decode-0"]


async def test_a_quick_restart_that_nobody_noticed_drops_nobody(
    registry: Registry, index_server: EmbeddedValkey
) -> None:
    await registry.heartbeat(node())
    await registry.list()
    index_server.restart()
    assert names(await registry.list()) == ["prefill-0"]


async def test_a_farewell_counts_even_in_a_grace_period(registry: Registry, index_server: EmbeddedValkey) -> None:
    await registry.heartbeat(node())
    await registry.heartbeat(node("decode-0"))
    await registry.list()
    index_server.restart()
    await registry.heartbeat(node())
    await registry.leave(NodeId("prefill-0"), "one")
    assert names(await registry.list()) == ["decode-0"]


async def test_a_paused_redis_delays_no_call_beyond_its_timeout(
    registry: Registry, index_server: EmbeddedValkey
) -> None:
    await registry.heartbeat(node())
    await registry.list()
    os.kill(index_server.pid, signal.SIGSTOP)
    try:
        start = time.monotonic()
        assert names(await registry.list()) == ["prefill-0"]
        assert not await registry.heartbeat(node())
        assert time.monotonic() - start < 2.0
        await asyncio.sleep(1.0)
    finally:
        os.kill(index_server.pid, signal.SIGCONT)
    assert names(await registry.list()) == ["prefill-0"]
    assert registry.available


async def test_heartbeats_and_watch_follow_a_life(registry: Registry, index_client: Redis) -> None:
    watch = RegistryWatch(Registry(index_client, ttl_seconds=TTL), interval_seconds=0.05)
    seen: list[list[str]] = []
    watch.subscribe(lambda nodes: seen.append(names(nodes)))
    watching = asyncio.create_task(watch.run())
    await watch.wait_first()
    assert watch.nodes == []
    record = node()
    beating = asyncio.create_task(keep_alive(registry, lambda: record, interval_seconds=0.1))
    await eventually(lambda: names(watch.nodes) == ["prefill-0"])
    record = replace(record, state="draining")
    await eventually(lambda: watch.nodes[0].state == "draining")
    beating.cancel()
    await eventually(lambda: watch.nodes == [])
    assert ["prefill-0"] in seen
    watching.cancel()
    for task in (beating, watching):
        with pytest.raises(asyncio.CancelledError):
            await task
