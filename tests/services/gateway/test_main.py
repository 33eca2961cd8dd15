"""The process: what it imports, what it weighs, how it refuses to start, how it stops."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.fakes import FakeDecode, free_port

_PROBE = """
import sys
import services.gateway.__main__
heavy = {"torch", "transformers", "numpy", "triton"} & set(sys.modules)
assert not heavy, heavy
"""


def test_imports_neither_torch_nor_transformers() -> None:
    subprocess.run([sys.executable, "-c", _PROBE], check=True)


def _start(*flags: str, ready_fd: int | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.gateway", *flags]
    if ready_fd is not None:
        command += ["--ready-fd", str(ready_fd)]
    return subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=() if ready_fd is None else (ready_fd,),
        env={key: value for key, value in os.environ.items() if not key.startswith("BIPHASE_")},
    )


def test_ready_line_memory_and_drain() -> None:
    read, write = os.pipe()
    process = _start("--port", "0", "--drain-timeout", "3", ready_fd=write)
    os.close(write)
    try:
        with os.fdopen(read) as pipe:
            line = json.loads(pipe.readline())
        assert line["role"] == "gateway" and line["pid"] == process.pid
        assert line["served_names"] == ["SmolLM2-135M-Instruct"]
        base = f"http://{line['address']}"
        assert httpx.get(f"{base}/version").status_code == 200
        assert httpx.get(f"{base}/health").status_code == 503
        status = Path(f"/proc/{process.pid}/status").read_text()
        (resident,) = re.findall(r"VmRSS:\s+(\d+)", status)
        assert int(resident) < 300 * 1024
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{base}/version")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "no-such-folder-here"], "no-such-folder-here"),
        (["--port", "x"], "--port"),
        (["--api-key-file", "/no/such/file"], "--api-key-file"),
        (["--chat-template", "/no/such/file"], "--chat-template"),
        (["--routing-policy", "odd"], "routing-policy"),
        (["--redis-url", "http://x"], "--redis-url"),
    ],
)
def test_refuses_to_start_with_one_sentence(flags: list[str], words: str) -> None:
    process = _start("--port", "0", *flags)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 2 and words in errors
    assert "Traceback" not in errors and len(errors.strip().splitlines()) == 1


async def test_a_stream_that_outlasts_the_drain_is_told(says: Callable[..., FakeDecode]) -> None:
    worker = await says(delay_seconds=0.05).start()
    port = free_port()
    process = _start("--port", str(port), "--drain-timeout", "1", "--decode-nodes", worker.address)
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for _ in range(200):
                with contextlib.suppress(httpx.ConnectError):
                    if (await client.get("/health")).status_code == 200:
                        break
                await asyncio.sleep(0.05)
            parts = []
            body = {"prompt": "x", "max_tokens": 2000, "stream": True}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for part in response.aiter_text():
                    if not parts:
                        process.send_signal(signal.SIGTERM)
                    parts.append(part)
        text = "".join(parts)
        assert text.endswith("data: [DONE]\n\n") and "shutting down" in text
        assert await asyncio.to_thread(process.wait, 10) == 0
    finally:
        process.kill()
        process.communicate()
        await worker.stop()


def test_a_taken_port_is_named() -> None:
    port = free_port()
    first = _start("--port", str(port))
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/version")
                break
            except httpx.ConnectError:
                time.sleep(0.05)
        second = _start("--port", str(port))
        _, errors = second.communicate(timeout=30)
        assert second.returncode == 2 and str(port) in errors
    finally:
        first.kill()
        first.communicate()
