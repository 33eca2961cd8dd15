"""`biphase serve` as its users meet it: the OpenAI SDK, sharing of prefixes, SIGTERM under load, dead workers."""

from __future__ import annotations

import glob
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import pytest
from openai import OpenAI

from tests.e2e.stack import Stack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

QUESTION: Any = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
SMALL = ("--kv-cache-bytes", "400MiB")


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    # In turn, so that a prefix has to be found wherever it is, and not only where it was.
    turns = ("--gateway-args", "--routing-policy round_robin")
    with running_stack("--prefill", "2", "--decode", "2", *turns, *SMALL) as running:
        yield running


def children(stack: Stack) -> list[psutil.Process]:
    return psutil.Process(stack.process.pid).children(recursive=True)


def random_prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(100, 49_000) for _ in range(length)]


def complete(stack: Stack, prompt: list[int], max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    answer: dict[str, Any] = stack.post("/v1/completions", body | more)
    return answer


def report_of(stack: Stack, answer: dict[str, Any]) -> dict[str, Any]:
    entries = [entry for entry in stack.status()["requests"] if entry["request_id"].startswith(answer["id"])]
    assert len(entries) == 1
    found: dict[str, Any] = entries[0]
    return found


def test_openai_sdk_streamed_and_not(stack: Stack) -> None:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="EMPTY") as client:
        model = client.models.list().data[0].id
        whole = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
        assert whole.choices[0].message.content == ANSWER
        assert whole.choices[0].finish_reason == "stop"
        chunks = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER


def test_a_prefix_computed_on_one_prefill_worker_is_a_hit_on_the_other(stack: Stack) -> None:
    """The first request fills one prefill worker and the store. With that worker dead, the prefix is still a hit."""
    shared = random_prompt(1, 640)
    first = report_of(stack, complete(stack, shared + random_prompt(2, 40)))
    assert first["num_computed_tokens"] == 680
    deadline = time.monotonic() + 10
    while sum(node["blocks"]["cached"] for node in stack.nodes("kvstore")) < 640 // 16:
        assert time.monotonic() < deadline, "the store never got the blocks"
        time.sleep(0.1)
    (holder,) = [node for node in stack.nodes("prefill") if node["id"] == first["prefill_node"]]
    os.kill(holder["pid"], signal.SIGKILL)
    entries = []
    for number in range(4):
        # Long enough a rest to go to a prefill worker, several at once to reach both decode workers.
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda n: complete(stack, shared + random_prompt(n, 90)), (number, 10 + number)))
        for answer in answers:
            entry = report_of(stack, answer)
            entries.append(entry)
            cached = entry["num_cached_tokens"] + entry["num_prefill_cached_tokens"] + entry["num_external_tokens"]
            assert cached == answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 640, entry
            assert cached + entry["num_computed_tokens"] == 730, entry
    assert any(entry["num_external_tokens"] for entry in entries), entries
    wait_back(stack, holder)


def wait_back(stack: Stack, victim: dict[str, Any]) -> None:
    """Until the node runs again, in another life."""
    deadline = time.monotonic() + 60
    while True:
        nodes = [node for node in stack.nodes(victim["role"]) if node["id"] == victim["id"]]
        if nodes and nodes[0]["state"] == "ready" and nodes[0]["incarnation"] != victim["incarnation"]:
            return
        assert time.monotonic() < deadline, f"{victim['id']} did not come back"
        time.sleep(0.2)


def test_kill_9_of_any_worker_heals(stack: Stack) -> None:
    for role in ("prefill", "decode", "kvstore"):
        victim = stack.nodes(role)[0]
        os.kill(victim["pid"], signal.SIGKILL)
        wait_back(stack, victim)
        answers = [complete(stack, random_prompt(100 + n, 50)) for n in range(4)]
        assert all(len(answer["choices"][0]["token_ids"]) == 8 for answer in answers)


def test_memory_after_load(stack: Stack) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda n: complete(stack, random_prompt(200 + n, 100), 16), range(32)))
    megabytes = 2**20
    for node in (*stack.status()["nodes"], stack.status()["gateway"]):
        # Unique pages and file pages; the pools are shared memory, counted apart.
        info = psutil.Process(node["pid"]).memory_full_info()
        private = (info.rss - info.shared + 0) / megabytes
        limit = {"gateway": 300, "kvstore": 200}.get(node["role"], 1500)
        assert private < limit, f"{node['id']} has {private:.0f} MiB beside its pool"


def test_sigterm_under_load_ends_all_and_leaves_nothing() -> None:
    with running_stack(*SMALL) as stack:
        running = [stack.process.pid, *(child.pid for child in children(stack))]
        assert len(running) >= 6
        results: list[Any] = []

        def one(number: int) -> None:
            try:
                results.append(complete(stack, random_prompt(number, 64), 48))
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + 10
        while stack.status()["gateway"]["running"] < 8:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert stack.stop() == 0
        for thread in threads:
            thread.join()
        assert [type(result) for result in results] == [dict] * 8, results
        assert all(len(result["choices"][0]["token_ids"]) == 48 for result in results)
        assert not [pid for pid in running if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]
        assert not glob.glob("/dev/shm/biphase*")
        assert not glob.glob(f"/tmp/biphase-valkey-{stack.process.pid}-*")


def test_a_second_interrupt_kills_at_once() -> None:
    with running_stack(*SMALL) as stack:
        running = [child.pid for child in children(stack)]
        threading.Thread(
            target=lambda: _quietly(lambda: complete(stack, random_prompt(1, 64), 4000)), daemon=True
        ).start()
        time.sleep(0.5)
        stack.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        stack.process.send_signal(signal.SIGINT)
        stack.process.wait(5)
        time.sleep(0.2)
        assert not [pid for pid in running if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"]


def _quietly(work: Any) -> None:
    try:
        work()
    except Exception:
        return
