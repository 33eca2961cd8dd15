"""A peer that freezes is found within seconds, on both sides of a call, without any traffic of our own."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator

import grpc
import pytest

from biphase.rpc.client import ChannelPool
from biphase.rpc.server import RpcServer

pytestmark = [pytest.mark.slow]

SECONDS = 7.0
_SERVER = """
import asyncio, grpc
from biphase.rpc.server import RpcServer

async def tick(request, context):
    while True:
        yield b"x"
        await asyncio.sleep(0.01)

async def main():
    handlers = {"Tick": grpc.unary_stream_rpc_method_handler(tick)}
    generic = grpc.method_handlers_generic_handler("test.T", handlers)
    rpc = await RpcServer.start("127.0.0.1", 0, [lambda server: server.add_generic_rpc_handlers((generic,))])
    print(rpc.address, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
_CLIENT = """
import asyncio, sys
from biphase.rpc.client import ChannelPool

async def main():
    call = ChannelPool().get(sys.argv[1]).unary_stream("/test.T/Tick")(b"")
    while True:
        await call.read()

asyncio.run(main())
"""


async def test_a_frozen_server_fails_the_call() -> None:
    server = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _SERVER, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    channels = ChannelPool()
    try:
        assert server.stdout is not None
        address = (await server.stdout.readline()).decode().strip()
        call = channels.get(address).unary_stream("/test.T/Tick")(b"")
        for _ in range(20):
            await call.read()
        server.send_signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async with asyncio.timeout(4 * SECONDS):
                while True:
                    await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert time.monotonic() - started < SECONDS
    finally:
        server.kill()
        await server.wait()
        await channels.close()


async def test_a_frozen_caller_ends_the_work() -> None:
    begun, ended = asyncio.Event(), asyncio.Event()

    async def tick(request: bytes, context: object) -> AsyncIterator[bytes]:
        try:
            yield b"x"
            begun.set()
            await asyncio.Event().wait()
        finally:
            ended.set()

    handlers = {"Tick": grpc.unary_stream_rpc_method_handler(tick)}
    generic = grpc.method_handlers_generic_handler("test.T", handlers)
    rpc = await RpcServer.start("127.0.0.1", 0, [lambda server: server.add_generic_rpc_handlers((generic,))])
    caller = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _CLIENT, rpc.address, stderr=asyncio.subprocess.DEVNULL
    )
    try:
        await asyncio.wait_for(begun.wait(), 10.0)
        caller.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(2 * SECONDS):
            await ended.wait()
    finally:
        caller.kill()
        await caller.wait()
        await rpc.stop(0.0)
