"""The tcp transport: blocks straight from the holder's memory to the reader's, many per system call.

Owns the READ exchange on both sides. Each batch of payload is followed by its blocks' checksums, each READ by their
generations, read again after the last payload was sent; the reader compares both before it calls a block verified.
"""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable, Sequence

from biphase.cache.memory import BlockMemory
from biphase.transfer import frames
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick, sort_out
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind, Status, Words
from biphase.transfer.handshake import Welcome, introduce, measure_pattern
from biphase.transfer.leases import HolderPool, LeaseTable, generations_of
from biphase.transfer.sockets import DeadlineSocket
from biphase.transfer.spans import SPAN_BYTES, SUM_BYTES, BlockSpans, Scratch, summing
from biphase.transfer.tls import connect

_BATCH_BYTES = 512 * 1024
_BATCHES_PER_READ = frames.MAX_READ_BLOCKS // frames.MAX_BATCH_BLOCKS
# A batch that is not out after this long has a reader that is stuck.
BATCH_SECONDS = 10.0


def batch_blocks(block_bytes: int) -> int:
    """Blocks in a batch: half a megabyte: few system calls, and still in the cache when it is checked."""
    return max(1, min(frames.MAX_BATCH_BLOCKS, _BATCH_BYTES // block_bytes))


class _Part:
    """The blocks of one READ, column by column: what every batch needs a slice of is made once."""

    def __init__(self, blocks: Sequence[ReadRequest], spans: BlockSpans) -> None:
        self.blocks = blocks
        self.block_ids = frames.pack_words([block.block_id for block in blocks])
        self.generations = frames.pack_words([block.generation for block in blocks])
        # Where they go.
        self.spans = spans.of(array("q", [block.dest_block_id for block in blocks]))


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
        # The trailer that came, and the one that should have.
        self._theirs, self._ours = (Scratch(frames.trailer_bytes(welcome.batch_blocks)) for _ in range(2))
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
        part = _Part(blocks, self._spans)
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
        if len(good) < num_asked:
            part = _Part(good, self._spans)
        corrupt: set[int] = set()
        for start in range(0, len(good), size):
            end = min(start + size, len(good))
            spans = part.spans[start * SPAN_BYTES : end * SPAN_BYTES]
            packed_ids = part.block_ids[start * frames.WORD_BYTES : end * frames.WORD_BYTES]
            wrong = self._receive_batch(spans, packed_ids, end - start, deadline)
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

    def _receive_batch(self, spans: bytes, packed_ids: bytes, num_blocks: int, deadline: float) -> list[int]:
        """Returns the places of blocks whose checksum is wrong."""
        end = frames.trailer_bytes(num_blocks)
        self._socket.recv_spans(spans + self._theirs.span(0, end), num_blocks * self._block_bytes + end, deadline)
        self._sum(spans, num_blocks, self._ours.address)
        sums = bytes(self._ours.view[: end - SUM_BYTES])
        return frames.wrong_blocks(sums + frames.seal(sums, packed_ids), bytes(self._theirs.view[:end]))


class BlockSender:
    """The holder's side of READ, for all connections of one holder.

    Args:
        on_sent: gets (number of blocks, bytes) per batch.
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
        scratch = Scratch(frames.HEADER_BYTES + frames.MAX_READ_BLOCKS + frames.trailer_bytes(self.batch_blocks))
        while (header := sock.next_header(BATCH_SECONDS, frames.MAX_READ_BYTES)) is not None:
            kind, length, deadline = header
            if kind is not Kind.READ:
                raise FrameError(f"a {kind.name} frame in place of READ")
            self._send(sock, scratch, *frames.unpack_read(sock.recv(length, deadline)))

    def _send(
        self, sock: DeadlineSocket, scratch: Scratch, lease_id: str, block_ids: Words, generations: Words
    ) -> None:
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
                self._send_batches(sock, scratch, front, block_ids)
                front = b""
            # Read again now that all payload has left.
            end = front + frames.pack_words(generations_of(self._pool.generations, block_ids))
            sock.send_bytes(end, time.monotonic() + BATCH_SECONDS)
        finally:
            self._leases.end_io(lease)

    def _send_batches(self, sock: DeadlineSocket, scratch: Scratch, front: bytes, block_ids: Words) -> None:
        all_spans, all_ids = self._spans.of(block_ids), frames.pack_words(block_ids)
        at = len(front)
        scratch.view[:at] = front
        for start in range(0, len(block_ids), self.batch_blocks):
            end = min(start + self.batch_blocks, len(block_ids))
            spans = all_spans[start * SPAN_BYTES : end * SPAN_BYTES]
            # Before sending: it brings the bytes into the processor's cache for the kernel's copy.
            self._sum(spans, end - start, scratch.address + at)
            seal = at + (end - start) * SUM_BYTES
            sums = bytes(scratch.view[at:seal])
            scratch.view[seal : seal + SUM_BYTES] = frames.seal(
                sums, all_ids[start * frames.WORD_BYTES : end * frames.WORD_BYTES]
            )
            runs = scratch.span(0, at) + spans + scratch.span(at, seal + SUM_BYTES)
            num_bytes = (end - start) * self._block_bytes
            sock.send_spans(runs, seal + SUM_BYTES + num_bytes, time.monotonic() + BATCH_SECONDS)
            self._on_sent(end - start, num_bytes)
            at = 0
