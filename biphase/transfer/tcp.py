"""The tcp transport: blocks straight from the holder's memory to the reader's, many per system call.

Owns the READ exchange on both sides. Each block's payload is followed by its checksum and by its generation read again
after the payload was sent; the reader compares both before it calls a block verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from biphase.cache.memory import BlockMemory
from biphase.errors import TransferFailedError
from biphase.transfer import frames
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind, Status
from biphase.transfer.handshake import Hello, Welcome, introduce, measure_pattern
from biphase.transfer.leases import HolderPool, LeaseTable
from biphase.transfer.sockets import DeadlineSocket, connect_tcp

_BATCH_BYTES = 1024 * 1024
# A batch that is not out after this long has a reader that is stuck.
BATCH_SECONDS = 10.0


def batch_blocks(block_bytes: int) -> int:
    """Blocks per DATA frame: about a megabyte, so that system calls are few and pins are short."""
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
            LayoutMismatchError, StaleHandleError: refused.
            TransferFailedError: no connection in time.
        """
        sock = connect_tcp(endpoint.tcp_address, endpoint.node_id, deadline, on_tick)
        try:
            hello = Hello(context.node_id, context.incarnation, endpoint.node_id, endpoint.incarnation, context.layout)
            welcome = introduce(sock, endpoint, hello, deadline)
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
        for start in range(0, len(blocks), frames.MAX_READ_BLOCKS):
            self._read(lease_id, blocks[start : start + frames.MAX_READ_BLOCKS], progress, deadline)

    def _read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        sock = self._socket
        sock.send([frames.pack_read(lease_id, [(block.block_id, block.generation) for block in blocks])], deadline)
        size = self._batch_blocks
        # Blocks whose payload is here and whose trailer comes in front of the next DATA frame.
        unchecked: list[ReadRequest] = []
        for start in range(0, len(blocks), size):
            batch = blocks[start : start + size]
            trailer_bytes = len(unchecked) * frames.TRAILER_BYTES
            raw = memoryview(sock.recv(trailer_bytes + frames.HEADER_BYTES + len(batch), deadline))
            statuses = _statuses(raw[trailer_bytes:], len(batch))
            self._check(unchecked, raw[:trailer_bytes], progress)
            unchecked = []
            for block, status in zip(batch, statuses, strict=True):
                if status is Status.OK:
                    unchecked.append(block)
                else:
                    progress.stale.append(block.index)
            sock.recv_into([self._memory.block(block.dest_block_id) for block in unchecked], deadline)
        raw = memoryview(sock.recv(len(unchecked) * frames.TRAILER_BYTES, deadline))
        self._check(unchecked, raw, progress)

    def _check(self, blocks: Sequence[ReadRequest], trailer: memoryview, progress: ReadProgress) -> None:
        for block, (checksum, generation) in zip(blocks, frames.unpack_trailer(trailer), strict=True):
            payload = self._memory.block(block.dest_block_id)
            if generation != block.generation:
                progress.stale.append(block.index)
            elif frames.checksum(payload, block.block_id, block.generation) != checksum:
                progress.corrupt.append(block.index)
            else:
                progress.verified.append(block.index)


def _statuses(raw: memoryview, num_blocks: int) -> list[Status]:
    kind, length = frames.unpack_header(raw[: frames.HEADER_BYTES], frames.MAX_BATCH_BLOCKS)
    if kind is not Kind.DATA or length != num_blocks:
        raise FrameError(f"a {kind.name} frame of {length} blocks in place of DATA for {num_blocks}")
    try:
        return [Status(value) for value in raw[frames.HEADER_BYTES :]]
    except ValueError as error:
        raise FrameError(f"an unknown block status: {error}") from error


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
        while True:
            sock.wait_readable()
            deadline = time.monotonic() + BATCH_SECONDS
            try:
                first = sock.recv(1, deadline)
            except TransferFailedError:
                return  # Between two reads everybody may leave.
            rest = sock.recv(frames.HEADER_BYTES - 1, deadline)
            kind, length = frames.unpack_header(first + rest, frames.MAX_READ_BYTES)
            if kind is not Kind.READ:
                raise FrameError(f"a {kind.name} frame in place of READ")
            self._send(sock, *frames.unpack_read(sock.recv(length, deadline)))

    def _send(self, sock: DeadlineSocket, lease_id: str, handles: list[tuple[int, int]]) -> None:
        generations = self._pool.generations
        trailer = b""
        for start in range(0, len(handles), self.batch_blocks):
            batch = handles[start : start + self.batch_blocks]
            pinned = self._leases.pin(lease_id, batch)
            good = [handle for handle, ok in zip(batch, pinned, strict=True) if ok]
            try:
                payload = [self._memory.block(block_id) for block_id, _ in good]
                # Before sending: it brings the bytes into the processor's cache for the kernel's copy.
                checksums = [frames.checksum(block, *handle) for block, handle in zip(payload, good, strict=True)]
                head = frames.pack_data([Status.OK if ok else Status.STALE for ok in pinned])
                sock.send([trailer, head, *payload], time.monotonic() + BATCH_SECONDS)
                trailer = frames.pack_trailer(
                    [(digest, generations[handle[0]]) for digest, handle in zip(checksums, good, strict=True)]
                )
            finally:
                self._pool.release([block_id for block_id, _ in good])
            self._on_sent(len(good), len(good) * self._memory.block_bytes)
        sock.send([trailer], time.monotonic() + BATCH_SECONDS)
