"""The probe's exit codes are what container and cluster health checks go by."""

from __future__ import annotations

import asyncio

import pytest

from biphase.errors import InternalError
from biphase.rpc import probe
from biphase.rpc.node import NodeServicer
from biphase.rpc.server import RpcServer
from biphase.rpc.v1 import node_pb2, node_pb2_grpc


async def test_exit_code_follows_health(capsys: pytest.CaptureFixture[str]) -> None:
    rpc = await RpcServer.start("127.0.0.1", 0, [])
    try:
        assert await asyncio.to_thread(probe.main, [rpc.address]) == 1
        assert "not serving" in capsys.readouterr().err
        await rpc.set_serving(True)
        assert await asyncio.to_thread(probe.main, [rpc.address]) == 0
    finally:
        await rpc.stop(0.0)
    assert await asyncio.to_thread(probe.main, [rpc.address, "--timeout", "1"]) == 2
    assert rpc.address in capsys.readouterr().err


async def test_drain_waits_until_the_process_is_gone() -> None:
    asked: list[float | None] = []
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()

    def request_stop(seconds: float | None) -> None:
        asked.append(seconds)
        loop.call_later(0.3, stopped.set)

    node = NodeServicer(node_pb2.NodeInfo, node_pb2.NodeStatus, request_stop, lambda: True)
    rpc = await RpcServer.start("127.0.0.1", 0, [lambda server: node_pb2_grpc.add_NodeServicer_to_server(node, server)])
    drained = asyncio.create_task(asyncio.to_thread(probe.main, [rpc.address, "--drain", "--timeout", "20"]))
    await stopped.wait()
    assert not drained.done()
    await rpc.stop(0.0)
    assert await asyncio.wait_for(drained, 5.0) == 0
    assert asked == [20.0]


async def test_drain_takes_no_failure_for_the_end() -> None:
    asked: list[int] = []

    def info() -> node_pb2.NodeInfo:
        asked.append(len(asked))
        raise InternalError("busy")

    node = NodeServicer(info, node_pb2.NodeStatus, lambda _: None, lambda: True)
    rpc = await RpcServer.start("127.0.0.1", 0, [lambda server: node_pb2_grpc.add_NodeServicer_to_server(node, server)])
    drained = asyncio.create_task(asyncio.to_thread(probe.main, [rpc.address, "--drain", "--timeout", "20"]))
    while len(asked) < 3:
        await asyncio.sleep(0.05)
        assert not drained.done()
    await rpc.stop(0.0)
    assert await asyncio.wait_for(drained, 5.0) == 0
