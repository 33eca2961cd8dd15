"""The store as a process: ready line, exit codes, signals, memory, what it imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from biphase.index.embedded import EmbeddedValkey
from tests.services.kvstore.conftest import StandInWorker, StoreClient, chain


class StoreChild:
    """`python -m services.kvstore` with a ready pipe."""

    def __init__(self, *flags: str) -> None:
        ready, write = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.kvstore", "--ready-fd", str(write), *flags],
            pass_fds=[write],
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(write)
        with os.fdopen(ready) as pipe:
            line = pipe.readline()
        self.ready: dict[str, Any] = json.loads(line) if line else {}

    def end(self, timeout_seconds: float = 20.0) -> tuple[int, str]:
        _, errors = self.process.communicate(timeout=timeout_seconds)
        return self.process.returncode, errors

    def terminate(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        return self.end()


@pytest.fixture
def store_children() -> Iterator[list[StoreChild]]:
    children: list[StoreChild] = []
    yield children
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.communicate()


def test_ready_health_sigterm(store_children: list[StoreChild]) -> None:
    child = StoreChild("--node-id", "kvstore-0", "--log-format", "json")
    store_children.append(child)
    assert child.ready["node_id"] == "kvstore-0"
    assert child.ready["role"] == "kvstore"
    assert child.ready["pid"] == child.process.pid
    with grpc.insecure_channel(child.ready["address"]) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        answer = health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    # Beside its pool: half of what it may take.
    assert psutil.Process(child.process.pid).memory_info().rss < 100 * 2**20
    code, errors = child.terminate()
    assert code == 0
    events = [json.loads(line)["event"] for line in errors.splitlines() if line.startswith("{")]
    assert events == ["ready", "draining", "stopped"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--capacity", "12kB"], "--capacity"),
        (["--transports", "pigeon"], "pigeon"),
        (["--disk-path", "/proc/nowhere"], "--disk-path"),
        (["--redis-url", "http://x"], "--redis-url"),
        (["--tenant-quota", "2"], "--tenant-quota"),
    ],
)
def test_unusable_settings_end_with_2_and_one_sentence(
    store_children: list[StoreChild], flags: list[str], words: str
) -> None:
    child = StoreChild(*flags)
    store_children.append(child)
    code, errors = child.end()
    assert code == 2
    assert not child.ready
    assert words in errors and len(errors.splitlines()) == 1


def test_a_taken_port_and_a_taken_folder_are_named(store_children: list[StoreChild], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        child = StoreChild("--port", str(port))
        store_children.append(child)
        code, errors = child.end()
        assert code == 2 and str(port) in errors
    store_children.append(StoreChild("--disk-path", str(tmp_path)))
    second = StoreChild("--disk-path", str(tmp_path))
    store_children.append(second)
    code, errors = second.end()
    assert code == 2 and "another store" in errors


def test_never_imports_torch() -> None:
    program = (
        "import sys, services.kvstore.__main__\n"
        "bad = {'torch', 'transformers', 'fastapi', 'tokenizers'} & set(sys.modules)\n"
        "sys.exit(str(bad) if bad else 0)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_redis_that_is_not_there_keeps_nobody_from_starting(store_children: list[StoreChild], tmp_path: Path) -> None:
    child = StoreChild("--redis-url", f"unix://{tmp_path}/none")
    store_children.append(child)
    assert child.ready
    code, errors = child.terminate()
    assert code == 0 and "registry_unavailable" in errors


async def test_killed_amid_offers_and_back_with_its_disk(
    store_children: list[StoreChild], store_valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    flags = ["--disk-path", str(tmp_path), "--capacity", "16MiB", "--redis-url", store_valkey.url]
    child = StoreChild(*flags)
    store_children.append(child)
    store, worker = StoreClient(child.ready["address"]), StandInWorker("worker")
    hashes = chain("a", 40)
    assert await worker.offer(store, hashes) == (40, 0, 0)
    deadline = time.monotonic() + 10
    while (await store.counters())["disk_written"] < 40:
        assert time.monotonic() < deadline
    child.process.kill()
    await store.channel.close()
    again = StoreChild(*flags)
    store_children.append(again)
    store = StoreClient(again.ready["address"])
    while (await store.counters())["disk_recovered"] < 40:
        assert time.monotonic() < deadline
    reader = StandInWorker("reader")
    assert await reader.fetch(store, hashes) == 40
    await store.channel.close()
    worker.close()
    reader.close()
    assert again.terminate()[0] == 0
