"""What it costs the engine's loop that asyncio and gRPC run in its process: inter-token latency in three set-ups.

    python -m tests.bench.loop_beside_asyncio [--streams 32] [--output 192] [--rounds 3]

    alone      the engine in its thread; tokens are thrown away
    shared     the engine in its thread, and every token goes over gRPC to a client process, as a worker's do
    apart      the engine in its thread, tokens thrown away; a second process sends as many tokens at the same pace over
               gRPC to the same client: the same work for the cores, but not under the engine's interpreter lock

`shared` to `apart` is what the shared interpreter costs, and all that a process of its own for the loop could win;
`apart` to `alone` is what the cores lose to the sending. Gaps are taken in the engine's thread, one for each step, over
the steps with every stream in it.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import statistics
import sys
import threading
import time
from collections.abc import AsyncIterator
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any

import grpc.aio

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.cache.memory import BlockMemory
from biphase.cache.tensors import kv_block_bytes, kv_tensor
from biphase.engine import Engine, EngineEvent, Finished, SchedulerConfig, Tokens
from biphase.model.loader import load_model
from biphase.model.source import resolve_model
from biphase.request import Request, RequestId, SamplingParams
from biphase.rpc.v1 import decode_pb2
from biphase.runner import ModelRunner
from biphase.worker.bridge import EngineBridge, EventQueue

BLOCK_SIZE = 16
PROMPT = 128
_METHOD = "/bench.Tokens/Stream"


class Loop:
    """An event loop in a thread of this process, with a gRPC server whose streams are queues of events."""

    def __init__(self, num_streams: int) -> None:
        self._loop = asyncio.new_event_loop()
        self.queues: list[EventQueue] = []
        self._num_streams = num_streams
        self.port = 0
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.wait()
        self.bridge = EngineBridge(self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.run_forever()

    async def _serve(self) -> None:
        self.queues = [asyncio.Queue() for _ in range(self._num_streams)]
        free = iter(self.queues)

        async def stream(request: bytes, context: Any) -> AsyncIterator[bytes]:
            queue = next(free)
            while True:
                event = await queue.get()
                if isinstance(event, Finished):
                    return
                assert isinstance(event, Tokens)
                yield decode_pb2.GenerateResponse(token_ids=event.token_ids).SerializeToString()

        server = grpc.aio.server()
        handler = grpc.unary_stream_rpc_method_handler(stream)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Tokens", {"Stream": handler}),))
        self.port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        self._server = server
        self._started.set()


def client(port: int, num_streams: int) -> None:
    """Reads every stream to its end."""

    async def read() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:

            async def one() -> None:
                async for _ in channel.unary_stream(_METHOD)(b""):
                    pass

            await asyncio.gather(*(one() for _ in range(num_streams)))

    asyncio.run(read())


def pace(pipe: Connection, num_streams: int, num_tokens: int, gap: float) -> None:
    """The process of `apart`: sends what the engine would, at its pace."""
    loop = Loop(num_streams)
    pipe.send(loop.port)
    pipe.recv()
    due = time.perf_counter()
    for _ in range(num_tokens):
        due += gap
        time.sleep(max(0.0, due - time.perf_counter()))
        for queue in loop.queues:
            loop.bridge.post(queue, Tokens((7,)))
    for queue in loop.queues:
        loop.bridge.post(queue, Finished(None))  # type: ignore[arg-type]
    pipe.recv()


class Rig:
    def __init__(self, num_streams: int, output: int) -> None:
        self.num_streams, self.output = num_streams, output
        model = load_model(resolve_model(""), "bfloat16")
        spec = model.spec
        self.num_blocks = num_streams * ((PROMPT + output) // BLOCK_SIZE + 2)
        shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        memory = BlockMemory(self.num_blocks, kv_block_bytes(*shape, model.dtype), populate=True)
        self._runner = ModelRunner(
            model, kv_tensor(memory, *shape, model.dtype), block_size=BLOCK_SIZE, max_num_batched_tokens=512,
            max_num_seqs=num_streams, max_model_len=PROMPT + output + BLOCK_SIZE,
        )  # fmt: skip

    def gaps(self, loop: Loop | None, seed: int) -> list[float]:
        """Runs one load; seconds between the steps with every stream in them."""
        draw = random.Random(seed)
        manager = KVCacheManager(BlockPool(self.num_blocks), block_size=BLOCK_SIZE, namespace=b"bench")
        config = SchedulerConfig(max_num_seqs=self.num_streams, max_num_batched_tokens=512)
        ended = threading.Semaphore(0)
        steps: list[tuple[float, int]] = []
        engine = Engine(
            self._runner, manager, config,
            after_step=lambda: steps.append((time.perf_counter(), len(engine._scheduler.places.waiting))),
        )  # fmt: skip
        for i in range(self.num_streams):
            tokens = [draw.randrange(1_000, 30_000) for _ in range(PROMPT)]
            request = Request(RequestId(f"r{seed}-{i}"), tokens, SamplingParams(max_tokens=self.output))
            queue = None if loop is None else loop.queues[i]

            def sink(event: EngineEvent, queue: EventQueue | None = queue) -> None:
                if loop is not None and queue is not None:
                    loop.bridge.post(queue, event)
                if isinstance(event, Finished):
                    ended.release()

            engine.add_request(request, sink)
        engine.start()
        for _ in range(self.num_streams):
            ended.acquire()
        engine.shutdown()
        times = [at for at, waiting in steps if waiting == 0]
        # Without the last prompts' chunks, and without the end, where streams become fewer: four prompts fill a step.
        trim = self.num_streams // 4 + 2
        return [b - a for a, b in pairwise(times)][trim:-trim]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("streams", 32), ("output", 192), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    processes = multiprocessing.get_context("spawn")
    rig = Rig(given.streams, given.output)
    gap = statistics.median(rig.gaps(None, 0))
    found: dict[str, list[float]] = {"alone": [], "shared": [], "apart": []}
    for n in range(1, given.rounds + 1):
        found["alone"] += rig.gaps(None, 10 * n)
        loop = Loop(given.streams)
        reader = processes.Process(target=client, args=(loop.port, given.streams), daemon=True)
        reader.start()
        time.sleep(2.0)  # Its imports are not what is measured.
        found["shared"] += rig.gaps(loop, 10 * n + 1)
        reader.join(30)
        here, there = processes.Pipe()
        # Long enough for the prompts too.
        sender = processes.Process(target=pace, args=(there, given.streams, 3 * given.output, gap), daemon=True)
        sender.start()
        reader = processes.Process(target=client, args=(here.recv(), given.streams), daemon=True)
        reader.start()
        time.sleep(2.0)
        here.send("go")
        found["apart"] += rig.gaps(None, 10 * n + 2)
        for process in (sender, reader):
            process.kill()
            process.join()
    print(f"{given.streams} streams, {PROMPT} tokens in, {given.output} out, {given.rounds} rounds\n")
    print("| | steps | ITL p50 ms | p99 ms | p99 to alone |\n|---|---|---|---|---|")
    p99 = {name: quantile(gaps, 0.99) for name, gaps in found.items()}
    for name, gaps in found.items():
        print(f"| {name} | {len(gaps)} | {quantile(gaps, 0.5) * 1e3:.2f} | {p99[name] * 1e3:.2f} | "
              f"{p99[name] / p99['alone']:.3f} |")  # fmt: skip
    print(f"\nThe shared interpreter costs {p99['shared'] / p99['apart'] - 1:+.1%} of p99.")
    return 0


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


if __name__ == "__main__":
    sys.exit(main())
