"""Token for token: disaggregated == aggregated == transformers, float32, greedy. This test stays for ever.

What transformers answers is kept in parity_answers.json (see parity_answers.py); two prompts it is asked live.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.parity_answers import MAX_TOKENS, parity_prompts, stored_answers, transformers_answers
from tests.e2e.stack import Stack, running_stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600)]

FLAGS = ("--dtype", "float32", "--kv-cache-bytes", "512MiB", "--max-num-seqs", "32")


# The prompts that transformers answers here and now.
LIVE = (6, 12)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return parity_prompts()


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[list[int]]:
    return stored_answers(prompts)


def test_the_stored_answers_are_transformers_own(prompts: list[list[int]], expected: list[list[int]]) -> None:
    assert transformers_answers([prompts[n] for n in LIVE]) == [expected[n] for n in LIVE]


@pytest.fixture(scope="module", params=["aggregated", "disaggregated", "two-by-two"])
def stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    pools = {"aggregated": ("0", "1"), "disaggregated": ("1", "1"), "two-by-two": ("2", "2")}[request.param]
    # Everything crosses: no prompt is kept on decode for being short, nearly cached or behind a busy worker.
    crossing = (
        "--gateway-args",
        "--max-busy-local-tokens 0",
        "--decode-args",
        "--max-local-suffix-tokens 0 --max-slow-local-tokens 0",
    )
    with running_stack("--prefill", pools[0], "--decode", pools[1], *crossing, *FLAGS) as running:
        running.mode = request.param
        yield running


def complete(stack: Stack, prompt: list[int], request_id: str) -> list[int]:
    answer = stack.post(
        "/v1/completions",
        {
            "prompt": prompt,
            "max_tokens": MAX_TOKENS,
            "min_tokens": MAX_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            "request_id": request_id,
        },
    )
    ids: list[int] = answer["choices"][0]["token_ids"]
    return ids


def test_one_after_another(stack: Stack, prompts: list[list[int]], expected: list[list[int]]) -> None:
    for number, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        assert complete(stack, prompt, f"single-{number}") == tokens, f"prompt of {len(prompt)} tokens"


def test_sixteen_at_once(stack: Stack, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda n: complete(stack, prompts[n], f"many-{n}"), range(len(prompts))))
    wrong = [len(prompts[n]) for n, answer in enumerate(answers) if answer != expected[n]]
    assert not wrong, f"prompts of these lengths differ: {wrong}"


def test_status_tells_how_each_request_went(stack: Stack, prompts: list[list[int]]) -> None:
    """Blocks crossed between processes for every cold prompt, and every prompt token is accounted for."""
    reports = {
        (found[1], int(found[2])): entry
        for entry in stack.status()["requests"]
        if (found := re.search(r"(single|many)-(\d+)-", entry["request_id"]))
    }
    for number, prompt in enumerate(prompts):
        for kind in ("single", "many"):
            report = reports[kind, number]
            parts = ("num_cached_tokens", "num_prefill_cached_tokens", "num_external_tokens", "num_computed_tokens")
            assert sum(report[part] for part in parts) == len(prompt), report
            if stack.mode == "aggregated":
                assert (report["prefill_mode"], report["reason"]) == ("local", "aggregated_mode"), report
            else:
                assert (report["prefill_mode"], report["reason"]) == ("remote", "disaggregated"), report
                assert report["num_transferred_tokens"] + report["num_cached_tokens"] == len(prompt), report
                assert report["transport"] in ("tcp", "shm"), report
                assert report["transfer_bytes"] > 0, report


def test_blocks_return_when_idle(stack: Stack) -> None:
    deadline = time.monotonic() + 5
    while True:
        pools = [node["blocks"] for node in stack.status()["nodes"] if node["role"] in ("prefill", "decode")]
        if all(pool["used"] == pool["leased"] == pool["draining"] == 0 for pool in pools):
            return
        assert time.monotonic() < deadline, pools
        time.sleep(0.1)
