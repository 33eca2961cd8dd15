"""How fast blocks move, against what the machine can do: tcp to plain sockets, shm to memcpy, in one run.

    python -m tests.bench.bench_transfer [--megabytes 32] [--rounds 7] [--sizes 6144,65536,368640]

The holder is a process of its own on a core of its own. Source and destination blocks are scattered at random and
larger than the caches together; every number is GB/s, best and median of the rounds. The baselines move the same
blocks: "sockets" by sendmsg and recvmsg_into of many buffers a call between the same two processes, with no protocol or
check; "memcpy" by ctypes.memmove of block after block in one process. Where NIXL is installed, "nixl" is a read with
all its checks, "raw nixl" the READ alone, over the same channel. Prints JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.errors import ConfigError
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import LeaseTable
from biphase.transfer.nixl import NixlChannel
from biphase.transfer.nixl_agent import BlockIds, load_nixl
from biphase.transfer.reader import BlockReader
from biphase.transfer.server import BlockServer
from tests.transfer.fakes import FakePool
from tests.transfer.holders import endpoint_from_json, endpoint_to_json

# Bytes a call that the plain sockets try; the best counts.
_CALL_BYTES = (128 * 1024, 512 * 1024, 1024 * 1024)
_MAX_BUFFERS = 256


def layout(block_bytes: int) -> KVLayout:
    return KVLayout(b"bench", "bfloat16", 16, 1, 1, 1, block_bytes)


def scattered(num_blocks: int, seed: int) -> list[int]:
    order = list(range(num_blocks))
    random.Random(seed).shuffle(order)
    return order


def serve(num_blocks: int, block_bytes: int) -> None:
    """The holder's process: a BlockServer, and a plain socket that sends all blocks for each byte it gets.

    The byte says which of _CALL_BYTES to use.
    """
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    memory = BlockMemory(num_blocks, block_bytes, populate=True)
    memory.view[:] = os.urandom(1024 * 1024) * (memory.num_bytes // 1024**2) + bytes(memory.num_bytes % 1024**2)
    generations = SharedGenerations(num_blocks)
    pool = FakePool(num_blocks, generations.table)
    leases = LeaseTable(pool, 3600.0)
    server = BlockServer(
        memory,
        pool,
        layout(block_bytes),
        "holder",
        "life",
        leases,
        generations=generations,
        transports=("shm", "tcp", "nixl") if has_nixl() else ("shm", "tcp"),
    )
    lease = leases.open("reader", "life", range(num_blocks))
    listener = socket.create_server(("127.0.0.1", 0))
    plain = {"port": listener.getsockname()[1], "lease_id": lease.lease_id}
    print(json.dumps({**plain, "endpoint": endpoint_to_json(server.endpoint)}), flush=True)
    sock, _ = listener.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    blocks = [memory.block(block) for block in scattered(num_blocks, 1)]
    while which := sock.recv(1):
        per_call = blocks_per_call(which[0], block_bytes)
        for start in range(0, num_blocks, per_call):
            transfer_all(blocks[start : start + per_call], lambda left: sock.sendmsg(left))
    sock.close()
    listener.close()
    server.close()


def blocks_per_call(which: int, block_bytes: int) -> int:
    return max(1, min(_MAX_BUFFERS, _CALL_BYTES[which] // block_bytes))


def transfer_all(buffers: list[memoryview], move: Callable[[list[memoryview]], int]) -> None:
    left = buffers
    while left:
        moved = move(left)
        while left and moved >= left[0].nbytes:
            moved -= left[0].nbytes
            left = left[1:]
        if left and moved:
            left = [left[0][moved:], *left[1:]]


def measure(block_bytes: int, total_bytes: int, rounds: int) -> dict[str, object]:
    num_blocks = total_bytes // block_bytes
    everywhere = os.sched_getaffinity(0)
    command = [sys.executable, "-m", "tests.bench.bench_transfer", "--serve", str(num_blocks), str(block_bytes)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    os.sched_setaffinity(0, {min(everywhere)})
    said = json.loads(holder.stdout.readline())
    endpoint = endpoint_from_json(said["endpoint"])
    source, dest = scattered(num_blocks, 1), scattered(num_blocks, 2)
    memory = BlockMemory(num_blocks, block_bytes, populate=True)
    local = BlockMemory(num_blocks, block_bytes, populate=True)
    readers = {
        name: BlockReader(memory, layout(block_bytes), "reader", "life", transports=(name,), allow_fallback=False)
        for name in ("tcp", "shm")
    }
    sock = socket.create_connection(("127.0.0.1", said["port"]))
    buffers = [memory.block(block) for block in dest]

    def sockets(which: int) -> None:
        sock.send(bytes([which]))
        per_call = blocks_per_call(which, block_bytes)
        for start in range(0, num_blocks, per_call):
            transfer_all(
                buffers[start : start + per_call], lambda left: sock.recvmsg_into(left, 0, socket.MSG_WAITALL)[0]
            )

    def memcpy() -> None:
        for here, there in zip(dest, source, strict=True):
            ctypes.memmove(memory.address + here * block_bytes, local.address + there * block_bytes, block_bytes)

    requests = [ReadRequest(i, there, 0, here) for i, (here, there) in enumerate(zip(dest, source, strict=True))]

    def read(name: str) -> None:
        result = readers[name].read(endpoint, said["lease_id"], requests, 60.0).result()
        assert result.error is None and result.transport == name, result.error

    contenders: dict[str, Callable[[], None]] = {
        **{f"sockets/{size}": functools.partial(sockets, which) for which, size in enumerate(_CALL_BYTES)},
        "tcp": lambda: read("tcp"),
        "memcpy": memcpy,
        "shm": lambda: read("shm"),
    }
    nixl = None
    if "nixl" in endpoint.transports:
        context = ReaderContext(memory, layout(block_bytes), layout(block_bytes), "reader", "life", ("nixl",), False)
        nixl = NixlChannel.connect(endpoint, context, time.monotonic() + 10, lambda: None)
        contenders["nixl"] = functools.partial(read_nixl, nixl, said["lease_id"], requests)
        contenders["raw nixl"] = functools.partial(read_raw, nixl, np.array(dest, np.int32), np.array(source, np.int32))
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for lap in range(rounds + 2):
        for name, run in contenders.items():
            start = time.perf_counter()
            run()
            if lap >= 2:
                seconds[name].append(time.perf_counter() - start)
    handshake = {name: reader.peers()[0].gigabytes_per_second for name, reader in readers.items()}
    for reader in readers.values():
        reader.close()
    if nixl is not None:
        nixl.close()
    sock.close()
    holder.wait(10)
    os.sched_setaffinity(0, everywhere)
    holder.stdout.close()
    moved = num_blocks * block_bytes / 1e9
    best = {name: moved / min(laps) for name, laps in seconds.items()}
    median = {name: moved / statistics.median(laps) for name, laps in seconds.items()}
    for figures in (best, median):
        figures["sockets"] = max(value for name, value in figures.items() if name.startswith("sockets/"))
    return {
        "block_bytes": block_bytes,
        "num_blocks": num_blocks,
        "best_gigabytes_per_second": {name: round(value, 2) for name, value in best.items()},
        "median_gigabytes_per_second": {name: round(value, 2) for name, value in median.items()},
        "handshake_gigabytes_per_second": {name: round(value, 2) for name, value in handshake.items()},
        "tcp_over_sockets": {"best": ratio(best, "tcp", "sockets"), "median": ratio(median, "tcp", "sockets")},
        "shm_over_memcpy": {"best": ratio(best, "shm", "memcpy"), "median": ratio(median, "shm", "memcpy")},
        "nixl_over_raw": {"best": ratio(best, "nixl", "raw nixl"), "median": ratio(median, "nixl", "raw nixl")}
        if nixl is not None
        else None,
    }


def read_nixl(channel: NixlChannel, lease_id: str, requests: list[ReadRequest]) -> None:
    progress = ReadProgress()
    channel.read(lease_id, requests, progress, time.monotonic() + 60)
    assert len(progress.verified) == len(requests)


def read_raw(channel: NixlChannel, dest: BlockIds, source: BlockIds) -> None:
    channel._transfer(channel._local, dest, channel._remote, source, time.monotonic() + 60)


def has_nixl() -> bool:
    try:
        load_nixl()
    except ConfigError:
        return False
    return True


def ratio(values: dict[str, float], mine: str, baseline: str) -> float:
    return round(values[mine] / values[baseline], 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="6144,65536,368640")
    parser.add_argument("--serve", nargs=2, type=int, metavar=("NUM_BLOCKS", "BLOCK_BYTES"))
    arguments = parser.parse_args()
    if arguments.serve:
        serve(*arguments.serve)
        return
    sizes = [int(size) for size in arguments.sizes.split(",")]
    print(json.dumps([measure(size, arguments.megabytes * 10**6, arguments.rounds) for size in sizes], indent=2))


if __name__ == "__main__":
    main()
