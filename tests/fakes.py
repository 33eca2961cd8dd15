"""Stand-ins for workers: real gRPC servers speaking the real protocol, with tokens, delays and failures by script."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from biphase.errors import BiphaseError
from biphase.rpc.errors import abort_with
from biphase.rpc.server import RpcServer
from biphase.rpc.v1 import common_pb2, decode_pb2, decode_pb2_grpc, node_pb2, node_pb2_grpc
from biphase.telemetry import context as carried

NAMESPACE = b"n" * 32
BLOCK_SIZE = 16
_numbers = itertools.count()

# Given the request, the token ids to say (one message each).
Script = Callable[[decode_pb2.GenerateRequest], Sequence[int]]


@dataclass
class Seen:
    """One Generate call as it was received."""

    request: decode_pb2.GenerateRequest
    deadline_seconds: float | None
    cancelled: bool = False
    finished: bool = False
    # What the call carried: the request's id, and its place in a trace.
    carried: tuple[str, str] = ("", "")


@dataclass
class FakeDecode:
    """A decode worker. `script` decides what it says; the rest is for failures and timing."""

    script: Script
    node_id: str = ""
    role: str = "decode"
    namespace: bytes = NAMESPACE
    family: bytes = b""
    vocab_size: int = 49152
    tokenizer_digest: str = ""
    max_model_len: int = 2048
    max_num_seqs: int = 64
    tokens_per_message: int = 1
    # Before the first token, and between tokens.
    first_delay_seconds: float = 0.0
    delay_seconds: float = 0.0
    # Dies (drops all connections) after so many tokens of any call.
    dies_after: int | None = None
    # Refuses every call with this.
    refuses: BiphaseError | None = None
    # Raises in the middle, after so many tokens.
    fails_after: tuple[int, BiphaseError] | None = None
    state: str = "ready"
    report: common_pb2.RequestReport = field(default_factory=common_pb2.RequestReport)
    seen: list[Seen] = field(default_factory=list)
    # How often it was told to forget its cache, and whether it can.
    num_resets: int = 0
    keeps_cache: bool = False
    incarnation: str = ""
    address: str = ""
    _server: RpcServer | None = None

    async def start(self, port: int = 0) -> FakeDecode:
        number = next(_numbers)
        self.node_id = self.node_id or f"{self.role}-{number}"
        self.incarnation = f"inc-{number}"
        self._server = await RpcServer.start(
            "127.0.0.1",
            port,
            [
                lambda server: decode_pb2_grpc.add_DecodeServicer_to_server(_Decode(self), server),
                lambda server: node_pb2_grpc.add_NodeServicer_to_server(_Node(self), server),
            ],
        )
        self.address = self._server.address
        return self

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)
            self._server = None

    @property
    def num_running(self) -> int:
        return sum(not (seen.cancelled or seen.finished) for seen in self.seen)


class _Node(node_pb2_grpc.NodeServicer):
    def __init__(self, fake: FakeDecode) -> None:
        self._fake = fake

    async def GetInfo(self, request: Any, context: Any) -> node_pb2.NodeInfo:
        fake = self._fake
        return node_pb2.NodeInfo(
            node_id=fake.node_id,
            role=fake.role,
            incarnation=fake.incarnation,
            pid=4242,
            address=fake.address,
            version="0.0.0",
            layout=common_pb2.KVLayout(
                namespace=fake.namespace, family=fake.family, kv_dtype="float32", block_size_tokens=BLOCK_SIZE
            ),
            model=node_pb2.ModelInfo(
                model="fake",
                served_names=["fake"],
                vocab_size=fake.vocab_size,
                max_model_len_tokens=fake.max_model_len,
                dtype="float32",
                tokenizer_digest=fake.tokenizer_digest,
            ),
            num_blocks=1000,
            max_num_seqs=fake.max_num_seqs,
            max_num_batched_tokens=512,
        )

    async def GetStatus(self, request: Any, context: Any) -> node_pb2.NodeStatus:
        return node_pb2.NodeStatus(
            state=self._fake.state,
            num_blocks=1000,
            num_used_blocks=10,
            num_leased_blocks=2,
            num_running=self._fake.num_running,
            prefill_tokens_per_second=1000.0,
            peers=[node_pb2.PeerTransport(node_id="prefill-x", transport="shm", gigabytes_per_second=5.0)],
        )

    async def ResetCache(self, request: Any, context: Any) -> node_pb2.ResetCacheResponse:
        self._fake.num_resets += 1
        return node_pb2.ResetCacheResponse(is_empty=not self._fake.keeps_cache)


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, fake: FakeDecode) -> None:
        self._fake = fake

    async def Generate(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        fake = self._fake
        seen = Seen(request, context.time_remaining())
        seen.carried = (carried.request_id.get(), carried.traceparent.get())
        fake.seen.append(seen)
        try:
            if fake.refuses is not None:
                await abort_with(context, fake.refuses)
            async for message in self._messages(request, context):
                yield message
            seen.finished = True
        finally:
            seen.cancelled = not seen.finished

    async def _messages(
        self, request: decode_pb2.GenerateRequest, context: Any
    ) -> AsyncIterator[decode_pb2.GenerateResponse]:
        fake, sampling = self._fake, request.sampling
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        said = len(request.token_ids) - request.num_prompt_tokens
        tokens = list(fake.script(request))
        ending = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(sampling.eos_token_ids))
        report = common_pb2.RequestReport()
        report.CopyFrom(fake.report)
        report.decode_node_id = fake.node_id
        first = True
        batch: list[int] = []
        finish: decode_pb2.Finish | None = None
        await asyncio.sleep(fake.first_delay_seconds)
        for place in range(said, sampling.max_tokens):
            token_id = tokens[place % len(tokens)] if tokens else 0
            batch.append(token_id)
            if token_id in ending and place + 1 >= sampling.min_tokens:
                finish = decode_pb2.Finish(reason="stop")
                if token_id in sampling.stop_token_ids:
                    finish.stop_token_id = token_id
            elif place + 1 == sampling.max_tokens:
                finish = decode_pb2.Finish(reason="length")
            if len(batch) == fake.tokens_per_message or finish is not None:
                message = decode_pb2.GenerateResponse(token_ids=batch)
                if sampling.HasField("logprobs"):
                    message.logprobs.extend(
                        fake_logprobs(token_id, sampling.logprobs, sampling.logprob_token_ids) for token_id in batch
                    )
                if first:
                    message.report.CopyFrom(report)
                    if sampling.HasField("prompt_logprobs"):
                        message.prompt_logprobs.extend(
                            fake_logprobs(token_id, sampling.prompt_logprobs) for token_id in prompt[1:]
                        )
                first, batch = False, []
                yield message
            if fake.dies_after is not None and place + 1 - said >= fake.dies_after:
                fake.dies_after = None
                asyncio.get_running_loop().create_task(fake.stop())
                await asyncio.sleep(30)
            if fake.fails_after is not None and place + 1 >= fake.fails_after[0]:
                await abort_with(context, fake.fails_after[1])
            if finish is not None:
                yield decode_pb2.GenerateResponse(finish=finish, report=report)
                return
            if fake.delay_seconds:
                await asyncio.sleep(fake.delay_seconds)


def fake_logprobs(token_id: int, count: int, named: Sequence[int] = ()) -> common_pb2.TokenLogprobs:
    """The token itself at -0.5, then itself and its successors as the likeliest, then the named ones."""
    others = [token_id + place for place in range(count)]
    others += [other for other in named if other not in others]
    return common_pb2.TokenLogprobs(
        token_ids=[token_id, *others], logprobs=[-0.5, *[-0.5 - place for place in range(len(others))]], rank=1
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def status_of(error: grpc.aio.AioRpcError) -> str:
    return str(error.code().name)
