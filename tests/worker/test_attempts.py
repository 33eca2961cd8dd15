"""The same request more than once at a worker: after a freeze or a lost connection the earlier call may still be there.

What belongs to one call must never reach the other: not its end, and above all not its claim that blocks are filled.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from pathlib import Path

import grpc
import pytest

from biphase.rpc.v1 import decode_pb2
from biphase.transfer.channels import ReadResult
from biphase.worker.reads import reads_ended
from tests.tiny_models import expected_tokens
from tests.worker.pair import Client, candidate, no_block_in_use, running_worker


def prompt(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 211) for _ in range(length)]


async def test_a_second_call_for_a_request_outlives_the_first(tiny_llama: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running_worker("prefill", tiny_llama, "prefill-0"))
        decode = await stack.enter_async_context(running_worker("decode", tiny_llama, "decode-0"))
        first, second = Client(decode), Client(decode)
        stack.push_async_callback(first.close)
        stack.push_async_callback(second.close)
        tokens = prompt(1, 300)
        # Both clients number their requests from one: the ids are equal.
        abandoned = first.call(tokens, [candidate(prefill)], max_tokens=60)
        await abandoned.read()
        again = asyncio.create_task(second.generate(tokens, [candidate(prefill)], max_tokens=60))
        await asyncio.sleep(0.01)
        abandoned.cancel()
        answer = await again
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 60)[0]
        assert answer.reason == "length"


async def test_two_decode_workers_ask_for_the_same_request(tiny_llama: Path) -> None:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(
            running_worker("prefill", tiny_llama, "prefill-0", "--max-num-batched-tokens", "16", "--max-num-seqs", "8")
        )
        clients = []
        for name in ("decode-0", "decode-1"):
            decode = await stack.enter_async_context(running_worker("decode", tiny_llama, name))
            clients.append(Client(decode))
            stack.push_async_callback(clients[-1].close)
        tokens = prompt(2, 400)
        abandoned = clients[0].call(tokens, [candidate(prefill)])
        await asyncio.sleep(0.02)
        again = asyncio.create_task(clients[1].generate(tokens, [candidate(prefill)]))
        await asyncio.sleep(0.005)
        abandoned.cancel()
        answer = await again
        assert answer.token_ids == expected_tokens(tiny_llama, [tokens], 8)[0]
        assert (answer.report.prefill_mode, answer.report.num_prefill_failures) == ("remote", 0)


async def test_an_answer_that_was_given_up_is_an_error_and_no_finish(tiny_llama: Path) -> None:
    """Only the caller's going away aborts a request. Whatever else did: a cut answer must not look like a whole one."""
    async with AsyncExitStack() as stack:
        decode = await stack.enter_async_context(running_worker("decode", tiny_llama, "decode-0"))
        client = Client(decode)
        stack.push_async_callback(client.close)
        call = client.call(prompt(3, 20), max_tokens=200)
        await call.read()
        (request_id,) = decode._active
        decode.engine.abort(request_id)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while isinstance(message := await call.read(), decode_pb2.GenerateResponse):
                assert not message.HasField("finish")
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await no_block_in_use(decode)


async def test_waiting_for_reads_outlasts_cancellations_and_passes_them_on() -> None:
    read: asyncio.Future[ReadResult] = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(reads_ended([read]))
    for _ in range(2):
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.sleep(0)
        assert not waiting.done(), "blocks would be given up while bytes may land in them"
    read.set_result(ReadResult((), (), (), 0, 0.0, "none", None))
    with pytest.raises(asyncio.CancelledError):
        await waiting
