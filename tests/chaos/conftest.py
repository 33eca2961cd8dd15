from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.cluster import ChaosCluster, ClusterPlan, running_cluster, save_model
from tests.chaos.load import Answer, Asker, Question, draw_questions, undisturbed


@pytest.fixture(scope="session")
def chaos_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("chaos-model"))


@pytest.fixture(scope="package")
def shared_cluster(chaos_model: Path) -> Iterator[ChaosCluster]:
    """Two prefill and two decode workers over tcp through proxies. One for all tests here."""
    plan = ClusterPlan(
        num_gateways=int(os.environ.get("CHAOS_GATEWAYS", "1")),
        transports=os.environ.get("CHAOS_TRANSPORTS", "tcp"),
        dtype=os.environ.get("CHAOS_DTYPE", "float32"),
    )
    with running_cluster(chaos_model, plan) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ChaosCluster) -> Iterator[ChaosCluster]:
    """Ready and idle before a test and, within five seconds, after it."""
    shared_cluster.heal()
    yield shared_cluster
    shared_cluster.heal()


async def _right_answers(cluster: ChaosCluster, questions: list[Question]) -> dict[Question, Answer]:
    asker = Asker(cluster.base_url, 60.0)
    try:
        return await undisturbed(asker, questions)
    finally:
        await asker.close()


@pytest.fixture(scope="package")
def long_streams(shared_cluster: ChaosCluster) -> dict[Question, Answer]:
    """At least 32 questions with answers long enough to be in the middle of."""
    questions = draw_questions(random.Random(1), 48, lengths=(17, 100, 300, 700), outputs=(500, 800))
    known = asyncio.run(_right_answers(shared_cluster, questions))
    assert len(known) >= 32
    return dict(list(known.items())[:32])


@pytest.fixture(scope="package")
def short_answers(shared_cluster: ChaosCluster) -> dict[Question, Answer]:
    """For random faults: prompts of one token to many chunks."""
    questions = draw_questions(random.Random(2), 64, lengths=(1, 16, 40, 130, 260, 520, 900), outputs=(8, 60, 150, 400))
    return asyncio.run(_right_answers(shared_cluster, questions))
