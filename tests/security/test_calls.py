"""gRPC from the attacker's side: whoever has no token or no certificate gets nothing, by name, and hurts nobody."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from biphase.errors import UnavailableError
from biphase.rpc import probe
from biphase.rpc.client import ChannelPool
from biphase.rpc.errors import from_rpc_error
from biphase.rpc.node import NodeServicer
from biphase.rpc.server import RpcServer
from biphase.rpc.tls import Tls
from biphase.rpc.token import PROOF_METADATA_KEY, ServiceToken
from biphase.rpc.trust import OPEN, Trust
from biphase.rpc.v1 import node_pb2, node_pb2_grpc
from tests.security.authority import Authority
from tests.security.conftest import TOKEN

SECRET = "what only members may read"
GET_INFO = "/biphase.rpc.v1.Node/GetInfo"


class Member:
    """A process of the cluster, and how many calls reached its servicer."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self.num_calls = 0

    def info(self) -> node_pb2.NodeInfo:
        self.num_calls += 1
        return node_pb2.NodeInfo(node_id=SECRET)

    async def start(self) -> None:
        node = NodeServicer(self.info, node_pb2.NodeStatus, lambda _: None, lambda: True)
        self.rpc = await RpcServer.start(
            "127.0.0.1",
            0,
            [lambda server: node_pb2_grpc.add_NodeServicer_to_server(node, server)],
            trust=self.trust,
        )
        await self.rpc.set_serving(True)

    @property
    def address(self) -> str:
        return self.rpc.address

    async def assert_serves(self) -> None:
        """A member is answered, whatever went before."""
        channels = ChannelPool(self.trust)
        try:
            stub: Any = node_pb2_grpc.NodeStub(channels.get(self.address))
            answer = await stub.GetInfo(node_pb2.GetInfoRequest(), timeout=10, wait_for_ready=True)
            assert answer.node_id == SECRET
        finally:
            await channels.close()


@contextlib.asynccontextmanager
async def running(trust: Trust) -> AsyncIterator[Member]:
    member = Member(trust)
    await member.start()
    try:
        yield member
    finally:
        await member.rpc.stop(0.0)


async def refused(member: Member, trust: Trust, *, metadata: Any = None) -> grpc.aio.AioRpcError:
    """What a stranger is told who calls GetInfo; that it is refused, learns nothing, and everybody else goes on."""
    calls, channels = member.num_calls, ChannelPool(trust)
    try:
        stub: Any = node_pb2_grpc.NodeStub(channels.get(member.address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(node_pb2.GetInfoRequest(), timeout=5, metadata=metadata)
    finally:
        await channels.close()
    assert SECRET not in str(caught.value.details()) and TOKEN not in str(caught.value.details())
    assert member.num_calls == calls
    await member.assert_serves()
    return caught.value


# ---- the token


async def test_no_token(token: ServiceToken) -> None:
    async with running(Trust(token)) as member:
        error = await refused(member, OPEN)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "no proof" in error.details() and "--service-token" in error.details()
        # To whoever asked the caller for something, this is not their own key that is wrong.
        assert isinstance(from_rpc_error(error, "prefill-0"), UnavailableError)


async def test_a_wrong_token(token: ServiceToken) -> None:
    async with running(Trust(token)) as member:
        error = await refused(member, Trust(ServiceToken("the token of another cluster")))
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED and "false" in error.details()


async def test_the_token_itself_is_no_proof(token: ServiceToken) -> None:
    async with running(Trust(token)) as member:
        for metadata in [(("authorization", f"Bearer {TOKEN}"),), ((PROOF_METADATA_KEY, TOKEN),)]:
            error = await refused(member, OPEN, metadata=metadata)
            assert error.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_proof_that_was_overheard(token: ServiceToken) -> None:
    async with running(Trust(token)) as member:
        proof = ((PROOF_METADATA_KEY, token.prove_call(GET_INFO)),)
        async with grpc.aio.insecure_channel(member.address) as channel:
            stub: Any = node_pb2_grpc.NodeStub(channel)
            assert (await stub.GetInfo(node_pb2.GetInfoRequest(), metadata=proof)).node_id == SECRET
        assert "used before" in (await refused(member, OPEN, metadata=proof)).details()
        other = ((PROOF_METADATA_KEY, token.prove_call("/biphase.rpc.v1.Node/GetStatus")),)
        assert "false" in (await refused(member, OPEN, metadata=other)).details()


async def test_every_method_is_guarded(token: ServiceToken) -> None:
    """Health checks, streams and methods that do not exist: none tells more than that it is closed."""
    async with running(Trust(token)) as member, grpc.aio.insecure_channel(member.address) as channel:
        for method in ("/grpc.health.v1.Health/Check", "/biphase.rpc.v1.Node/Drain", "/no.Such/Method", "/x"):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(method)(b"", timeout=5)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, method
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=5):
                pass
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await member.assert_serves()


async def test_the_probe_takes_the_token_from_the_environment(
    token: ServiceToken, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(Trust(token)) as member:
        assert await asyncio.to_thread(probe.main, [member.address]) == 2
        assert "--service-token" in capsys.readouterr().err
        monkeypatch.setenv("BIPHASE_SERVICE_TOKEN", TOKEN)
        assert await asyncio.to_thread(probe.main, [member.address]) == 0
        monkeypatch.setenv("BIPHASE_SERVICE_TOKEN", "short")
        assert await asyncio.to_thread(probe.main, [member.address]) == 2


_STRANGER = """
import asyncio, grpc, sys

async def main():
    options = (("grpc.max_send_message_length", -1),)
    async with grpc.aio.insecure_channel(sys.argv[1], options=options) as channel:
        call = channel.unary_unary(sys.argv[2])
        message = bytes(48 * 2**20)
        for outcome in await asyncio.gather(*(call(message, timeout=30) for _ in range(8)), return_exceptions=True):
            print(outcome.code().name)

asyncio.run(main())
"""


async def test_messages_of_strangers_are_not_kept(token: ServiceToken) -> None:
    """Tens of megabytes in each of many calls without a proof: refused before they are read."""
    async with running(Trust(token)) as member:
        before = psutil.Process().memory_info().rss
        stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _STRANGER, member.address, GET_INFO, stdout=asyncio.subprocess.PIPE
        )
        assert stranger.stdout is not None
        most = before
        lines = []
        while line := await stranger.stdout.readline():
            lines.append(line.decode().strip())
            most = max(most, psutil.Process().memory_info().rss)
        await stranger.wait()
        assert lines == ["UNAUTHENTICATED"] * 8
        assert most - before < 128 * 2**20
        await member.assert_serves()


async def test_nonsense_from_a_member(token: ServiceToken) -> None:
    """Malformed and oversized messages, with a good proof."""
    async with running(Trust(token)) as member, grpc.aio.insecure_channel(member.address) as channel:
        call = channel.unary_unary(GET_INFO)
        for message, code in [
            (b"\xff" * 64, grpc.StatusCode.UNKNOWN),
            (bytes(65 * 2**20), grpc.StatusCode.RESOURCE_EXHAUSTED),
        ]:
            proof = ((PROOF_METADATA_KEY, token.prove_call(GET_INFO)),)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, metadata=proof, timeout=20)
            assert caught.value.code() is code
        await member.assert_serves()


async def test_those_who_say_nothing_keep_nobody_out(token: ServiceToken) -> None:
    async with running(Trust(token)) as member:
        host, _, port = member.address.rpartition(":")
        silent = []
        try:
            for position in range(200):
                silent.append(socket.create_connection((host, int(port)), timeout=5))
                if position % 2:
                    silent[-1].sendall(b"PRI * HTTP/2.0\r\n\r\nSM")
            await member.assert_serves()
        finally:
            for connection in silent:
                connection.close()


# ---- certificates


async def test_members_with_certificates(tls: Tls, token: ServiceToken, authority: Authority) -> None:
    async with running(Trust(token, tls)) as member:
        await member.assert_serves()
        # Another process's own certificate.
        other = Trust(token, authority.issue("other").tls(authority.ca))
        channels = ChannelPool(other)
        stub: Any = node_pb2_grpc.NodeStub(channels.get(member.address))
        assert (await stub.GetInfo(node_pb2.GetInfoRequest(), timeout=5)).node_id == SECRET
        await channels.close()


async def test_plain_text_against_tls(tls: Tls, token: ServiceToken) -> None:
    async with running(Trust(token, tls)) as member:
        assert (await refused(member, Trust(token))).code() is grpc.StatusCode.UNAVAILABLE


async def test_no_client_certificate(tls: Tls) -> None:
    async with running(Trust(None, tls)) as member:
        credentials = grpc.ssl_channel_credentials(tls.ca)
        async with grpc.aio.secure_channel(member.address, credentials, options=tls.channel_options()) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await member.assert_serves()


async def test_a_client_certificate_of_another_authority(tls: Tls, authority: Authority, strangers: Authority) -> None:
    async with running(Trust(None, tls)) as member:
        stranger = strangers.issue("stranger").tls(authority.ca)
        assert (await refused(member, Trust(None, stranger))).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("kind", ["another authority", "another name"])
async def test_a_false_server(
    tls: Tls, token: ServiceToken, authority: Authority, strangers: Authority, kind: str
) -> None:
    """Somebody entered himself in the registry: members do not talk to him."""
    if kind == "another authority":
        false = strangers.issue("false").tls(strangers.ca)
    else:
        false = authority.issue("elsewhere", "DNS:elsewhere").tls(authority.ca)
    heard = Member(Trust(None, false))
    await heard.start()
    channels = ChannelPool(Trust(token, tls))
    try:
        stub: Any = node_pb2_grpc.NodeStub(channels.get(heard.address))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetInfo(node_pb2.GetInfoRequest(), timeout=5)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert heard.num_calls == 0
    finally:
        await channels.close()
        await heard.rpc.stop(0.0)
