"""A prefill and a decode worker whose blocks differ in size: the same tokens as ever."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from biphase.worker.worker import Worker
from tests.tiny_models import expected_tokens
from tests.worker.pair import Client, candidate, no_block_in_use, running_worker


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(length)]


Pair = tuple[Worker, Worker, Client]


@pytest.fixture(params=[(16, 32, "shm"), (32, 16, "tcp"), (48, 16, "shm")], ids=str)
async def pair(request: pytest.FixtureRequest, tiny_llama: Path) -> AsyncIterator[Pair]:
    ours, theirs, transport = request.param
    common = ("--transports", transport, "--max-local-suffix-tokens", "0")
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            running_worker("prefill", tiny_llama, "prefill-0", *common, "--block-size", str(theirs))
        )
        decode = await stack.enter_async_context(
            running_worker("decode", tiny_llama, "decode-0", *common, "--block-size", str(ours))
        )
        client = Client(decode)
        stack.push_async_callback(client.close)
        yield prefill, decode, client


async def test_same_tokens_with_blocks_of_another_size(pair: Pair, tiny_llama: Path) -> None:
    prefill, decode, client = pair
    for length in (1, 16, 33, 64, 200):
        tokens = prompt(length, length)
        answer = await client.generate(tokens, [candidate(prefill)], max_tokens=40)
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 40)[0], length
        report = answer.report
        assert (report.prefill_mode, report.reason) == ("remote", "disaggregated")
        num_blocks = -(-length // prefill.settings.block_size)
        assert report.transfer_bytes == num_blocks * prefill.layout.block_bytes
        await no_block_in_use(prefill)
        await no_block_in_use(decode)


async def test_what_decode_has_itself_is_left_alone(pair: Pair, tiny_llama: Path) -> None:
    """Its cached tokens may end in the middle of one of the prefill worker's blocks."""
    prefill, decode, client = pair
    first = prompt(1, 50)
    await client.generate(first, [candidate(prefill)])
    longer = first[:48] + prompt(2, 90)
    answer = await client.generate(longer, [candidate(prefill)])
    assert answer.token_ids == expected_tokens(tiny_llama, [longer], 8)[0]
    assert answer.report.num_cached_tokens == 48 // decode.settings.block_size * decode.settings.block_size
    again = await client.generate(first, [])
    assert again.token_ids == expected_tokens(tiny_llama, [first], 8)[0]


async def test_sizes_that_do_not_fit_are_refused_by_name(pair: Pair, tiny_llama: Path) -> None:
    _, decode, client = pair
    async with running_worker("prefill", tiny_llama, "prefill-odd", "--block-size", "40") as odd:
        tokens = prompt(3, 60)
        answer = await client.generate(tokens, [candidate(odd)])
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
        assert (answer.report.prefill_mode, answer.report.reason) == ("local", "prefill_failed")
    await no_block_in_use(decode)
