"""Real workers of a tiny random model in one process and one event loop, with real gRPC and real transfers between."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from biphase.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from biphase.settings import parse_flags
from biphase.worker.core import build_core
from biphase.worker.settings import WORKER_FLAGS, WorkerSettings
from biphase.worker.worker import Worker
from services.decode.servicer import DecodeServicer
from services.prefill.servicer import PrefillServicer

BASE_FLAGS = ("--dtype", "float32", "--num-blocks", "64", "--max-num-batched-tokens", "64", "--num-threads", "1",
    # How quick a prefill worker is depends on the machine; the tests that are about it set their own.
    "--max-slow-local-tokens", "0")  # fmt: skip


def settings(model: Path, node_id: str, *flags: str) -> WorkerSettings:
    argv = ["--model", str(model), "--node-id", node_id, *BASE_FLAGS, *flags]
    return parse_flags("test", "", WORKER_FLAGS, WorkerSettings, argv, environ={})


@contextlib.asynccontextmanager
async def running_worker(role: str, model: Path, node_id: str, *flags: str) -> AsyncIterator[Worker]:
    """A worker that serves; stopped, and found to have lost no block, at the end."""
    chosen = settings(model, node_id, *flags)
    worker = Worker(role, chosen, build_core(chosen, role))
    if role == "prefill":
        prefill = PrefillServicer(worker)
        await worker.start(lambda server: prefill_pb2_grpc.add_PrefillServicer_to_server(prefill, server))
    else:
        decode = DecodeServicer(worker)
        await worker.start(lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(decode, server))
    try:
        yield worker
        await no_block_in_use(worker)
    finally:
        # A channel that is left to the garbage collector complains once its event loop is gone, in some later test.
        for client in _clients.pop(worker.incarnation, ()):
            await client.close()
        worker.request_stop(0.1)
        await worker.run_until_stopped()


async def no_block_in_use(worker: Worker, within_seconds: float = 5.0) -> None:
    """Every block is free again, and the bookkeeping agrees with itself."""
    async with asyncio.timeout(within_seconds):
        while worker.pool.num_used or worker.leases.counts().num_leases:
            await asyncio.sleep(0.01)
    worker.manager.check_integrity()
    worker.leases.check_integrity()


def candidate(worker: Worker) -> decode_pb2.PrefillCandidate:
    return decode_pb2.PrefillCandidate(
        node_id=worker.node_id, incarnation=worker.incarnation, address=worker.identity.address
    )


@dataclass
class Answer:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    reason: str = ""
    report: common_pb2.RequestReport = field(default_factory=common_pb2.RequestReport)


def sampling(**values: object) -> common_pb2.SamplingParams:
    defaults = {"top_p": 1.0, "repetition_penalty": 1.0, "max_tokens": 8, "ignore_eos": True}
    return common_pb2.SamplingParams(**(defaults | values))  # type: ignore[arg-type]


# By incarnation of their worker.
_clients: defaultdict[str, list[Client]] = defaultdict(list)


class Client:
    """Calls Generate on one decode worker; closed with it, at the latest."""

    def __init__(self, worker: Worker) -> None:
        _clients[worker.incarnation].append(self)
        self._channel = grpc.aio.insecure_channel(worker.identity.address)
        self._stub = decode_pb2_grpc.DecodeStub(self._channel)
        self._count = 0

    def call(
        self,
        token_ids: Sequence[int],
        candidates: Sequence[decode_pb2.PrefillCandidate] = (),
        *,
        num_output: int = 0,
        cache_salt: str = "",
        **values: object,
    ) -> grpc.aio.UnaryStreamCall[decode_pb2.GenerateRequest, decode_pb2.GenerateResponse]:
        """
        Args:
            num_output: how many of token_ids are output of an earlier life.
        """
        self._count += 1
        return self._stub.Generate(
            decode_pb2.GenerateRequest(
                request_id=f"request-{self._count}",
                token_ids=token_ids,
                num_prompt_tokens=len(token_ids) - num_output,
                sampling=sampling(**values),
                prefill_candidates=candidates,
                cache_salt=cache_salt,
            )
        )

    async def generate(
        self,
        token_ids: Sequence[int],
        candidates: Sequence[decode_pb2.PrefillCandidate] = (),
        *,
        num_output: int = 0,
        cache_salt: str = "",
        **values: object,
    ) -> Answer:
        answer = Answer()
        async for message in self.call(token_ids, candidates, num_output=num_output, cache_salt=cache_salt, **values):
            answer.token_ids += message.token_ids
            answer.logprobs += message.logprobs
            answer.prompt_logprobs += message.prompt_logprobs
            if message.HasField("finish"):
                answer.reason, answer.report = message.finish.reason, message.report
        return answer

    async def close(self) -> None:
        await self._channel.close()
