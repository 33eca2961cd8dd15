"""A rolling restart of every service, and pools scaled up and down, under load: no client may notice.

    python -m tests.chaos.rolling              all of it; a line per step, and a summary in JSON

Owns the load with its retrying client and the steps. Every answer is compared with that of the undisturbed cluster;
what differs, breaks or is refused counts as failed. The client does what any client of two gateways does: where a
connection cannot be made, or breaks before anything has come back, it takes the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.cluster import ChaosCluster, ClusterPlan, running_cluster, save_model
from tests.chaos.load import Answer, Asker, Question, Verdict, draw_questions, judge, undisturbed

Step = tuple[str, Callable[[], None]]

_DEADLINE_SECONDS = 60.0
_DRAIN_SECONDS = "20"
_WORKER_FLAGS = ("--drain-timeout", _DRAIN_SECONDS, "--service-token", "what every process of this cluster has")
SECURED = _WORKER_FLAGS[2:]


def plan(pool: int) -> ClusterPlan:
    """Two gateways, pools of that size, a store, and a service token between all of them."""
    return ClusterPlan(
        num_prefill=pool,
        num_decode=pool,
        num_gateways=2,
        proxied=False,
        transports="shm,tcp",
        worker_flags=_WORKER_FLAGS,
        gateway_flags=_WORKER_FLAGS,
        kvstore_flags=_WORKER_FLAGS,
    )


@dataclass
class Outcome:
    """What the clients saw."""

    verdicts: Counter[Verdict] = field(default_factory=Counter)
    num_tried_elsewhere: int = 0
    failures: list[Answer] = field(default_factory=list)

    @property
    def num_failed(self) -> int:
        return sum(self.verdicts.values()) - self.verdicts[Verdict.EQUAL]


class Load:
    """Clients in a thread of their own, from `start` to `stop`; processes belong to the main thread."""

    def __init__(self, base_urls: Sequence[str], num_clients: int, seed: int) -> None:
        self._base_urls = list(base_urls)
        self._num_clients = num_clients
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._warm = threading.Event()
        self._error: BaseException | None = None
        self.outcome = Outcome()
        self._thread = threading.Thread(target=self._run, name="load", daemon=True)

    def start(self) -> None:
        """Returns when the right answers are known and the clients are at work."""
        self._thread.start()
        while not self._warm.wait(0.1):
            if self._error is not None:
                raise self._error

    def stop(self) -> Outcome:
        self._stopping.set()
        self._thread.join(2 * _DEADLINE_SECONDS)
        if self._error is not None:
            raise self._error
        return self.outcome

    def _run(self) -> None:
        try:
            asyncio.run(self._load())
        except BaseException as error:
            self._error = error

    async def _load(self) -> None:
        askers = [Asker(url, _DEADLINE_SECONDS) for url in self._base_urls]
        questions = draw_questions(self._rng, 16, lengths=(20, 150, 400), outputs=(16, 48))
        right = await undisturbed(askers[0], questions)
        numbers = itertools.count()
        self._warm.set()
        await asyncio.gather(*(self._client(askers, right, numbers) for _ in range(self._num_clients)))
        for asker in askers:
            await asker.close()

    async def _client(
        self, askers: Sequence[Asker], right: dict[Question, Answer], numbers: itertools.count[int]
    ) -> None:
        chosen = list(right)
        while not self._stopping.is_set():
            number = next(numbers)
            question = chosen[number % len(chosen)]
            # Half of them repeat a prefix, half are new to every cache.
            salt = f"s{number}" if number % 2 else ""
            answer = Answer()
            for attempt in range(20):
                asker = askers[(number + attempt) % len(askers)]
                answer = await asker.ask(question, stream=bool(number % 3), cache_salt=salt)
                if answer.status != 0 or answer.token_ids:
                    break
                self.outcome.num_tried_elsewhere += 1
                await asyncio.sleep(0.05 * (attempt > 1))
            verdict = judge(answer, right[question], _DEADLINE_SECONDS)
            self.outcome.verdicts[verdict] += 1
            if verdict is not Verdict.EQUAL:
                self.outcome.failures.append(answer)


def wait_known(cluster: ChaosCluster, away: Sequence[str] = ()) -> None:
    """Until every gateway sees every process ready, but for some."""
    expected = {p.name for p in cluster.processes.values() if p.role != "gateway"} - set(away)
    deadline = time.monotonic() + 30
    for url in cluster.base_urls:
        seen: set[str] = set()
        while not seen >= expected:
            assert time.monotonic() < deadline, f"{url} sees {seen} only"
            with contextlib.suppress(OSError), urllib.request.urlopen(url + "/status", timeout=5) as answer:
                seen = {node["id"] for node in json.load(answer)["nodes"] if node["state"] == "ready"}
            time.sleep(0.05)


def restart(cluster: ChaosCluster, name: str, away: Sequence[str] = ()) -> None:
    """SIGTERM, a clean end, back under the same address, and known to all: what whoever restarts services waits for."""
    process = cluster.processes[name]
    process.stop(float(_DRAIN_SECONDS) + 10)
    assert process.exit_code == 0, f"{name} ended with {process.exit_code}:\n{process.log()[-3000:]}"
    process.start()
    process.wait_ready()
    wait_known(cluster, away)


def take_away(cluster: ChaosCluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.processes[name].stop(float(_DRAIN_SECONDS) + 10)
        assert cluster.processes[name].exit_code == 0, cluster.processes[name].log()[-3000:]


def bring_back(cluster: ChaosCluster, names: Sequence[str]) -> None:
    for name in names:
        cluster.processes[name].start()
    for name in names:
        cluster.processes[name].wait_ready()
    wait_known(cluster)


def take(steps: Iterable[Step], load: Load, num_requests: int) -> None:
    """Step after step, a line for each. So many requests end after one before the next: what it does to them shows
    while some of them run."""
    for what, step in steps:
        before, began = sum(load.outcome.verdicts.values()), time.monotonic()
        step()
        while sum(load.outcome.verdicts.values()) < before + num_requests:
            time.sleep(0.05)
        print(f"{what}: {time.monotonic() - began:.1f} s, {load.outcome.num_failed} failed", flush=True)


def tell(outcome: Outcome) -> int:
    """Prints the summary. Returns the exit code: 1 when a request failed."""
    summary = {
        "requests": sum(outcome.verdicts.values()),
        "failed": outcome.num_failed,
        "tried_another_gateway": outcome.num_tried_elsewhere,
        "first_failures": [str(answer)[:500] for answer in outcome.failures[:5]],
    }
    print(json.dumps(summary))
    return 1 if outcome.num_failed else 0


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        model = save_model(Path(folder))
        with running_cluster(model, plan(3)) as cluster:
            extra = [f"{role}-{number}" for role in ("prefill", "decode") for number in (1, 2)]
            load = Load(cluster.base_urls, num_clients=6, seed=1)
            load.start()
            steps: list[Step] = [
                ("scale to 1 prefill, 1 decode", lambda: take_away(cluster, extra)),
                ("scale to 3 prefill, 3 decode", lambda: bring_back(cluster, extra)),
                *((f"restart {name}", lambda name=name: restart(cluster, name)) for name in cluster.processes),  # type: ignore[misc]
                ("restart valkey, empty", cluster.valkey.restart),
                ("scale to 1 prefill, 1 decode again", lambda: take_away(cluster, extra)),
            ]
            take(steps, load, 12)
            outcome = load.stop()
            bring_back(cluster, extra)
            cluster.wait_idle(30.0)
    return tell(outcome)


if __name__ == "__main__":
    sys.exit(main())
