"""The shm transport: a reader on the same host maps the holder's memory and copies once.

Owns the passing of descriptors over an abstract unix socket (to our own uid only), the read-only mapping and the copy.
A copy is a seqlock read: the block's generation, which lies in shared memory too, is compared before and after. The
holder takes no part in it, so a frozen holder can still be read; the lease keeps blocks from being reused meanwhile,
and where it did not, the generation tells. No checksum: no wire is between the two memories.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import socket
import time
from collections.abc import Sequence

from biphase.cache.memory import BlockMemory, SharedGenerations, SharedRegion
from biphase.errors import TransferFailedError
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.handshake import NUM_PATTERNS, PATTERN_BYTES, introduce, test_pattern
from biphase.transfer.sockets import DeadlineSocket, connect_abstract, peer_uid

# From this size on a copy is worth a call that lets other Python threads run meanwhile.
_FREE_COPY_BYTES = 16 * 1024
_TICK_BYTES = 256 * 1024 * 1024

_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_READ_ONLY = 0x100
_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class Mapping:
    """Somebody else's memory, read-only.

    Raises:
        TransferFailedError: it is smaller than said, or its owner could shrink it under us.
        OSError: the system would not map it.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        if os.fstat(fd).st_size < num_bytes or not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise TransferFailedError("the holder's shared memory is not what it claims to be")
        # Not by the mmap module: it does not tell the address of a read-only mapping.
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self.address: int = address
        self.num_bytes = num_bytes
        self.view: memoryview = _view_of(address, num_bytes, _READ_ONLY)

    def close(self) -> None:
        """The view and what was made from it must not be used any more."""
        _libc.munmap(self.address, self.num_bytes)


class ShmChannel:
    """The reader's side."""

    transport = "shm"

    def __init__(self, sock: DeadlineSocket, context: ReaderContext, memory: Mapping, generations: Mapping) -> None:
        self._socket = sock
        self._memory = memory
        self._own_memory = context.memory
        self._block_bytes = context.memory.block_bytes
        self._mappings = (memory, generations)
        self._generations = generations.view.cast("Q")
        self.gigabytes_per_second = 0.0
        self._aborted = False

    @classmethod
    def connect(cls, endpoint: Endpoint, context: ReaderContext, deadline: float, on_tick: Tick) -> ShmChannel:
        """
        Raises:
            LayoutMismatchError, StaleHandleError: refused.
            TransferFailedError: no connection in time, another user's process, or memory that cannot be mapped.
        """
        sock = connect_abstract(endpoint.shm_address, endpoint.node_id, deadline, on_tick)
        with contextlib.ExitStack() as undo:
            undo.callback(sock.close)
            uid = peer_uid(sock.raw)
            if uid != os.getuid():
                raise TransferFailedError(f"{endpoint.node_id}'s shared memory socket belongs to uid {uid}")
            welcome = introduce(sock, endpoint, context.hello(endpoint, "shm"), deadline, context.trust.token)
            fds = _receive_descriptors(sock, deadline)
            sizes = (welcome.num_blocks * context.layout.block_bytes, welcome.num_blocks * 8, PATTERN_BYTES)
            try:
                mappings = []
                for fd, num_bytes in zip(fds, sizes, strict=True):
                    mappings.append(Mapping(fd, num_bytes))
                    undo.callback(mappings[-1].close)
            except OSError as error:
                raise TransferFailedError(f"{endpoint.node_id}'s memory cannot be mapped: {error.strerror}") from error
            finally:
                for fd in fds:
                    os.close(fd)
            channel = cls(sock, context, mappings[0], mappings[1])
            channel.gigabytes_per_second = _measure(mappings[2])
            mappings[2].close()
            undo.pop_all()
            return channel

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()
        for mapping in self._mappings:
            mapping.close()

    def abort(self) -> None:
        self._aborted = True
        self._socket.abort()

    def read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        generations, size = self._generations, self._block_bytes
        until_tick = _TICK_BYTES
        for block in blocks:
            until_tick -= size
            if until_tick < 0 or self._aborted:
                until_tick = _TICK_BYTES
                self._socket.on_tick()
                if self._aborted or time.monotonic() >= deadline:
                    raise TransferFailedError("the copy did not end before the deadline")
            block_id = block.block_id
            if not 0 <= block_id < len(generations) or generations[block_id] != block.generation:
                progress.stale.append(block.index)
                continue
            _copy(self._own_memory, block.dest_block_id, self._memory, block_id * size, size)
            if generations[block_id] == block.generation:
                progress.verified.append(block.index)
            else:
                progress.stale.append(block.index)


class ShmHost:
    """The holder's side: hands descriptors to readers of its own uid."""

    def __init__(self, memory: BlockMemory, generations: SharedGenerations) -> None:
        self._memory = memory
        self._generations = generations
        self._pattern = SharedRegion("biphase-pattern", PATTERN_BYTES)
        self._pattern.view[:] = test_pattern()

    def send_descriptors(self, sock: DeadlineSocket) -> None:
        """After WELCOME.

        Raises:
            TransferFailedError: the reader is gone.
        """
        fds = [region.open_read_only() for region in (self._memory, self._generations, self._pattern)]
        try:
            socket.send_fds(sock.raw, [b"F"], fds)
        except OSError as error:
            raise TransferFailedError(f"cannot hand over shared memory: {error.strerror}") from error
        finally:
            for fd in fds:
                os.close(fd)

    def close(self) -> None:
        self._pattern.close()


def _receive_descriptors(sock: DeadlineSocket, deadline: float) -> list[int]:
    while True:
        try:
            _, fds, _, _ = socket.recv_fds(sock.raw, 1, 3, socket.MSG_CMSG_CLOEXEC)
            break
        except BlockingIOError:  # The receive timeout that the handshake armed.
            sock.on_tick()
            if time.monotonic() >= deadline:
                raise TransferFailedError("no shared memory came before the deadline") from None
    if len(fds) != 3:
        for fd in fds:
            os.close(fd)
        raise TransferFailedError(f"{len(fds)} descriptors came in place of 3")
    return list(fds)


def _measure(pattern: Mapping) -> float:
    """Copies and checks the test pattern. Returns GB/s."""
    piece = bytearray(PATTERN_BYTES)
    target = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    ctypes.memmove(target, pattern.address, PATTERN_BYTES)
    if piece != test_pattern():
        raise TransferFailedError("the test pattern in shared memory is not as expected")
    start = time.perf_counter()
    for _ in range(NUM_PATTERNS):
        ctypes.memmove(target, pattern.address, PATTERN_BYTES)
    return NUM_PATTERNS * PATTERN_BYTES / max(time.perf_counter() - start, 1e-9) / 1e9


def _copy(target: BlockMemory, dest_block_id: int, source: Mapping, offset: int, size: int) -> None:
    if size < _FREE_COPY_BYTES:
        target.block(dest_block_id)[:] = source.view[offset : offset + size]
    else:
        start = dest_block_id * size
        assert start >= 0 and start + size <= target.num_bytes
        ctypes.memmove(target.address + start, source.address + offset, size)
