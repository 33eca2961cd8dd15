"""A Redis that asks for a password, a user or TLS: without it nothing is read or written, and the log says why without
saying the secret. (That it works with them is tests/index/test_connection.py's.)"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from biphase.index.connection import connect
from biphase.index.registry import NodeRecord, Registry
from biphase.request import NodeId
from tests.index.servers import ServerProcess, redis_binary, self_signed

PASSWORD = "a-password-of-redis"
WRONG = "a-wrong-password"
RECORD = NodeRecord(NodeId("a"), "prefill", "one", 1, "127.0.0.1:1")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., ServerProcess]]:
    servers: list[ServerProcess] = []

    def start(*lines: str, binary: str | None = None) -> ServerProcess:
        servers.append(ServerProcess(tmp_path / "server", *lines, binary=binary))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


async def refused(url: str, caplog: pytest.LogCaptureFixture) -> str:
    """What the log says of it."""
    client = connect(url, timeout_seconds=1.0)
    registry = Registry(client)
    try:
        assert not await registry.heartbeat(RECORD)
        assert not registry.available and await registry.list() == []
    finally:
        await client.aclose()
    (said,) = [str(r.event_fields) for r in caplog.records if r.getMessage() == "registry_unavailable"]  # type: ignore[attr-defined]
    assert PASSWORD not in caplog.text + said and WRONG not in caplog.text + said
    caplog.clear()
    return said


async def test_password_and_user(start: Callable[..., ServerProcess], caplog: pytest.LogCaptureFixture) -> None:
    port = start("port {port}", f"requirepass {PASSWORD}", f"user limited on >{PASSWORD} ~biphase:* +ping +get").port
    assert "authenticate" in await refused(f"redis://127.0.0.1:{port}", caplog)
    assert "WRONGPASS" in await refused(f"redis://:{WRONG}@127.0.0.1:{port}", caplog) or caplog.text == ""
    assert "permission" in await refused(f"redis://limited:{PASSWORD}@127.0.0.1:{port}", caplog)
    client = connect(f"redis://:{PASSWORD}@127.0.0.1:{port}")
    assert await Registry(client).heartbeat(RECORD)
    await client.aclose()


async def test_tls(start: Callable[..., ServerProcess], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    binary = redis_binary()
    if binary is None:
        pytest.skip("no redis-server with TLS here")
    certificate, key = self_signed(tmp_path)
    port = start(
        "port 0",
        "tls-port {port}",
        f"tls-cert-file {certificate}",
        f"tls-key-file {key}",
        "tls-auth-clients no",
        binary=binary,
    ).port
    # Nobody vouches for the certificate.
    assert "certificate" in (await refused(f"rediss://127.0.0.1:{port}", caplog)).lower()
    await refused(f"redis://127.0.0.1:{port}", caplog)
    client = connect(f"rediss://127.0.0.1:{port}?ssl_ca_certs={certificate}")
    assert await Registry(client).heartbeat(RECORD)
    await client.aclose()
