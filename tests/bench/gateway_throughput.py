"""The gateway's own cost, alone with a worker that computes nothing: tokens per second, and the latency it adds.

    python -m tests.bench.gateway_throughput [--streams 256] [--tokens 400] [--kind chat]

Throughput: many streams as fast as they go. Printed per second of wall clock, where gateway, worker and clients share
the machine, and per second of the gateway's own CPU time, which is what it does with a core to itself.

Added latency: 32 streams at a worker's pace. Every 20 ms it has one token for each stream, as an engine's step does. A
token's latency is from that moment to its arrival at the client. The same is measured by a client that calls the
worker directly over gRPC; the difference is what the gateway adds, its HTTP and the client's reading of it included.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import uvloop

from biphase.rpc.server import RpcServer
from biphase.rpc.v1 import decode_pb2, decode_pb2_grpc, node_pb2_grpc
from tests.fakes import FakeDecode, _Node, free_port

_ROOT = Path(__file__).resolve().parents[2]
_SAID = [504, 355, 1343, 282, 260]
_STEP_SECONDS = 0.02


class SteppingDecode(decode_pb2_grpc.DecodeServicer):
    """One token for every call at each step; without a pace, as fast as they are taken."""

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._step = asyncio.Event()
        # Monotonic time of each step, and by request that of the steps of its tokens.
        self._now = 0.0
        self.times: dict[str, list[float]] = {}

    async def run(self) -> None:
        due = time.monotonic()
        while self._step_seconds:
            due += self._step_seconds
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            self._now = time.monotonic()
            self._step.set()
            self._step = asyncio.Event()

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        times = self.times.setdefault(request.request_id, [])
        for place in range(request.sampling.max_tokens):
            if self._step_seconds:
                await self._step.wait()
                times.append(self._now)
            yield decode_pb2.GenerateResponse(token_ids=[_SAID[place % len(_SAID)]])
        yield decode_pb2.GenerateResponse(finish=decode_pb2.Finish(reason="length"))


async def _work(port: int, step_seconds: float) -> None:
    """The worker's process. Prints its times when its input ends."""
    info = FakeDecode(script=lambda request: _SAID, max_model_len=100_000, max_num_seqs=10_000)
    info.incarnation = "bench"
    info.address = f"127.0.0.1:{port}"
    worker = SteppingDecode(step_seconds)
    server = await RpcServer.start(
        "127.0.0.1",
        port,
        [
            lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(worker, server),
            lambda server: node_pb2_grpc.add_NodeServicer_to_server(_Node(info), server),
        ],
    )
    steps = asyncio.create_task(worker.run())
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    steps.cancel()
    print(json.dumps(worker.times))
    await server.stop(0)


class Stack:
    """A worker and a gateway, each a process."""

    def __init__(self, step_seconds: float) -> None:
        self.worker_port, self.port = free_port(), free_port()
        flags = ["--port", str(self.port), "--decode-nodes", f"127.0.0.1:{self.worker_port}", "--max-queue", "10000"]
        self._worker = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.bench.gateway_throughput",
                "--worker",
                str(self.worker_port),
                str(step_seconds),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_ROOT,
        )
        self.gateway = subprocess.Popen(
            [sys.executable, "-m", "services.gateway", *flags, "--log-level", "warning"], cwd=_ROOT
        )

    def worker_times(self) -> dict[str, list[float]]:
        """Ends the worker. By request, when it had each token."""
        told: dict[str, list[float]] = json.loads(self._worker.communicate()[0])
        return {name.removesuffix("-0"): times for name, times in told.items()}

    def close(self) -> None:
        for process in (self.gateway, self._worker):
            process.kill()
            process.wait()


@contextmanager
def running(step_seconds: float) -> Iterator[Stack]:
    stack = Stack(step_seconds)
    try:
        yield stack
    finally:
        stack.close()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _request(kind: str, tokens: int) -> bytes:
    fields: dict[str, object] = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    path = "/v1/completions"
    if kind == "chat":
        path = "/v1/chat/completions"
        fields["messages"] = [{"role": "user", "content": "hi"}]
    else:
        fields["prompt"] = "hi"
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


async def stream(port: int, kind: str, tokens: int) -> tuple[str, list[float]]:
    """Reads one stream. Returns the answer's id and the arrival of each token."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_request(kind, tokens))
    arrivals: list[float] = []
    whole, tail = b"", b""
    while b"data: [DONE]" not in tail:
        part = await reader.read(65536)
        if not part:
            raise RuntimeError(f"the stream broke off: {tail[-300:]!r}")
        if len(whole) < 2048:
            whole += part
        # The chunk with the role has no token.
        count = part.count(b'"index":') - part.count(b'"role":')
        arrivals.extend([time.monotonic()] * count)
        tail = tail[-20:] + part
    writer.close()
    # What is left over is the end of the answer.
    return json.loads(whole.split(b"data: ", 2)[1].split(b"\n\n")[0])["id"], arrivals[:tokens]


async def direct_stream(port: int, name: str, tokens: int) -> tuple[str, list[float]]:
    """The same from the worker itself."""
    request = decode_pb2.GenerateRequest(request_id=name, token_ids=[1], num_prompt_tokens=1)
    request.sampling.max_tokens = tokens
    arrivals: list[float] = []
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub: Any = decode_pb2_grpc.DecodeStub(channel)
        call = stub.Generate(request)
        while (message := await call.read()) is not grpc.aio.EOF:
            arrivals.extend([time.monotonic()] * len(message.token_ids))
    return name, arrivals


async def _healthy(port: int) -> None:
    for _ in range(600):
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            if b" 200 " in answer[:20]:
                return
        except OSError:
            pass
        await asyncio.sleep(0.05)
    raise RuntimeError("the gateway did not become healthy")


async def _throughput(kind: str, streams: int, tokens: int) -> None:
    with running(0.0) as stack:
        await _healthy(stack.port)
        await asyncio.gather(*(stream(stack.port, kind, 20) for _ in range(8)))
        cpu, start = cpu_seconds(stack.gateway.pid), time.perf_counter()
        answers = await asyncio.gather(*(stream(stack.port, kind, tokens) for _ in range(streams)))
        wall, used = time.perf_counter() - start, cpu_seconds(stack.gateway.pid) - cpu
    total = sum(len(arrivals) for _, arrivals in answers)
    print(
        f"{kind}, {streams} streams, {total} tokens: {total / wall:,.0f} tokens/s; the gateway took "
        f"{used / total * 1e6:.1f} us of CPU for each = {total / used:,.0f} tokens/s on one core"
    )


async def _added_latency(kind: str, streams: int, tokens: int) -> None:
    with running(_STEP_SECONDS) as stack:
        await _healthy(stack.port)
        await asyncio.gather(*(stream(stack.port, kind, 20) for _ in range(8)))
        direct = await asyncio.gather(*(direct_stream(stack.worker_port, f"d{n}", tokens) for n in range(streams)))
        through = await asyncio.gather(*(stream(stack.port, kind, tokens) for _ in range(streams)))
        times = stack.worker_times()
    base, ours = _latencies(direct, times), _latencies(through, times)
    print(
        f"{kind}, {streams} streams, a token each every {_STEP_SECONDS * 1e3:.0f} ms: worker to client "
        f"p50 {_at(ours, 0.5):.2f} ms, p99 {_at(ours, 0.99):.2f} ms; directly p50 {_at(base, 0.5):.2f} ms, "
        f"p99 {_at(base, 0.99):.2f} ms; added p50 {_at(ours, 0.5) - _at(base, 0.5):.2f} ms, "
        f"p99 {_at(ours, 0.99) - _at(base, 0.99):.2f} ms"
    )


def _latencies(answers: Sequence[tuple[str, Sequence[float]]], times: dict[str, list[float]]) -> list[float]:
    """Milliseconds, sorted. The first tokens are left out: they come with their answer's beginning."""
    return sorted(
        (arrival - times[name][place]) * 1e3
        for name, arrivals in answers
        for place, arrival in enumerate(arrivals)
        if place
    )


def _at(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        uvloop.run(_work(int(sys.argv[2]), float(sys.argv[3])))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--kind", choices=("chat", "completions"), default="chat")
    args = parser.parse_args()
    uvloop.run(_throughput(args.kind, args.streams, args.tokens))
    uvloop.run(_added_latency(args.kind, 32, 250))


if __name__ == "__main__":
    main()
