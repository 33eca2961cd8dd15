"""The routing simulator on a small trace of conversations: which policy is better, not by how many seconds."""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterator

import pytest

from biphase.request import BlockHash
from tests.bench.cluster_model import Job, Sizes
from tests.bench.route_replay import BLOCK_TOKENS, infinite_hit_rate, replay

SIZES = Sizes(num_prefills=4, num_decodes=4, prefill_cache_tokens=10_000_000, decode_cache_tokens=10_000_000)


@pytest.fixture(autouse=True)
def without_decision_log() -> Iterator[None]:
    logging.disable(logging.INFO)
    yield
    logging.disable(logging.NOTSET)


def conversations() -> list[Job]:
    """60 users with a common system prompt, five turns each, every turn longer by a few blocks."""
    draw = random.Random(3)
    jobs = []
    for user in range(60):
        ids = [0, *(1000 * user + place for place in range(1, draw.randint(3, 40)))]
        arrival = draw.random() * 40
        for turn in range(5):
            hashes = [BlockHash(hashlib.sha256(b"%d" % block).digest()) for block in ids]
            jobs.append(Job(arrival, len(ids) * BLOCK_TOKENS + draw.randrange(1, 400), 50, hashes, f"{user}-{turn}"))
            ids = [*ids, *(1000 * user + len(ids) + place for place in range(draw.randint(1, 4)))]
            arrival += draw.uniform(8, 25)
    return sorted(jobs, key=lambda job: job.arrival)


def test_cost_beats_the_others_where_workers_read_nothing_from_each_other() -> None:
    sizes = Sizes(**{**vars(SIZES), "fetch": False})
    rows = {policy: replay(conversations(), sizes, policy) for policy in ("cost", "least_loaded", "round_robin")}
    cost = rows.pop("cost")
    for other in rows.values():
        assert cost["ttft_mean"] < other["ttft_mean"] and cost["ttft_p99"] <= other["ttft_p99"]
        assert cost["hit_rate"] > 1.2 * other["hit_rate"]
    assert cost["imbalance"] < 1.2


def test_with_large_pools_nearly_every_prefix_is_found() -> None:
    cost, spread = (replay(conversations(), SIZES, policy) for policy in ("cost", "least_loaded"))
    assert cost["hit_rate"] >= 0.95 * infinite_hit_rate(conversations())
    assert cost["own_hit_rate"] > spread["own_hit_rate"]
    assert cost["imbalance"] < 1.2


def test_a_replay_is_the_same_every_time() -> None:
    assert replay(conversations(), SIZES, "cost") == replay(conversations(), SIZES, "cost")
