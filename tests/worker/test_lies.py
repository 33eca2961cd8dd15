"""A prefill worker says what is not so: stale handles, another life, another prompt. Decode must not believe it."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from biphase.rpc.v1 import common_pb2
from biphase.worker.worker import Worker
from services.prefill import servicer
from tests.tiny_models import expected_tokens
from tests.worker.pair import Client, candidate, no_block_in_use, running_worker


class Lies:
    """Stands in for the message types that the prefill service builds its answers from."""

    def __init__(self, change: Callable[[dict[str, Any]], None]) -> None:
        self._change = change

    def __getattr__(self, name: str) -> Any:
        if name != "BlockHandle":
            return getattr(common_pb2, name)

        def build(**values: Any) -> common_pb2.BlockHandle:
            self._change(values)
            return common_pb2.BlockHandle(**values)

        return build


@pytest.fixture(params=["shm", "tcp"])
async def lying_pair(request: pytest.FixtureRequest, tiny_llama: Path) -> AsyncIterator[tuple[Worker, Worker, Client]]:
    async with AsyncExitStack() as stack:
        flags = ("--transports", request.param)
        prefill = await stack.enter_async_context(running_worker("prefill", tiny_llama, "prefill-0", *flags))
        decode = await stack.enter_async_context(running_worker("decode", tiny_llama, "decode-0", *flags))
        client = Client(decode)
        stack.push_async_callback(client.close)
        yield prefill, decode, client


async def assert_right_all_the_same(pair: tuple[Worker, Worker, Client], model: Path, seed: int) -> None:
    prefill, decode, client = pair
    rng = random.Random(seed)
    tokens = [rng.randrange(3, 211) for _ in range(150)]
    answer = await client.generate(tokens, [candidate(prefill)])
    assert answer.token_ids == expected_tokens(model, [tokens], 8)[0]
    assert answer.report.num_prefill_failures == 1
    assert (answer.report.prefill_mode, answer.report.reason) == ("local", "prefill_failed")
    await no_block_in_use(prefill)
    await no_block_in_use(decode)


def older(values: dict[str, Any]) -> None:
    values["generation"] += 1


def elsewhere(values: dict[str, Any]) -> None:
    # A block under no lease, which may hold anything.
    values["block_id"] = 63 - values["block_id"]


def shifted(values: dict[str, Any]) -> None:
    values["index"] += 1


@pytest.mark.parametrize("change", [older, elsewhere, shifted])
async def test_handles_of_other_blocks(
    lying_pair: tuple[Worker, Worker, Client],
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Any]], None],
) -> None:
    monkeypatch.setattr(servicer, "common_pb2", Lies(change))
    await assert_right_all_the_same(lying_pair, tiny_llama, 1)


async def test_the_endpoint_of_an_earlier_life(lying_pair: tuple[Worker, Worker, Client], tiny_llama: Path) -> None:
    prefill, decode, _ = lying_pair
    prefill.endpoint.incarnation = "an earlier life"
    if decode.settings.transports[0] == "shm":
        # What an earlier life listened on has another name, and nobody is there.
        prefill.endpoint.shm_address += "-earlier"
    await assert_right_all_the_same(lying_pair, tiny_llama, 2)


async def test_the_commit_of_another_prompt(
    lying_pair: tuple[Worker, Worker, Client], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks were read and verified by then; none of them may be used."""
    monkeypatch.setattr(servicer, "commit_hash", lambda *arguments: b"\x01" * 32)
    await assert_right_all_the_same(lying_pair, tiny_llama, 3)
