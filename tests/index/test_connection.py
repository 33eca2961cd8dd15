"""Every way to reach Redis, by URL: registry and index work over each of them."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis

from biphase.errors import ConfigError
from biphase.index import connection
from biphase.index.connection import connect, key
from biphase.index.follower import IndexFollower
from biphase.index.publisher import IndexPublisher
from biphase.index.registry import NodeRecord, Registry
from biphase.index.view import IndexView
from biphase.request import BlockHash, NodeId
from services.gateway.key_file import KeyGrant, digest_of
from services.gateway.rate_limits import RateLimitedError, RateLimits
from services.gateway.response_store import ResponseStore, StoredResponse
from tests.index.servers import ServerProcess, redis_binary, self_signed

# The commands that biphase needs, for an ACL.
COMMANDS = (
    "+ping +hello +auth +client|setinfo +select +multi +exec +set +get +getrange +mget +del "
    "+expire +zadd +zrange +zrem +xadd +xread +xrange +xrevrange +hset +hget +hgetall +hdel "
    "+eval +hmget +time +rpush +lrange +pexpire"
)
HASHES = [BlockHash(hashlib.sha256(bytes([n])).digest()) for n in range(5)]
NAMESPACE = b"\x01" * 32

StartServer = Callable[..., ServerProcess]


@pytest.fixture
def start_server(tmp_path: Path) -> Iterator[StartServer]:
    servers: list[ServerProcess] = []

    def start(*lines: str, binary: str | None = None, sentinel: bool = False) -> ServerProcess:
        servers.append(ServerProcess(tmp_path / f"server{len(servers)}", *lines, binary=binary, sentinel=sentinel))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


async def works(url: str) -> None:
    """Uses everything there is of registry and index."""
    client = connect(url)
    registry = Registry(client)
    node = NodeRecord(NodeId("a"), "prefill", "one", 1, "127.0.0.1:1")
    assert await registry.heartbeat(node), "the registry did not get through"
    assert await registry.list() == [node]
    publisher = IndexPublisher(client, "default", NAMESPACE, NodeId("a"), "one", lambda: HASHES[:2], check_seconds=0.05)
    view = IndexView()
    follower = IndexFollower(client, "default", NAMESPACE, view, check_seconds=0.05)
    tasks = [asyncio.create_task(publisher.run()), asyncio.create_task(follower.run())]
    await until(lambda: view.longest_chain(HASHES) == [("a", 2)])
    publisher.on_stored([(block_hash, 0) for block_hash in HASHES])
    await until(lambda: view.longest_chain(HASHES) == [("a", 5)])
    await asyncio.sleep(0.2)
    assert publisher.stats.num_failures == follower.stats.num_failures == 0
    await publisher.close()
    await until(lambda: view.holders() == {})
    assert await registry.leave(NodeId("a"), "one")
    assert await registry.list() == []
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    "url", ["", "localhost", "http://x", "redis+sentinel://h:1", "redis://h:nan", "redis+cluster://"]
)
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(ConfigError, match="--redis-url"):
        connect(url)


def test_keys_share_a_slot() -> None:
    assert key("c", "node", "a") == "biphase:{c}:node:a"


async def test_tcp_and_database(start_server: StartServer) -> None:
    server = start_server("port {port}")
    await works(f"redis://127.0.0.1:{server.port}/3")
    with redis.Redis(port=server.port, db=3) as client:
        assert client.dbsize() > 0


async def test_redis_itself(start_server: StartServer) -> None:
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server here")
    server = start_server("port {port}", binary=binary)
    await works(f"redis://127.0.0.1:{server.port}")


async def test_password(start_server: StartServer) -> None:
    server = start_server("port {port}", "requirepass s3cret")
    await works(f"redis://:s3cret@127.0.0.1:{server.port}")
    client = connect(f"redis://:wrong@127.0.0.1:{server.port}")
    registry = Registry(client)
    assert await registry.list() == [] and not registry.available
    await client.aclose()


async def test_acl_user_with_just_what_is_needed(start_server: StartServer) -> None:
    server = start_server("port {port}", f"user biphase on >pa/ss ~biphase:* {COMMANDS}", "user default off")
    url = f"redis://biphase:pa%2Fss@127.0.0.1:{server.port}"
    await works(url)
    await gateway_works(url)


async def gateway_works(url: str) -> None:
    """Uses everything that gateways do beyond registry and index. What fails there is gone on without."""
    client = connect(url)
    unchecked: list[int] = []
    limits = RateLimits(client, "default", on_failure=lambda: unchecked.append(1))
    grant = KeyGrant(digest_of("key"), requests_per_minute=1, tokens_per_minute=100)
    assert await limits.take(grant, requests=1, tokens=10) is not None
    with pytest.raises(RateLimitedError):
        await limits.take(grant, requests=1)
    await limits.debit(grant, 5)
    assert unchecked == []
    store, other = (ResponseStore(client, "default", seconds=60) for _ in range(2))
    response = StoredResponse({"id": "r", "output": []}, [], [], "me")
    assert await store.put(response) and await other.get("r", "me") == response
    for events, anew in (([b"a\n\n"], False), ([b"b\n\n"], False), ([b"a\n\n", b"b\n\n", b"c\n\n"], True)):
        assert await store.append_events("r", events, anew=anew)
    assert await other.events("r", 1) == [b"b\n\n", b"c\n\n"]
    await store.ask_cancel("r")
    assert await other.is_cancel_asked("r")
    await store.delete("r")
    assert await other.get("r", "me") is None and await other.events("r", 0) == []
    await client.aclose()


def test_the_documented_user_may_do_what_the_tested_one_may() -> None:
    text = (Path(__file__).parents[2] / "docs" / "redis.md").read_text()
    documented = text.partition("~biphase:* ")[2].partition("\n\n")[0]
    assert documented.split() == COMMANDS.split()


@pytest.mark.parametrize("missing", ["eval", "hmget", "rpush"])
async def test_what_the_user_may_not_do_is_told_by_name_and_once(
    start_server: StartServer, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    told: list[str] = []
    monkeypatch.setattr(connection, "_refusals", set())
    monkeypatch.setattr(connection.log, "error", lambda event, **fields: told.append(f"{event} {fields['error']}"))
    commands = COMMANDS.replace(f"+{missing} ", "")
    server = start_server("port {port}", f"user biphase on >pass ~biphase:* {commands}", "user default off")
    client = connect(f"redis://biphase:pass@127.0.0.1:{server.port}")
    grant = KeyGrant(digest_of("key"), requests_per_minute=10)
    for _ in range(2):
        await RateLimits(client, "default").take(grant, requests=1)
        await ResponseStore(client, "default", seconds=60).append_events("r", [b"a\n\n"])
    assert len(told) == 1 and "redis_permission_missing" in told[0] and missing in told[0], told
    await client.aclose()


async def test_tls(start_server: StartServer, tmp_path: Path) -> None:
    binary = redis_binary()
    if binary is None or shutil.which("openssl") is None:
        pytest.skip("no redis-server with TLS here")
    certificate, private = self_signed(tmp_path)
    server = start_server(
        "port 0", "tls-port {port}", f"tls-cert-file {certificate}", f"tls-key-file {private}",
        f"tls-ca-cert-file {certificate}", "tls-auth-clients no", "requirepass s3cret", binary=binary,
    )  # fmt: skip
    await works(f"rediss://:s3cret@127.0.0.1:{server.port}?ssl_ca_certs={certificate}")


async def test_sentinel(start_server: StartServer) -> None:
    server = start_server("port {port}", "requirepass s3cret")
    sentinel = start_server(
        "port {port}",
        f"sentinel monitor main 127.0.0.1 {server.port} 1",
        "sentinel auth-pass main s3cret",
        sentinel=True,
    )
    await works(f"redis+sentinel://:s3cret@127.0.0.1:{sentinel.port}/main")


async def test_cluster(start_server: StartServer) -> None:
    server = start_server("port {port}", "cluster-enabled yes")
    with redis.Redis(port=server.port) as client:
        client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        await until(lambda: b"cluster_state:ok" in raw(client))
    await works(f"redis+cluster://127.0.0.1:{server.port}")


async def test_cluster_of_three(start_server: StartServer) -> None:
    """The URL names a node that has none of the keys: they are found where they are, and after a move as well."""
    servers = [start_server("port {port}", "cluster-enabled yes", "cluster-node-timeout 2000") for _ in range(3)]
    clients = [redis.Redis(port=server.port) for server in servers]
    slot = int(clients[0].execute_command("CLUSTER KEYSLOT", "{default}"))
    others = [(0, slot - 1), (slot + 1, 16383)]
    clients[1].execute_command("CLUSTER ADDSLOTSRANGE", slot, slot)
    for client, (first, last) in zip((clients[0], clients[2]), others, strict=True):
        client.execute_command("CLUSTER ADDSLOTSRANGE", first, last)
    for server in servers[1:]:
        clients[0].execute_command("CLUSTER MEET", "127.0.0.1", server.port)
    for client in clients:
        await until(lambda client=client: b"cluster_state:ok" in raw(client))  # type: ignore[misc]
    url = f"redis+cluster://127.0.0.1:{servers[0].port}"
    await works(url)
    assert clients[1].dbsize() > 0 and clients[0].dbsize() == clients[2].dbsize() == 0
    # The slot goes to another node, as when a cluster is balanced anew.
    clients[1].flushall()
    new_owner = clients[2].execute_command("CLUSTER MYID")
    for client in (clients[2], clients[1], clients[0]):
        client.execute_command("CLUSTER SETSLOT", slot, "NODE", new_owner)
    await works(url)
    assert clients[2].dbsize() > 0 and clients[1].dbsize() == 0
    for client in clients:
        client.close()


def raw(client: redis.Redis) -> bytes:
    answer = client.execute_command("CLUSTER INFO")
    return answer if isinstance(answer, bytes) else b"cluster_state:" + str(answer.get("cluster_state")).encode()
