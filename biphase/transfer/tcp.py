"""The tcp transport: blocks straight from the holder's memory to the reader's, many per system call.

Owns the READ exchange on both sides. Each batch of payload is followed by its blocks' checksums, each READ by their
generations, read again after the last payload was sent; the reader compares both before it calls a block verified.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

from biphase.cache.memory import BlockMemory
from biphase.transfer import frames
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick, sort_out
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind, Status
from biphase.transfer.handshake import Welcome, introduce, measure_pattern
from biphase.transfer.leases import HolderPool, LeaseTable, generations_of
from biphase.transfer.sockets import DeadlineSocket
from biphase.transfer.tls import connect

_BATCH_BYTES = 512 * 1024
_BATCHES_PER_READ = frames.MAX_READ_BLOCKS // frames.MAX_BATCH_BLOCKS
# A batch that is not out after this long has a reader that is stuck.
BATCH_SECONDS = 10.0


def batch_blocks(block_bytes: int) -> int:
    """Blocks in a batch: half a megabyte: few system calls, and still in the cache when it is checked."""
    return max(1, min(frames.MAX_BATCH_BLOCKS, _BATCH_BYTES // block_bytes))


class TcpChannel:
    """The reader's side."""

    transport = "tcp"

    def __init__(
        self, sock: DeadlineSocket, context: ReaderContext, welcome: Welcome, gigabytes_per_second: float
    ) -> None:
        self._socket = sock
        self._memory = context.memory
        self._batch_blocks = welcome.batch_blocks
        self.gigabytes_per_second = gigabytes_per_second

    @classmethod
    def connect(cls, endpoint: Endpoint, context: ReaderContext, deadline: float, on_tick: Tick) -> TcpChannel:
        """
        Raises:
            LayoutMismatchError, StaleHandleError, UnauthorizedError: refused.
            TransferFailedError: no connection in time.
        """
        trust = context.trust
        sock = connect(endpoint.tcp_address, endpoint.node_id, deadline, on_tick, trust.tls)
        try:
            welcome = introduce(sock, endpoint, context.hello(endpoint, "tcp"), deadline, trust.token)
            return cls(sock, context, welcome, measure_pattern(sock, deadline))
        except BaseException:
            sock.close()
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def abort(self) -> None:
        self._socket.abort()

    def read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        # The first READ is short, so that bytes flow while the others are written; each is sent one ahead.
        edges = [0, 2 * self._batch_blocks]
        while edges[-1] < len(blocks):
            edges.append(edges[-1] + _BATCHES_PER_READ * self._batch_blocks)
        parts = [blocks[start:end] for start, end in itertools.pairwise(edges)]
        self._ask(lease_id, parts[0], deadline)
        for part, following in itertools.zip_longest(parts, parts[1:]):
            if following is not None:
                self._ask(lease_id, following, deadline)
            self._receive(part, progress, deadline)

    def _ask(self, lease_id: str, blocks: Sequence[ReadRequest], deadline: float) -> None:
        frame = frames.pack_read(lease_id, [block.block_id for block in blocks], [block.generation for block in blocks])
        self._socket.send_bytes(frame, deadline)

    def _receive(self, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        sock, size = self._socket, self._batch_blocks
        head = sock.recv(frames.HEADER_BYTES + len(blocks), deadline)
        kind, length = frames.unpack_header(head[: frames.HEADER_BYTES], frames.MAX_READ_BLOCKS)
        if length != len(blocks):
            raise FrameError(f"a {kind.name} frame of {length} bytes in place of DATA for {len(blocks)} blocks")
        good = sort_out(kind, head[frames.HEADER_BYTES :], blocks, progress)
        corrupt: set[int] = set()
        for start in range(0, len(good), size):
            corrupt.update(self._receive_batch(good[start : start + size], deadline))
        generations = frames.unpack_words(sock.recv(len(good) * frames.WORD_BYTES, deadline))
        if not corrupt and generations == [block.generation for block in good]:
            progress.verified.extend([block.index for block in good])
            return
        for block, generation in zip(good, generations, strict=True):
            if generation != block.generation:
                progress.stale.append(block.index)
            elif block.index in corrupt:
                progress.corrupt.append(block.index)
            else:
                progress.verified.append(block.index)

    def _receive_batch(self, batch: Sequence[ReadRequest], deadline: float) -> list[int]:
        """Returns the indexes of blocks whose checksum is wrong."""
        payloads = self._memory.blocks([block.dest_block_id for block in batch])
        trailer = bytearray(frames.trailer_bytes(len(batch)))
        num_bytes = len(batch) * self._memory.block_bytes + len(trailer)
        self._socket.recv_into([*payloads, memoryview(trailer)], num_bytes, deadline)
        ours = frames.pack_trailer(payloads, [block.block_id for block in batch])
        return [batch[place].index for place in frames.wrong_blocks(ours, trailer)]


class BlockSender:
    """The holder's side of READ, for all connections of one holder.

    Args:
        on_sent: gets (number of blocks, bytes) per batch.
    """

    def __init__(
        self, memory: BlockMemory, pool: HolderPool, leases: LeaseTable, on_sent: Callable[[int, int], None]
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._leases = leases
        self._on_sent = on_sent
        self.batch_blocks = batch_blocks(memory.block_bytes)

    def serve(self, sock: DeadlineSocket) -> None:
        """Answers READ frames until the reader goes.

        Raises:
            TransferFailedError: it went in the middle of something, was too slow, or sent nonsense.
        """
        while (header := sock.next_header(BATCH_SECONDS, frames.MAX_READ_BYTES)) is not None:
            kind, length, deadline = header
            if kind is not Kind.READ:
                raise FrameError(f"a {kind.name} frame in place of READ")
            self._send(sock, *frames.unpack_read(sock.recv(length, deadline)))

    def _send(self, sock: DeadlineSocket, lease_id: str, block_ids: list[int], generations: list[int]) -> None:
        lease = self._leases.begin_io(lease_id)
        if lease is None:
            stale = frames.pack_data(bytes([Status.STALE]) * len(block_ids))
            sock.send_bytes(stale, time.monotonic() + BATCH_SECONDS)
            return
        try:
            current = self._leases.current(lease, block_ids, generations)
            if current is None:
                front = frames.pack_data(bytes(len(block_ids)))
            else:
                front = frames.pack_data(bytes(Status.OK if ok else Status.STALE for ok in current))
                block_ids = list(itertools.compress(block_ids, current))
            for start in range(0, len(block_ids), self.batch_blocks):
                self._send_batch(sock, front, block_ids[start : start + self.batch_blocks])
                front = b""
            # Read again now that all payload has left.
            end = front + frames.pack_words(generations_of(self._pool.generations, block_ids))
            sock.send_bytes(end, time.monotonic() + BATCH_SECONDS)
        finally:
            self._leases.end_io(lease)

    def _send_batch(self, sock: DeadlineSocket, front: bytes, block_ids: list[int]) -> None:
        deadline = time.monotonic() + BATCH_SECONDS
        payloads = self._memory.blocks(block_ids)
        # Before sending: it brings the bytes into the processor's cache for the kernel's copy.
        trailer = frames.pack_trailer(payloads, block_ids)
        num_bytes = len(payloads) * self._memory.block_bytes
        sock.send([front, *payloads, trailer], len(front) + num_bytes + len(trailer), deadline)
        self._on_sent(len(block_ids), num_bytes)
