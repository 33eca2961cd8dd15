"""A short share of `make rolling`: processes restart one by one, and a pool shrinks and grows, under load."""

from __future__ import annotations

import asyncio
import json
import os
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.launcher import drain
from tests.chaos.cluster import ChaosCluster, running_cluster, save_model
from tests.chaos.load import Asker, Question
from tests.chaos.rolling import SECURED, Load, bring_back, plan, restart, take_away

LONG = int(os.environ.get("CHAOS_FAULTS", "25")) >= 200

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.skipif(not LONG, reason="a minute and a half: part of `make chaos`, and `make rolling` is all of it"),
]

ADMIN = "the key of whoever runs this"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ChaosCluster]:
    model = save_model(tmp_path_factory.mktemp("rolling") / "model")
    secured = plan(2)
    secured = replace(
        secured, num_prefill=1, kvstore=False, gateway_flags=(*secured.gateway_flags, "--admin-key", ADMIN)
    )
    with running_cluster(model, secured) as cluster:
        yield cluster


def test_no_client_notices(cluster: ChaosCluster) -> None:
    load = Load(cluster.base_urls, num_clients=4, seed=1)
    load.start()
    take_away(cluster, ["decode-1"])
    bring_back(cluster, ["decode-1"])
    for name in ("prefill-0", "decode-0", "gateway-0"):
        restart(cluster, name)
    cluster.valkey.restart()
    time.sleep(1.0)
    outcome = load.stop()
    assert not outcome.failures, outcome
    assert sum(outcome.verdicts.values()) > 20
    cluster.wait_ready(30.0)
    cluster.wait_idle(15.0)


async def test_a_drained_worker_finishes_and_takes_nothing_new(cluster: ChaosCluster) -> None:
    """`biphase drain`, while a long stream runs on the node; the registry shows it, and the other takes what comes."""
    asker = Asker(cluster.base_url, 60.0)
    # Enough of them that they still run when the registry has told of it, however fast the machine is.
    questions = [Question(tuple(range(number, number + 50)), 1200) for number in range(10, 26)]
    streams = [asyncio.create_task(asker.ask(question, stream=True)) for question in questions]
    busy = await _until(cluster, lambda node: node["role"] == "decode" and node["running"])
    arguments = [busy, "--url", cluster.base_url, "--admin-key", ADMIN]
    drained = asyncio.create_task(asyncio.to_thread(drain.main, arguments))
    await _until(cluster, lambda node: node["id"] == busy and node["state"] == "draining")
    assert not drained.done() and not all(stream.done() for stream in streams)
    for _ in range(4):
        assert (await asker.ask(Question((20, 21, 22), 4), stream=False)).status == 200
    recent = await asyncio.to_thread(_recent, cluster)
    assert all(request["decode_node"] != busy for request in recent[:4]), recent[:4]
    for answer in await asyncio.gather(*streams):
        assert answer.status == 200 and len(answer.token_ids) == 1200
    assert await drained == 0
    await asker.close()
    # It leaves the registry first, and then closes what it has.
    deadline = time.monotonic() + 15
    while cluster.processes[busy].running and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    assert cluster.processes[busy].exit_code == 0
    cluster.processes[busy].start()
    cluster.processes[busy].wait_ready()
    cluster.wait_ready(30.0)


def test_a_worker_with_another_token_gets_no_work(cluster: ChaosCluster) -> None:
    """It is in the registry like the others; the gateways refuse it by name, and it refuses them."""
    decode = cluster.processes["decode-1"]
    decode.stop(30.0)
    right = decode.argv
    decode.argv = tuple("the token of another cluster" if word == SECURED[1] else word for word in right)
    decode.start()
    decode.wait_ready()
    load = Load(cluster.base_urls, num_clients=2, seed=2)
    load.start()
    deadline = time.monotonic() + 10
    while "UNAUTHENTICATED" not in cluster.processes["gateway-0"].log():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    outcome = load.stop()
    assert not outcome.failures
    assert not [node for node in cluster.nodes() if node["id"] == "decode-1" and node["state"] == "ready"]
    decode.stop(30.0)
    decode.argv = right
    decode.start()
    decode.wait_ready()
    cluster.wait_ready(30.0)


def _recent(cluster: ChaosCluster) -> list[dict[str, object]]:
    with urllib.request.urlopen(cluster.base_url + "/status", timeout=5) as answer:
        requests: list[dict[str, object]] = json.load(answer)["requests"]
        return requests


async def _until(cluster: ChaosCluster, holds: object) -> str:
    """Id of the first node of which it holds."""
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        for node in await asyncio.to_thread(cluster.nodes):
            if holds(node):  # type: ignore[operator]
                return str(node["id"])
        await asyncio.sleep(0.02)
    raise AssertionError(cluster.nodes())
