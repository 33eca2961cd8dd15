"""A block holder to read from, in this process or, run as a module, in one of its own.

As a process it takes its size from the command line, prints {"endpoint": ..., "lease_id": ...} as one line of JSON,
and then obeys lines on its standard input: "reuse N" gives block N a new generation and content, "release" ends the
lease, end of input ends it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.rpc.trust import OPEN, Trust
from biphase.transfer.channels import ReadRequest
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import LeaseTable
from biphase.transfer.reader import BlockReader
from biphase.transfer.server import BlockServer
from tests.transfer.fakes import FakePool


def layout(block_bytes: int) -> KVLayout:
    return KVLayout(b"\x07" * 32, "bfloat16", 16, 1, 1, block_bytes // 64, block_bytes)


# For those who have an argument of that name.
layout_of = layout


def content(block_id: int, generation: int, block_bytes: int) -> bytes:
    """What stands in a block: different for every block, generation and place in the block."""
    word = block_id * 1_000_003 + generation * 7_919
    return b"".join(((word + step) & 0xFFFFFFFF).to_bytes(4, "little") for step in range(64)) * (block_bytes // 256)


class Holder:
    """`num_blocks` blocks with known content, all under one lease."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_bytes: int = 4096,
        incarnation: str = "life-1",
        port: int = 0,
        transports: Sequence[str] = ("shm", "tcp"),
        trust: Trust = OPEN,
    ) -> None:
        self.memory = BlockMemory(num_blocks, block_bytes)
        self.generations = SharedGenerations(num_blocks)
        self.pool = FakePool(num_blocks, self.generations.table)
        for block_id in range(num_blocks):
            self.memory.block(block_id)[:] = content(block_id, 0, block_bytes)
        self.leases = LeaseTable(self.pool)
        self.server = BlockServer(
            self.memory,
            self.pool,
            layout(block_bytes),
            "prefill-0",
            incarnation,
            self.leases,
            port=port,
            generations=self.generations,
            transports=transports,
            trust=trust,
        )
        self.endpoint = self.server.endpoint
        self.lease_id = self.leases.open("decode-0", "life-1", range(num_blocks)).lease_id

    def reuse(self, block_id: int) -> None:
        """As if the block were evicted and filled again."""
        self.pool.reuse(block_id)
        self.memory.block(block_id)[:] = content(block_id, self.pool.generations[block_id], self.memory.block_bytes)

    def references(self) -> int:
        return sum(self.pool.references)

    def close(self) -> None:
        self.server.close()
        self.memory.close()
        self.generations.close()


class HolderProcess:
    """A Holder in a child process, to be stopped and killed."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_bytes: int = 4096,
        incarnation: str = "life-1",
        port: int = 0,
        transports: str = "shm,tcp",
    ) -> None:
        arguments = [str(num_blocks), str(block_bytes), incarnation, str(port), transports]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.holders", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        said = json.loads(self.process.stdout.readline())
        self.endpoint = endpoint_from_json(said["endpoint"])
        self.lease_id: str = said["lease_id"]

    def say(self, line: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == "done\n"

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def freeze(self) -> None:
        """Stops the process; returns when all its threads have stopped."""
        self.process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while any((task / "stat").read_text().rpartition(")")[2].split()[0] != "T" for task in tasks.iterdir()):
            time.sleep(0.001)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Destination:
    """A reader with memory of its own, poisoned, so that what landed where can be told."""

    POISON = 0xA5

    def __init__(
        self,
        num_blocks: int = 16,
        block_bytes: int = 4096,
        transports: Sequence[str] = ("shm", "tcp"),
        allow_fallback: bool = True,
        by_speed: bool = False,
        idle_seconds: float = 60.0,
        trust: Trust = OPEN,
        layout: KVLayout | None = None,
    ) -> None:
        self.memory = BlockMemory(num_blocks, block_bytes)
        self.memory.view[:] = bytes([self.POISON]) * self.memory.num_bytes
        self.reader = BlockReader(
            self.memory,
            layout or layout_of(block_bytes),
            "decode-0",
            "life-1",
            transports=transports,
            allow_fallback=allow_fallback,
            by_speed=by_speed,
            idle_seconds=idle_seconds,
            trust=trust,
        )

    def requests(self, pairs: Sequence[tuple[int, int]], generation: int = 0) -> list[ReadRequest]:
        """(source block, destination block) pairs; the index is the place in the list."""
        return [ReadRequest(index, source, generation, dest) for index, (source, dest) in enumerate(pairs)]

    def holds(self, dest_block_id: int, block_id: int, generation: int = 0) -> bool:
        return bytes(self.memory.block(dest_block_id)) == content(block_id, generation, self.memory.block_bytes)

    def is_untouched(self, dest_block_id: int) -> bool:
        return bytes(self.memory.block(dest_block_id)) == bytes([self.POISON]) * self.memory.block_bytes

    def close(self) -> None:
        self.reader.close()
        self.memory.close()


def endpoint_to_json(endpoint: Endpoint) -> dict[str, object]:
    return {
        "node_id": endpoint.node_id,
        "incarnation": endpoint.incarnation,
        "tcp_address": endpoint.tcp_address,
        "transports": list(endpoint.transports),
        "layout": endpoint.layout.to_json(),
        "shm_address": endpoint.shm_address,
        "host_id": endpoint.host_id,
    }


def endpoint_from_json(record: dict[str, object]) -> Endpoint:
    plain = Endpoint("", "", "", (), layout(64))
    fields: dict[str, object] = {**record, "transports": tuple(record["transports"])}  # type: ignore[arg-type]
    fields["layout"] = KVLayout.from_json(record["layout"])  # type: ignore[arg-type]
    return replace(plain, **fields)  # type: ignore[arg-type]


def _main() -> None:
    num_blocks, block_bytes, incarnation, port, transports = sys.argv[1:]
    holder = Holder(int(num_blocks), int(block_bytes), incarnation, int(port), transports.split(","))
    print(
        json.dumps({"endpoint": endpoint_to_json(holder.endpoint), "lease_id": holder.lease_id, "pid": os.getpid()}),
        flush=True,
    )
    for line in sys.stdin:
        word, *rest = line.split()
        if word == "reuse":
            holder.reuse(int(rest[0]))
        elif word == "release":
            holder.leases.release([holder.lease_id])
        print("done", flush=True)
    holder.close()


if __name__ == "__main__":
    _main()
