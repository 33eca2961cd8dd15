"""Which address a process tells its peers."""

from __future__ import annotations

import socket

import pytest

from biphase.rpc.server import RpcServer, join_address, reachable_host


def test_a_named_address_is_advertised_as_it_is() -> None:
    assert reachable_host("10.1.2.3") == "10.1.2.3"
    assert reachable_host("127.0.0.1") == "127.0.0.1"


@pytest.mark.parametrize(
    "found, expected",
    [
        (["127.0.1.1", "10.89.0.7"], "10.89.0.7"),
        (["127.0.1.1"], "box"),
        (["fe80::1%eth0", "fd00::7"], "fd00::7"),
    ],
)
def test_a_wildcard_is_advertised_as_what_others_can_reach(
    monkeypatch: pytest.MonkeyPatch, found: list[str], expected: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: [(0, 0, 0, "", (address, 0)) for address in found])
    assert reachable_host("0.0.0.0") == expected


def test_a_name_that_does_not_resolve_is_advertised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise socket.gaierror

    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    monkeypatch.setattr(socket, "getaddrinfo", fail)
    assert reachable_host("0.0.0.0") == "box"


def test_ipv6_gets_brackets_once() -> None:
    assert join_address("fd00::7", 1) == "[fd00::7]:1"
    assert join_address("[fd00::7]", 1) == "[fd00::7]:1"
    assert join_address("10.0.0.1", 1) == "10.0.0.1:1"


async def test_listening_everywhere_advertises_a_real_address() -> None:
    rpc = await RpcServer.start("0.0.0.0", 0, [])
    try:
        host, port = rpc.address.rsplit(":", 1)
        assert host not in ("", "0.0.0.0")
        assert int(port) > 0
    finally:
        await rpc.stop(0.0)
