"""Prefill and decode in network namespaces of their own: real tcp, and a real link that goes down."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosCluster, ClusterPlan, running_cluster
from tests.chaos.load import Answer, Asker, Question, Verdict, draw_questions, judge, undisturbed

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif("CHAOS_FAULTS" not in os.environ, reason="takes long; make chaos runs it"),
]

DEADLINE_SECONDS = 30.0
NETWORK = f"10.213.{os.getpid() % 250}"


def ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Namespaces:
    """A bridge here, and one namespace a role on it. `cut` and `mend` a role's link."""

    def __init__(self, roles: tuple[str, ...]) -> None:
        number = os.getpid() % 100_000
        self._bridge = f"bpb{number}"
        self._names = {role: f"biphase-{role}-{number}" for role in roles}
        self._links = {role: f"bp{role[0]}{number}" for role in roles}
        self.homes = {
            role: (("ip", "netns", "exec", self._names[role]), f"{NETWORK}.{2 + place}")
            for place, role in enumerate(roles)
        }

    def open(self) -> None:
        """
        Raises:
            OSError: not permitted here.
        """
        ip("link", "add", self._bridge, "type", "bridge")
        ip("addr", "add", f"{NETWORK}.1/24", "dev", self._bridge)
        ip("link", "set", self._bridge, "up")
        for role, name in self._names.items():
            link = self._links[role]
            ip("netns", "add", name)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
            ip("link", "set", link, "master", self._bridge, "up")
            ip("-n", name, "addr", "add", f"{self.homes[role][1]}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", "eth0", "up")

    def cut(self, role: str) -> None:
        ip("link", "set", self._links[role], "down")

    def mend(self, role: str) -> None:
        ip("link", "set", self._links[role], "up")

    def close(self) -> None:
        for role, name in self._names.items():
            subprocess.run(["ip", "link", "del", self._links[role]], capture_output=True, check=False)
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self._bridge], capture_output=True, check=False)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[Namespaces]:
    if shutil.which("ip") is None:
        pytest.skip("needs ip of iproute2")
    namespaces = Namespaces(("prefill", "decode"))
    try:
        try:
            namespaces.open()
        except OSError as error:
            pytest.skip(f"network namespaces are not permitted here: {error}")
        yield namespaces
    finally:
        namespaces.close()


@pytest.fixture(scope="module")
def split(namespaces: Namespaces, chaos_model: Path) -> Iterator[ChaosCluster]:
    # Short chunks: blocks cross while the prompt is still being computed.
    plan = ClusterPlan(
        num_prefill=1,
        num_decode=1,
        kvstore=False,
        proxied=False,
        transports="shm,tcp",
        homes=namespaces.homes,
        worker_flags=("--max-num-seqs", "16", "--max-num-batched-tokens", "32"),
    )
    with running_cluster(chaos_model, plan) as cluster:
        yield cluster


async def ask_all(cluster: ChaosCluster, known: dict[Question, Answer], salt: str) -> list[asyncio.Task[Answer]]:
    asker = Asker(cluster.base_url, DEADLINE_SECONDS + 5)
    asking = [
        asyncio.create_task(asker.ask(question, stream=True, cache_salt=f"{salt}-{number}"))
        for number, question in enumerate(known)
    ]
    asyncio.gather(*asking).add_done_callback(lambda _: asyncio.ensure_future(asker.close()))
    return asking


async def test_the_link_goes_down_while_blocks_cross(split: ChaosCluster, namespaces: Namespaces) -> None:
    asker = Asker(split.base_url, 60.0)
    questions = draw_questions(random.Random(4), 16, lengths=(400, 900, 1200), outputs=(20, 60))
    known = await undisturbed(asker, questions)
    assert len(known) >= 12
    reports = split.status()["requests"]
    # Another namespace is another host, whatever shared memory there is.
    assert {entry["transport"] for entry in reports if entry["prefill_mode"] == "remote"} == {"tcp"}

    asking = await ask_all(split, known, "down")
    await asyncio.sleep(0.4)
    assert not all(task.done() for task in asking)
    started = time.monotonic()
    namespaces.cut("prefill")
    answers = await asyncio.gather(*asking)
    verdicts = [judge(a, right, DEADLINE_SECONDS) for a, right in zip(answers, known.values(), strict=True)]
    details = [(a.status, a.error, a.seconds) for a in answers if a.status != 200]
    assert verdicts == [Verdict.EQUAL] * len(known), details
    reasons = {entry["reason"] for entry in split.status()["requests"][: len(known)]}
    assert "prefill_failed" in reasons, "nothing was in the middle of a hand-off"
    print(f"link down: all answers {time.monotonic() - started:.1f} s later, {sorted(reasons)}")
    split.wait_decode_idle(5.0)

    namespaces.mend("prefill")
    split.heal()
    answers = await asyncio.gather(*await ask_all(split, known, "up"))
    assert [judge(a, known[q], DEADLINE_SECONDS) for a, q in zip(answers, known, strict=True)] == (
        [Verdict.EQUAL] * len(known)
    )
    modes = {entry["prefill_mode"] for entry in split.status()["requests"][: len(known)]}
    assert "remote" in modes, "the prefill worker is used again"
    split.wait_idle()
    await asker.close()


async def test_the_link_to_decode_goes_down_and_comes_back(split: ChaosCluster, namespaces: Namespaces) -> None:
    """The only decode worker is away for a moment: its streams wait for it and go on."""
    asker = Asker(split.base_url, 60.0)
    known = await undisturbed(asker, draw_questions(random.Random(5), 12, lengths=(60, 300), outputs=(300,)))
    await asker.close()
    asking = await ask_all(split, known, "away")
    await asyncio.sleep(0.4)
    namespaces.cut("decode")
    await asyncio.sleep(6.0)
    namespaces.mend("decode")
    answers = await asyncio.gather(*asking)
    details = [(a.status, a.error, a.seconds, len(a.token_ids)) for a in answers]
    verdicts = [judge(a, right, DEADLINE_SECONDS) for a, right in zip(answers, known.values(), strict=True)]
    assert verdicts == [Verdict.EQUAL] * len(known), details
    split.heal()
