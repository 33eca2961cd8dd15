"""A worker is killed or frozen while 32 streams run: no client notices anything but a pause."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable

import pytest

from tests.chaos.cluster import ChaosCluster
from tests.chaos.load import Answer, Asker, Question, Verdict, judge
from tests.chaos.processes import ServiceProcess

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(240)]

# `make test` runs a share of these, `make chaos` all.
LONG = "CHAOS_FAULTS" in os.environ
only_long = pytest.mark.skipif(not LONG, reason="takes long; make chaos runs it")
DEADLINE_SECONDS = 30.0
# From the freeze of a worker until every stream it had goes on elsewhere: found by keepalive within five seconds, then
# prompts and outputs so far are computed anew, all at once and on few cores.
PAUSE_SECONDS = 12.0


async def disturbed(
    cluster: ChaosCluster, known: dict[Question, Answer], disturb: Callable[[], None], after_seconds: float
) -> list[Answer]:
    """All questions at once as streams, each with a salt of its own so that no cache helps."""
    asker = Asker(cluster.base_url, DEADLINE_SECONDS + 10)
    salt = f"{time.monotonic()}"
    try:
        asking = [
            asyncio.create_task(asker.ask(question, stream=True, cache_salt=f"{salt}-{number}", logprobs=number % 2))
            for number, question in enumerate(known)
        ]
        await asyncio.sleep(after_seconds)
        assert not all(task.done() for task in asking), "nothing was running any more"
        disturb()
        return await asyncio.gather(*asking)
    finally:
        await asker.close()


def assert_all_equal(answers: list[Answer], known: dict[Question, Answer]) -> None:
    verdicts = [judge(answer, right, DEADLINE_SECONDS) for answer, right in zip(answers, known.values(), strict=True)]
    wrong = [
        (verdict.value, answer.status, answer.error, answer.finish_reason, len(answer.token_ids), question.max_tokens)
        for verdict, answer, question in zip(verdicts, answers, known, strict=True)
        if verdict is not Verdict.EQUAL
    ]
    assert not wrong, wrong


@pytest.mark.parametrize("after_seconds", [0.15, 0.6, 1.5] if LONG else [0.6])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_kill_9_in_the_middle_of_32_streams(
    cluster: ChaosCluster, long_streams: dict[Question, Answer], role: str, after_seconds: float
) -> None:
    victim = cluster.of_role(role)[0]
    answers = await disturbed(cluster, long_streams, victim.kill, after_seconds)
    assert_all_equal(answers, long_streams)
    if role == "decode":
        assert sum(entry.get("num_moves", 0) for entry in cluster.status()["requests"][:32]) > 0


@only_long
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_frozen_worker_is_left_within_seconds(
    cluster: ChaosCluster, long_streams: dict[Question, Answer], role: str
) -> None:
    victim = cluster.of_role(role)[0]
    after_seconds = 0.1 if role == "prefill" else 0.6
    answers = await disturbed(cluster, long_streams, victim.freeze, after_seconds)
    assert_all_equal(answers, long_streams)
    longest = max(answer.longest_gap_seconds for answer in answers)
    slowest = max(answer.seconds for answer in answers)
    print(f"{role} frozen: longest pause {longest:.1f} s, slowest answer {slowest:.1f} s")
    assert longest < PAUSE_SECONDS
    # It comes back into the middle of other work, and must do no harm to that.
    again = await disturbed(cluster, long_streams, victim.thaw, 0.3)
    assert_all_equal(again, long_streams)


@only_long
async def test_freezes_that_come_and_go(cluster: ChaosCluster, long_streams: dict[Question, Answer]) -> None:
    """Shorter than anyone notices: a pause, nothing else."""
    rng = random.Random(3)
    victims: list[ServiceProcess] = cluster.of_role("prefill", "decode", "kvstore")

    def blink() -> None:
        for _ in range(4):
            victim = rng.choice(victims)
            victim.freeze()
            time.sleep(0.3)
            victim.thaw()

    assert_all_equal(await disturbed(cluster, long_streams, blink, 0.3), long_streams)
