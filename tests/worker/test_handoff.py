"""The hand-off between a prefill and a decode worker: right tokens whatever happens, every block accounted for."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from biphase.index.registry import NodeLoad, new_incarnation
from biphase.request import Request
from biphase.rpc.v1 import decode_pb2, prefill_pb2
from biphase.transfer.channels import ReadResult
from biphase.transfer.collector import BlockCollector
from biphase.worker.worker import Worker
from services.prefill.servicer import PrefillServicer
from tests.tiny_models import expected_tokens
from tests.worker.pair import Client, candidate, no_block_in_use, running_worker, sampling

DEAD = decode_pb2.PrefillCandidate(node_id="dead", incarnation="x", address="127.0.0.1:1")


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(length)]


@pytest.fixture(params=["shm", "tcp"])
async def pair(request: pytest.FixtureRequest, tiny_llama: Path) -> AsyncIterator[tuple[Worker, Worker, Client]]:
    async with AsyncExitStack() as stack:
        flags = ("--transports", request.param)
        prefill = await stack.enter_async_context(running_worker("prefill", tiny_llama, "prefill-0", *flags))
        decode = await stack.enter_async_context(running_worker("decode", tiny_llama, "decode-0", *flags))
        client = Client(decode)
        stack.push_async_callback(client.close)
        yield prefill, decode, client


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 200])
async def test_same_tokens_as_transformers(pair: tuple[Worker, Worker, Client], tiny_llama: Path, length: int) -> None:
    prefill, decode, client = pair
    tokens = prompt(length, length)
    answer = await client.generate(tokens, [candidate(prefill)])
    assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
    assert answer.reason == "length"
    report = answer.report
    assert (report.prefill_mode, report.reason) == ("remote", "disaggregated")
    assert report.prefill_node_id == "prefill-0"
    assert report.transport == decode.settings.transports[0]
    assert report.num_transferred_tokens == report.num_computed_tokens == length
    assert report.num_cached_tokens == report.num_external_tokens == 0
    assert report.transfer_bytes == -(-length // 16) * decode.layout.block_bytes
    await no_block_in_use(prefill)
    await no_block_in_use(decode)


async def test_reads_that_end_just_before_the_last_message_is_taken_count(
    pair: tuple[Worker, Worker, Client], tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A future is done one turn of the event loop before those who wait for it hear of it."""
    prefill, _, client = pair
    reads: list[tuple[Future[ReadResult], asyncio.Future[ReadResult]]] = []
    commit = BlockCollector.commit

    def wrap_future(job: Future[ReadResult]) -> asyncio.Future[ReadResult]:
        reads.append((job, asyncio.get_running_loop().create_future()))
        return reads[-1][1]

    def all_end_now(collector: BlockCollector, num_tokens: int, chain_hash: bytes) -> None:
        for job, read in reads:
            read.set_result(job.result(timeout=10))
        commit(collector, num_tokens, chain_hash)

    monkeypatch.setattr(asyncio, "wrap_future", wrap_future)
    monkeypatch.setattr(BlockCollector, "commit", all_end_now)
    tokens = prompt(1, 200)
    answer = await client.generate(tokens, [candidate(prefill)])
    assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
    assert reads
    assert answer.report.prefill_mode == "remote"


async def test_only_the_missing_suffix_travels(pair: tuple[Worker, Worker, Client], tiny_llama: Path) -> None:
    prefill, decode, client = pair
    first = prompt(1, 100)
    await client.generate(first, [candidate(prefill)])
    longer = first + prompt(2, 90)
    answer = await client.generate(longer, [candidate(prefill)])
    assert answer.token_ids == expected_tokens(tiny_llama, [longer], 8)[0]
    # Both sides keep the 6 full blocks of the first prompt; decode kept what it generated after it besides.
    assert answer.report.num_cached_tokens == 96
    assert answer.report.num_transferred_tokens == 94
    assert answer.report.num_computed_tokens == 94
    assert answer.report.transfer_bytes == 6 * decode.layout.block_bytes


async def test_many_at_once(pair: tuple[Worker, Worker, Client], tiny_llama: Path) -> None:
    prefill, _, client = pair
    prompts = [prompt(seed, 10 + 11 * seed) for seed in range(10)]
    answers = await asyncio.gather(*(client.generate(tokens, [candidate(prefill)]) for tokens in prompts))
    assert [answer.token_ids for answer in answers] == expected_tokens(tiny_llama, prompts, 8)


async def test_first_candidate_dead_second_serves(pair: tuple[Worker, Worker, Client], tiny_llama: Path) -> None:
    prefill, _, client = pair
    tokens = prompt(3, 70)
    answer = await client.generate(tokens, [DEAD, candidate(prefill)])
    assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
    assert answer.report.num_prefill_failures == 1
    assert answer.report.prefill_node_id == "prefill-0"


async def test_no_candidate_left_decode_prefills(pair: tuple[Worker, Worker, Client], tiny_llama: Path) -> None:
    _, _, client = pair
    tokens = prompt(4, 70)
    answer = await client.generate(tokens, [DEAD])
    assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
    assert (answer.report.prefill_mode, answer.report.reason) == ("local", "prefill_failed")
    assert answer.report.num_computed_tokens == 70
    assert answer.report.num_transferred_tokens == 0


async def test_nearly_cached_prompts_stay_here(pair: tuple[Worker, Worker, Client]) -> None:
    prefill, _, client = pair
    tokens = prompt(5, 80)
    await client.generate(tokens, [candidate(prefill)])
    again = await client.generate(tokens, [candidate(prefill)])
    assert (again.report.prefill_mode, again.report.reason) == ("local", "cached")
    assert again.report.num_cached_tokens == 64
    assert again.report.num_computed_tokens == 16


async def test_logprobs_cross_with_the_first_token(pair: tuple[Worker, Worker, Client]) -> None:
    prefill, _, client = pair
    tokens = prompt(6, 50)
    wanted = {"logprobs": 2, "prompt_logprobs": 1}
    split = await client.generate(tokens, [candidate(prefill)], **wanted)
    alone = await client.generate(tokens, [], **wanted)
    assert split.token_ids == alone.token_ids
    assert len(split.logprobs) == len(split.token_ids)
    assert len(split.prompt_logprobs) == len(alone.prompt_logprobs) == 49
    for ours, theirs in zip(
        split.logprobs + split.prompt_logprobs, alone.logprobs + alone.prompt_logprobs, strict=True
    ):
        assert list(ours.token_ids) == list(theirs.token_ids)
        assert list(ours.logprobs) == pytest.approx(list(theirs.logprobs), abs=1e-3)


async def test_a_moved_stream_goes_on_exactly(pair: tuple[Worker, Worker, Client]) -> None:
    prefill, _, client = pair
    tokens = prompt(7, 40)
    drawn = {"temperature": 1.0, "seed": 11}
    whole = await client.generate(tokens, [candidate(prefill)], max_tokens=20, **drawn)
    rest = await client.generate(
        tokens + whole.token_ids[:7], [candidate(prefill)], num_output=7, max_tokens=20, **drawn
    )
    assert whole.token_ids[7:] == rest.token_ids


@pytest.mark.parametrize("after_messages", [0, 1, 3])
async def test_a_cancelled_call_leaves_no_block(
    pair: tuple[Worker, Worker, Client], tiny_llama: Path, after_messages: int
) -> None:
    prefill, decode, client = pair
    call = client.call(prompt(8, 400), [candidate(prefill)], max_tokens=100)
    for _ in range(after_messages):
        await call.read()
    if not after_messages:
        await asyncio.sleep(0.02)
    call.cancel()
    await no_block_in_use(prefill)
    await no_block_in_use(decode)
    tokens = prompt(9, 30)
    answer = await client.generate(tokens, [candidate(prefill)])
    assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]


async def test_calls_cancelled_while_they_end_leave_no_block(pair: tuple[Worker, Worker, Client]) -> None:
    """What a client does that has its last token: it hangs up, and the call's own ending is cut short."""
    prefill, decode, client = pair

    async def hang_up_at_the_end(seed: int) -> None:
        call = client.call(prompt(seed, 20 + seed), [candidate(prefill)], max_tokens=2)
        while isinstance(message := await call.read(), decode_pb2.GenerateResponse):
            if message.HasField("finish"):
                call.cancel()
                return

    await asyncio.gather(*(hang_up_at_the_end(seed) for seed in range(24)))
    await no_block_in_use(decode)
    await no_block_in_use(prefill)


async def test_a_prefill_whose_reader_leaves_with_its_last_message_offers_its_blocks(
    pair: tuple[Worker, Worker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode, _ = pair
    offered: list[int] = []
    offer = prefill.offer

    def note(request: Request, num_seen_tokens: int) -> None:
        offered.append(request.num_prompt_tokens)
        offer(request, num_seen_tokens)

    monkeypatch.setattr(prefill, "offer", note)
    message = prefill_pb2.PrefillRequest(
        request_id="r",
        token_ids=prompt(1, 40),
        num_prompt_tokens=40,
        sampling=sampling(),
        layout=decode.layout.to_proto(),
        reader_node_id=decode.node_id,
        reader_incarnation=decode.incarnation,
    )
    # As gRPC leaves it where the call is cancelled while this message is sent.
    answers = PrefillServicer(prefill).Prefill(message, None)
    while not (await anext(answers)).HasField("done"):
        pass
    await answers.aclose()
    assert offered == [40]
    await no_block_in_use(prefill)


async def test_a_reader_that_vanishes_loses_its_lease(pair: tuple[Worker, Worker, Client]) -> None:
    """The registry says that the reader is gone long before the lease would expire."""
    prefill, decode, client = pair
    lease = prefill.leases.open("ghost", "1", [])
    for _ in range(4):
        prefill._on_nodes([])
    assert not prefill.leases.is_open(lease.lease_id)
    del decode, client


async def test_a_reader_that_has_begun_another_life_loses_its_lease_at_once(
    pair: tuple[Worker, Worker, Client],
) -> None:
    prefill, decode, _ = pair
    first, other = new_incarnation(), new_incarnation()
    old = prefill.leases.open(decode.node_id, first, [])
    young = prefill.leases.open(decode.node_id, other, [])
    prefill._on_nodes([replace(decode.identity.record("ready", NodeLoad()), incarnation=other)])
    assert not prefill.leases.is_open(old.lease_id)
    assert prefill.leases.is_open(young.lease_id)
    # A record that is older than the reader says nothing yet, and one look that finds it makes up for all before.
    for life in (first, first, first, other, first, first, first):
        prefill._on_nodes([replace(decode.identity.record("ready", NodeLoad()), incarnation=life)])
        assert prefill.leases.is_open(young.lease_id)
    prefill.leases.release([young.lease_id])


async def test_another_model_is_refused_by_name(
    pair: tuple[Worker, Worker, Client], tiny_qwen: Path, tiny_llama: Path
) -> None:
    _, _, client = pair
    async with running_worker("prefill", tiny_qwen, "prefill-other") as other:
        tokens = prompt(10, 40)
        answer = await client.generate(tokens, [candidate(other)])
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
        assert answer.report.reason == "prefill_failed"


async def test_bad_input_is_refused(pair: tuple[Worker, Worker, Client]) -> None:
    prefill, _, client = pair
    for tokens, word in (([5, 211], "vocabulary"), ([], "no tokens"), ([7] * 600, "512")):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(tokens, [candidate(prefill)])
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert word in (caught.value.details() or "")


async def test_a_draining_worker_takes_nothing_new(pair: tuple[Worker, Worker, Client]) -> None:
    prefill, decode, client = pair
    stream = client.call(prompt(11, 40), [candidate(prefill)], max_tokens=60)
    first = await stream.read()
    assert isinstance(first, decode_pb2.GenerateResponse)
    decode._state = "draining"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(prompt(12, 10), [])
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    num_tokens = len(first.token_ids)
    while isinstance(message := await stream.read(), decode_pb2.GenerateResponse):
        num_tokens += len(message.token_ids)
    assert num_tokens == 60
