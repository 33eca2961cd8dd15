"""A prefix computed anywhere is computed once: found at the store after its workers died, and on disk after that."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.stack import Stack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("--prefill", "2", "--decode", "1", "--kv-cache-bytes", "256MiB", "--num-threads", "1")
PROMPT = " ".join(f"item {number} is number {number * 7}" for number in range(150))
WORKERS = ("prefill", "decode")


def wait_for(what: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            if what():
                return
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.1)


def ask(stack: Stack, prompt: str = PROMPT, cache_salt: str | None = None) -> tuple[str, int, float]:
    """Text, cached tokens, and seconds until the answer."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0}
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    start = time.monotonic()
    answer: dict[str, Any] = stack.post("/v1/completions", body)
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["text"], cached, time.monotonic() - start


def stored(stack: Stack) -> int:
    return sum(node["blocks"]["cached"] + node["blocks"]["used"] for node in stack.nodes("kvstore"))


def valkey_socket(stack: Stack) -> str | None:
    """From the table that `serve` prints when ready."""
    found = re.search(r"valkey\s+\d+\s+(\S+)", stack.log())
    return None if found is None else found[1]


def kill(stack: Stack, *roles: str) -> None:
    """kill -9, and the supervisor's successors awaited."""
    pids = {node["pid"] for role in roles for node in stack.nodes(role)}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)

    def replaced() -> bool:
        nodes = [node for role in roles for node in stack.nodes(role)]
        return len(nodes) == len(pids) and all(node["pid"] not in pids and node["state"] == "ready" for node in nodes)

    wait_for(replaced)
    # The successors' views of the index, a moment later.
    time.sleep(1.5)


def test_after_its_workers_died_and_after_the_store_died_too(tmp_path: Path) -> None:
    arguments = f"--capacity 512MiB --disk-path {tmp_path}"
    with running_stack(*FLAGS, "--kvstore-args", arguments) as stack:
        ask(stack, "warm up")
        text, cached, cold = ask(stack)
        assert cached == 0
        # Whoever sends a salt finds nothing of it, and cannot tell from the time either that others have it.
        salted, cached, seconds = ask(stack, cache_salt="somebody else")
        assert (salted, cached) == (text, 0) and seconds > 0.5 * cold
        _, cached, seconds = ask(stack, cache_salt="somebody else")
        assert cached > 1400 and seconds < 0.5 * cold
        wait_for(lambda: stored(stack) >= 180)
        kill(stack, *WORKERS)
        ask(stack, "warm up")
        again, cached, seconds = ask(stack)
        assert again == text and cached > 1400
        assert seconds < 0.35 * cold
        wait_for(lambda: len(list(tmp_path.glob("*/??/*"))) >= 180)
        kill(stack, *WORKERS, "kvstore")
        ask(stack, "warm up")
        again, cached, seconds = ask(stack)
        assert again == text and cached > 1400
        assert seconds < 0.5 * cold
        assert stack.stop() == 0


@pytest.fixture
def second_store() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for process in started:
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_two_stores_share_a_chain_and_a_lost_one_costs_its_share(second_store: list[subprocess.Popen[bytes]]) -> None:
    token = {"BIPHASE_SERVICE_TOKEN": "what lets the second store in too"}
    with running_stack(*FLAGS, "--kvstore-args", "--capacity 512MiB", environ=token) as stack:
        wait_for(lambda: valkey_socket(stack) is not None)
        second_store.append(
            subprocess.Popen(
                [
                    sys.executable, "-m", "services.kvstore", "--node-id", "kvstore-1", "--capacity", "512MiB",
                    "--redis-url", f"unix://{valkey_socket(stack)}",
                ],
                env={**os.environ, **token},
            )
        )  # fmt: skip
        wait_for(lambda: len(stack.nodes("kvstore")) == 2)
        time.sleep(1.0)
        # Long enough to be divided: 64 blocks of 16 tokens stay together.
        prompt = " ".join(f"thing {number} is {number * 3}" for number in range(300))
        text, _, _ = ask(stack, prompt)
        total = stack.status()["requests"][0]["num_prompt_tokens"] // 16
        wait_for(lambda: stored(stack) >= total - 1)
        assert all(node["blocks"]["cached"] for node in stack.nodes("kvstore"))
        kill(stack, *WORKERS)
        again, cached, _ = ask(stack, prompt)
        assert again == text and cached >= 16 * (total - 2)
        second_store[0].kill()
        second_store.pop().wait()
        kill(stack, *WORKERS)
        assert ask(stack, prompt)[0] == text
        assert stack.stop() == 0
