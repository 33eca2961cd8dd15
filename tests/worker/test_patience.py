"""A prefill worker that is slow, starved or frozen: decode does without it as soon as that is quicker."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from biphase.cache.hashing import extend_block_hashes
from biphase.errors import BiphaseError, DeadlineExceededError, UnavailableError
from biphase.request import BlockHash
from biphase.rpc.errors import stream_method
from biphase.rpc.server import RpcServer
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2, decode_pb2, prefill_pb2, prefill_pb2_grpc
from biphase.transfer.channels import ReadRequest
from biphase.transfer.leases import Lease
from biphase.worker.worker import Worker
from services.decode.patience import Patience
from tests.fakes import free_port
from tests.tiny_models import expected_tokens
from tests.worker.pair import Client, candidate, no_block_in_use, running_worker


class Silent(prefill_pb2_grpc.PrefillServicer, blocks_pb2_grpc.BlockHolderServicer):
    """A prefill worker as it looks when it gets no processor: its port is open, and nothing comes.

    Args:
        endpoint: it gets as far as PrefillAccepted, with this; None: not even so far.
        announces: and announces these blocks.
        answers: a lease that is released, at least, it takes back.
        refuses: it is not silent at all, but says this.
    """

    def __init__(
        self,
        endpoint: common_pb2.TransferEndpoint | None = None,
        announces: Sequence[common_pb2.BlockHandle] = (),
        answers: bool = False,
        refuses: BiphaseError | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._announces = announces
        self._answers = answers
        self._refuses = refuses
        self.num_asked = 0

    @stream_method
    async def Prefill(self, message: prefill_pb2.PrefillRequest, context: Any) -> AsyncIterator[Any]:
        self.num_asked += 1
        if self._refuses is not None:
            raise self._refuses
        if self._endpoint is not None:
            accepted = prefill_pb2.PrefillAccepted(lease_id="none", lease_seconds=60.0, endpoint=self._endpoint)
            yield prefill_pb2.PrefillResponse(accepted=accepted)
            if self._announces:
                committed = prefill_pb2.BlocksCommitted(blocks=self._announces)
                yield prefill_pb2.PrefillResponse(blocks_committed=committed)
        await asyncio.sleep(60)

    async def Release(self, request: blocks_pb2.ReleaseRequest, context: Any) -> blocks_pb2.ReleaseResponse:
        if not self._answers:
            await asyncio.sleep(60)
        return blocks_pb2.ReleaseResponse()


@pytest.fixture
async def workers(tiny_llama: Path) -> AsyncIterator[tuple[Worker, Worker, Client]]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running_worker("prefill", tiny_llama, "prefill-0"))
        decode = await stack.enter_async_context(
            running_worker("decode", tiny_llama, "decode-0", "--max-slow-local-tokens", "100")
        )
        client = Client(decode)
        stack.push_async_callback(client.close)
        yield prefill, decode, client


async def listening(stack: AsyncExitStack, servicer: Silent) -> decode_pb2.PrefillCandidate:
    services = [
        lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(servicer, server),
        lambda server: blocks_pb2_grpc.add_BlockHolderServicer_to_server(servicer, server),
    ]
    server = await RpcServer.start("127.0.0.1", 0, services)
    stack.push_async_callback(server.stop, 0)
    return decode_pb2.PrefillCandidate(node_id="silent", incarnation="s", address=server.address)


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(length)]


async def test_a_silent_candidate_is_left_soon_and_asked_last(
    workers: tuple[Worker, Worker, Client], tiny_llama: Path
) -> None:
    prefill, decode, client = workers
    async with AsyncExitStack() as stack:
        servicer = Silent()
        frozen = await listening(stack, servicer)
        for number, length in enumerate((300, 310)):
            tokens = prompt(number, length)
            answer = await client.generate(tokens, [frozen, candidate(prefill)])
            assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
            assert answer.report.prefill_node_id == "prefill-0"
            # The second time the other one was asked first.
            assert answer.report.num_prefill_failures == (1, 0)[number]
            assert list(answer.report.silent_prefill_incarnations) == [["s"], []][number]
        assert servicer.num_asked == 1
        await no_block_in_use(decode)


@pytest.mark.parametrize("error", [UnavailableError("draining"), DeadlineExceededError("too late"), None])
async def test_silent_is_who_says_nothing_and_not_who_refuses(
    workers: tuple[Worker, Worker, Client], error: BiphaseError | None
) -> None:
    prefill, _, client = workers
    async with AsyncExitStack() as stack:
        if error is None:
            # Nobody listens there any more.
            gone = decode_pb2.PrefillCandidate(node_id="gone", incarnation="s", address=f"127.0.0.1:{free_port()}")
        else:
            gone = await listening(stack, Silent(refuses=error))
        answer = await client.generate(prompt(3, 300), [gone, candidate(prefill)])
        assert (answer.report.prefill_node_id, answer.report.num_prefill_failures) == ("prefill-0", 1)
        assert list(answer.report.silent_prefill_incarnations) == (["s"] if error is None else [])


async def test_who_overslept_distrusts_nobody(
    workers: tuple[Worker, Worker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, _, client = workers
    accept_seconds = Patience.accept_seconds

    def oversleep(patience: Patience, *, is_last: bool) -> float:
        # As soon as it waits for the answer, this process gets no processor.
        asyncio.get_running_loop().call_soon(time.sleep, 1.5)
        return accept_seconds(patience, is_last=is_last)

    monkeypatch.setattr(Patience, "accept_seconds", oversleep)
    gone = decode_pb2.PrefillCandidate(node_id="gone", incarnation="s", address=f"127.0.0.1:{free_port()}")
    answer = await client.generate(prompt(4, 300), [candidate(prefill), gone])
    assert (answer.report.prefill_node_id, answer.report.num_prefill_failures) == ("prefill-0", 0)


@pytest.mark.parametrize("accepts", [False, True])
async def test_a_short_prompt_does_not_wait_for_a_starved_worker(
    workers: tuple[Worker, Worker, Client], tiny_llama: Path, accepts: bool
) -> None:
    prefill, decode, client = workers
    async with AsyncExitStack() as stack:
        starved = await listening(stack, Silent(prefill.endpoint if accepts else None))
        # While others are decoded.
        other = asyncio.create_task(client.generate(prompt(7, 20), [candidate(prefill)], max_tokens=400))
        while not decode.engine.stats().num_running:
            await asyncio.sleep(0.005)
        tokens = prompt(8, 60)
        answer = await client.generate(tokens, [starved])
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
        report = answer.report
        assert (report.prefill_mode, report.reason, report.num_prefill_failures) == ("local", "prefill_slow", 0)
        assert report.num_computed_tokens == 60
        assert len((await other).token_ids) == 400
        await no_block_in_use(decode)


@pytest.mark.parametrize(
    ("is_first", "answers", "others_fail"), [(False, False, False), (True, True, False), (True, False, True)]
)
async def test_a_read_that_waits_behind_anothers_takes_no_connection_from_it(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool, answers: bool, others_fail: bool
) -> None:
    """One connection serves all reads from a worker, one by one: it is closed only when ours runs and nothing else is
    heard of the worker."""
    monkeypatch.setattr(Patience, "prefill_seconds", lambda *_, **__: 0.3)
    async with AsyncExitStack() as stack:
        tcp = ("--transports", "tcp")
        prefill = await stack.enter_async_context(running_worker("prefill", tiny_llama, "prefill-0", *tcp))
        decode = await stack.enter_async_context(
            running_worker("decode", tiny_llama, "decode-0", *tcp, "--max-slow-local-tokens", "100")
        )
        client = Client(decode)
        # A long read, as far as those behind it can tell: nothing is sent before `goes_on`.
        goes_on, begin_io = threading.Event(), prefill.leases.begin_io
        stack.callback(goes_on.set)

        def begin_later(lease_id: str) -> Lease | None:
            goes_on.wait(20)
            return begin_io(lease_id)

        prefill.leases.begin_io = begin_later  # type: ignore[method-assign]
        sources, places = prefill.pool.allocate(2), decode.pool.allocate(2)
        assert sources is not None and places is not None
        lease = prefill.leases.open(decode.node_id, decode.incarnation, sources, adopt=True)
        wanted = [
            ReadRequest(index, block_id, prefill.pool.generations[block_id], place)
            for index, (block_id, place) in enumerate(zip(sources, places, strict=True))
        ]
        tokens = prompt(8, 60)
        hashes: list[BlockHash] = []
        extend_block_hashes(hashes, decode.root_hash(""), tokens, decode.settings.block_size)
        announced = common_pb2.BlockHandle(index=0, block_id=0, generation=0, block_hash=hashes[0])
        starved = await listening(stack, Silent(prefill.endpoint, [announced], answers))
        if is_first:
            answering = asyncio.create_task(client.generate(tokens, [starved]))
            while not decode.reader.peers():
                await asyncio.sleep(0.01)
        long_read = decode.reader.read(prefill.endpoint, lease.lease_id, wanted, 20.0)
        if not is_first:
            answering = asyncio.create_task(client.generate(tokens, [starved]))
        if answers:
            # Ours is waited for, now that it runs: blocks must not be given up before.
            await asyncio.sleep(1.5)
            assert not answering.done() and not long_read.done()
            goes_on.set()
        answer = await answering
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
        assert answer.report.reason == "prefill_slow"
        goes_on.set()
        result = await asyncio.wrap_future(long_read)
        assert (result.error is not None) == others_fail
        assert len(result.verified) == (0 if others_fail else 2)
        prefill.leases.release([lease.lease_id])
        decode.pool.release(places)
        await no_block_in_use(decode)
        await no_block_in_use(prefill)


async def test_prompt_logprobs_are_whole_when_decode_takes_over(workers: tuple[Worker, Worker, Client]) -> None:
    _, _, client = workers
    async with AsyncExitStack() as stack:
        starved = await listening(stack, Silent())
        answer = await client.generate(prompt(9, 40), [starved], prompt_logprobs=1)
        assert len(answer.prompt_logprobs) == 39


def test_bounds() -> None:
    patience = Patience(256)
    assert patience.accept_seconds(is_last=False) == 0.5
    assert patience.accept_seconds(is_last=True) == 5.0
    for _ in range(50):
        patience.accepted("busy", 0.2)
    # On a machine where accepting takes long, silence means less.
    assert 1.9 < patience.accept_seconds(is_last=False) <= 2.0
    assert patience.prefill_seconds(257, 1000.0, is_decoding=True) is None
    assert patience.prefill_seconds(100, 1000.0, is_decoding=True) == pytest.approx(0.3)
    assert patience.prefill_seconds(100, 1000.0, is_decoding=False) == pytest.approx(1.9)
    patience.was_silent("frozen", 10.0)
    assert patience.is_distrusted("frozen", 14.0) and not patience.is_distrusted("frozen", 15.0)
    assert not patience.is_distrusted("busy", 14.0)
    patience.accepted("frozen", 0.1)
    assert not patience.is_distrusted("frozen", 14.0)
