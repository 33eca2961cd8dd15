"""The gateway's own cost per streamed token: one gateway process, a fake decode worker, many streams.

    python tests/bench/gateway_throughput.py [--streams 256] [--tokens 400] [--kind chat]

Prints tokens per second as seen by the clients, and per second of the gateway's own CPU time (what one core would
do), and at 32 paced streams the latency that the gateway adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.fakes import FakeDecode, free_port

_WORKER = """
import asyncio, sys, uvloop
sys.path.insert(0, {root!r})
from tests.fakes import FakeDecode
async def main():
    worker = FakeDecode(script=lambda request: [504, 355, 1343, 282, 260] * 20, max_model_len=100_000,
                        max_num_seqs=10_000, delay_seconds={delay})
    await worker.start({port})
    await asyncio.sleep(3600)
uvloop.run(main())
"""


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _body(kind: str, tokens: int) -> tuple[str, bytes]:
    fields: dict[str, object] = {"max_tokens": tokens, "stream": True, "ignore_eos": True}
    if kind == "chat":
        fields["messages"] = [{"role": "user", "content": "hi"}]
        return "/v1/chat/completions", json.dumps(fields).encode()
    return "/v1/completions", json.dumps(fields | {"prompt": "hi"}).encode()


async def _stream(port: int, kind: str, tokens: int, gaps: list[float] | None = None) -> int:
    path, body = _body(kind, tokens)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    count, tail, last = 0, b"", 0.0
    while b"data: [DONE]" not in tail:
        part = await reader.read(65536)
        if not part:
            raise RuntimeError(f"the stream broke off: {tail[-300:]!r}")
        now = time.perf_counter()
        if gaps is not None and last:
            gaps.append(now - last)
        last = now
        count += part.count(b'"index":')
        tail = tail[-20:] + part
    writer.close()
    return count


async def _wait_healthy(port: int) -> None:
    for _ in range(200):
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


def _start(delay: float) -> tuple[list[subprocess.Popen[bytes]], int]:
    worker_port, port = free_port(), free_port()
    root = str(Path(__file__).resolve().parents[2])
    worker = subprocess.Popen([sys.executable, "-c", _WORKER.format(root=root, delay=delay, port=worker_port)])
    flags = ["--port", str(port), "--decode-nodes", f"127.0.0.1:{worker_port}", "--max-queue", "10000"]
    gateway = subprocess.Popen([sys.executable, "-m", "services.gateway", *flags, "--log-level", "warning"], cwd=root)
    return [gateway, worker], port


async def _throughput(kind: str, streams: int, tokens: int) -> None:
    processes, port = _start(0.0)
    try:
        await _wait_healthy(port)
        await asyncio.gather(*(_stream(port, kind, 20) for _ in range(8)))
        pid = processes[0].pid
        cpu, start = _cpu_seconds(pid), time.perf_counter()
        counts = await asyncio.gather(*(_stream(port, kind, tokens) for _ in range(streams)))
        wall, used = time.perf_counter() - start, _cpu_seconds(pid) - cpu
        total = sum(counts)
        print(
            f"{kind}: {streams} streams, {total} chunks: {total / wall:,.0f} tokens/s; gateway CPU "
            f"{used / total * 1e6:.1f} us per token = {total / used:,.0f} tokens/s on one core"
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _latency(kind: str, streams: int) -> None:
    """ITL behind the gateway against the worker's own pace, which is `delay` plus what a sleep adds."""
    delay = 0.02
    processes, port = _start(delay)
    try:
        await _wait_healthy(port)
        gaps: list[float] = []
        await asyncio.gather(*(_stream(port, kind, 100, gaps) for _ in range(streams)))
        gaps.sort()
        print(
            f"{kind}: {streams} streams paced at {delay * 1e3:.0f} ms: ITL p50 {gaps[len(gaps) // 2] * 1e3:.2f} ms, "
            f"p99 {gaps[int(len(gaps) * 0.99)] * 1e3:.2f} ms"
        )
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--kind", choices=("chat", "completions"), default="chat")
    args = parser.parse_args()
    assert FakeDecode  # the worker process imports it by name
    uvloop.run(_throughput(args.kind, args.streams, args.tokens))
    uvloop.run(_latency(args.kind, 32))


if __name__ == "__main__":
    main()
