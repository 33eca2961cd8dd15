"""The tcp transport: blocks straight from the holder's memory to the reader's, many per system call.

Owns the READ exchange on both sides. Each batch of payload is followed by its blocks' checksums, each READ by their
generations, read again after the last payload was sent; the reader compares both before it calls a block verified.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from biphase.cache.memory import BlockMemory
from biphase.transfer import frames
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick, sort_out
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind, Status, Words
from biphase.transfer.handshake import Welcome, introduce, measure_pattern
from biphase.transfer.leases import HolderPool, LeaseTable, generations_of
from biphase.transfer.sockets import DeadlineSocket
from biphase.transfer.spans import SPAN_BYTES, SUM_BYTES, BlockSpans, Scratch, SpanArray, Spans, Summing, summing
from biphase.transfer.tls import connect

_BATCH_BYTES = 512 * 1024
_BATCHES_PER_READ = frames.MAX_READ_BLOCKS // frames.MAX_BATCH_BLOCKS
# A batch that is not out after this long has a reader that is stuck.
BATCH_SECONDS = 10.0


def batch_blocks(block_bytes: int) -> int:
    """Blocks in a batch: half a megabyte: few system calls, and still in the cache when it is checked."""
    return max(1, min(frames.MAX_BATCH_BLOCKS, _BATCH_BYTES // block_bytes))


class _Batches:
    """Blocks of one READ, at least one, as they cross: batch by batch their runs, and after each's that of its trailer.

    Args:
        spans: of the blocks.
        block_ids: at the holder.
        size: blocks in a batch.
        front: goes before the first batch, in the same call.
    """

    def __init__(self, spans: SpanArray, block_ids: Words, size: int, front: bytes = b"") -> None:
        num_blocks = len(spans)
        self.edges: list[int] = [*range(0, num_blocks, size), num_blocks]
        num_batches = len(self.edges) - 1
        # One after the other; the front comes last, so that all sums are aligned.
        trailers_end = (num_blocks + num_batches) * SUM_BYTES
        self._scratch = Scratch(trailers_end + len(front))
        self._scratch.view[trailers_end:] = front
        edges = np.array(self.edges, np.int64)
        starts = (edges[:-1] + np.arange(num_batches)) * SUM_BYTES
        lengths = (np.diff(edges) + 1) * SUM_BYTES
        trailers = np.stack([starts + self._scratch.address, lengths], axis=1)
        head = np.array([[self._scratch.address + trailers_end, len(front)]], np.int64)
        self._runs = Spans.all_of(np.concatenate([head, np.insert(spans, edges[1:], trailers, axis=0)]))
        self._num_front_bytes = len(front)
        self._ids = np.ascontiguousarray(block_ids)
        self._ids_address = self._ids.ctypes.data

    def __len__(self) -> int:
        return len(self.edges) - 1

    def num_blocks(self, batch: int) -> int:
        return self.edges[batch + 1] - self.edges[batch]

    def runs(self, batch: int, block_bytes: int) -> tuple[Spans, int]:
        """Those of a batch with its trailer, and how many bytes that is."""
        start, end = self.edges[batch], self.edges[batch + 1]
        num_bytes = (end - start) * (block_bytes + SUM_BYTES) + SUM_BYTES
        if batch == 0 and self._num_front_bytes:
            return self._runs.part(0, end + 2), num_bytes + self._num_front_bytes
        return self._runs.part(start + batch + 1, end + batch + 2), num_bytes

    def sum(self, summing: Summing, batch: int, trailer: int) -> None:
        """Writes what a batch's trailer must be to an address."""
        start = self.edges[batch]
        first = self._runs.address + (start + batch + 1) * SPAN_BYTES
        summing(first, self.num_blocks(batch), self._ids_address + start * SUM_BYTES, trailer)

    def trailer(self, batch: int) -> tuple[int, memoryview]:
        """Its address, and its bytes."""
        start = (self.edges[batch] + batch) * SUM_BYTES
        end = start + (self.num_blocks(batch) + 1) * SUM_BYTES
        return self._scratch.address + start, self._scratch.view[start:end]


class _Part:
    """The blocks of one READ, column by column."""

    def __init__(self, blocks: Sequence[ReadRequest]) -> None:
        self.blocks = blocks
        self.block_ids = frames.pack_words([block.block_id for block in blocks])
        self.generations = frames.pack_words([block.generation for block in blocks])


class TcpChannel:
    """The reader's side."""

    transport = "tcp"

    def __init__(
        self, sock: DeadlineSocket, context: ReaderContext, welcome: Welcome, gigabytes_per_second: float
    ) -> None:
        self._socket = sock
        self._block_bytes = context.memory.block_bytes
        self._spans = BlockSpans(context.memory)
        self._sum = summing(self._block_bytes)
        self._batch_blocks = welcome.batch_blocks
        # The trailer that should have come.
        self._ours = Scratch(frames.trailer_bytes(welcome.batch_blocks))
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
        part = self._ask(lease_id, blocks[: edges[1]], deadline)
        for start, end in itertools.pairwise(edges[1:]):
            following = self._ask(lease_id, blocks[start:end], deadline)
            self._receive(part, progress, deadline)
            part = following
        self._receive(part, progress, deadline)

    def _ask(self, lease_id: str, blocks: Sequence[ReadRequest], deadline: float) -> _Part:
        part = _Part(blocks)
        self._socket.send_bytes(frames.pack_read(lease_id, part.block_ids, part.generations), deadline)
        return part

    def _receive(self, part: _Part, progress: ReadProgress, deadline: float) -> None:
        sock, size = self._socket, self._batch_blocks
        num_asked = len(part.blocks)
        head = sock.recv(frames.HEADER_BYTES + num_asked, deadline)
        kind, length = frames.unpack_header(head[: frames.HEADER_BYTES], frames.MAX_READ_BLOCKS)
        if length != num_asked:
            raise FrameError(f"a {kind.name} frame of {length} bytes in place of DATA for {num_asked} blocks")
        good = sort_out(kind, head[frames.HEADER_BYTES :], part.blocks, progress)
        if not good:
            return
        if len(good) < num_asked:
            part = _Part(good)
        spans = self._spans.of(array("q", [block.dest_block_id for block in good]))
        batches = _Batches(spans, frames.words_of(part.block_ids), size)
        corrupt: set[int] = set()
        for batch, start in enumerate(batches.edges[:-1]):
            wrong = self._receive_batch(batches, batch, deadline)
            corrupt.update(good[start + place].index for place in wrong)
        generations = sock.recv(len(good) * frames.WORD_BYTES, deadline)
        if not corrupt and generations == part.generations:
            progress.verified.extend([block.index for block in good])
            return
        for block, generation in zip(good, frames.unpack_words(generations), strict=True):
            if generation != block.generation:
                progress.stale.append(block.index)
            elif block.index in corrupt:
                progress.corrupt.append(block.index)
            else:
                progress.verified.append(block.index)

    def _receive_batch(self, batches: _Batches, batch: int, deadline: float) -> list[int]:
        """Returns the places of blocks whose checksum is wrong."""
        self._socket.recv_spans(*batches.runs(batch, self._block_bytes), deadline)
        batches.sum(self._sum, batch, self._ours.address)
        theirs = batches.trailer(batch)[1]
        ours = self._ours.view[: len(theirs)]
        return [] if ours == theirs else frames.wrong_blocks(bytes(ours), bytes(theirs))


class BlockSender:
    """The holder's side of READ, for all connections of one holder.

    Args:
        on_sent: gets (number of blocks, bytes) per READ.
    """

    def __init__(
        self, memory: BlockMemory, pool: HolderPool, leases: LeaseTable, on_sent: Callable[[int, int], None]
    ) -> None:
        self._block_bytes = memory.block_bytes
        self._spans = BlockSpans(memory)
        self._sum = summing(memory.block_bytes)
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

    def _send(self, sock: DeadlineSocket, lease_id: str, block_ids: Words, generations: Words) -> None:
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
                block_ids = block_ids[current]
            if len(block_ids):
                self._send_batches(sock, front, block_ids)
                front = b""
            # Read again now that all payload has left.
            end = front + frames.pack_words(generations_of(self._pool.generations, block_ids))
            sock.send_bytes(end, time.monotonic() + BATCH_SECONDS)
        finally:
            self._leases.end_io(lease)

    def _send_batches(self, sock: DeadlineSocket, front: bytes, block_ids: Words) -> None:
        batches = _Batches(self._spans.of(block_ids), block_ids, self.batch_blocks, front)
        num_sent = 0
        try:
            for batch in range(len(batches)):
                # Before sending: it brings the bytes into the processor's cache for the kernel's copy.
                batches.sum(self._sum, batch, batches.trailer(batch)[0])
                sock.send_spans(*batches.runs(batch, self._block_bytes), time.monotonic() + BATCH_SECONDS)
                num_sent = batches.edges[batch + 1]
        finally:
            self._on_sent(num_sent, num_sent * self._block_bytes)
