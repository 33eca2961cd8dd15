"""Runs of memory as the system and the checksum kernel take them: packed starts and lengths, hundreds per call.

Owns the packed form (that of struct iovec), the calls that move such runs through a socket, and the sums of their
bytes. Knows no frames and no deadlines. Nothing here is done per run in Python.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from biphase.cache.memory import BlockMemory
from kernels.cpu.checksum import MIN_BYTES, MIN_SEALED_BYTES, Checksums, checksums
from kernels.cpu.library import LibraryUnavailableError

_SPAN = struct.Struct("@QQ")
SPAN_BYTES = _SPAN.size
SUM_BYTES = 8
_WRITABLE = 0x200

_view_of = ctypes.pythonapi.PyMemoryView_FromMemory
_view_of.restype = ctypes.py_object
_view_of.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


class _Message(ctypes.Structure):
    """struct msghdr."""

    _fields_ = (
        ("name", ctypes.c_void_p),
        ("name_bytes", ctypes.c_uint32),
        ("spans", ctypes.c_void_p),
        ("num_spans", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_bytes", ctypes.c_size_t),
        ("flags", ctypes.c_int),
    )


_libc = ctypes.CDLL(None, use_errno=True)
_sendmsg, _recvmsg = _libc.sendmsg, _libc.recvmsg
for _function in (_sendmsg, _recvmsg):
    _function.restype = ctypes.c_ssize_t
    _function.argtypes = (ctypes.c_int, ctypes.POINTER(_Message), ctypes.c_int)


# Starts and lengths: int64 [num_spans, 2].
SpanArray = npt.NDArray[np.int64]


class BlockSpans:
    """The blocks of one memory as spans. Keeps it mapped."""

    def __init__(self, memory: BlockMemory) -> None:
        self._view = memory.view
        self._address = memory.address
        self._block_bytes = memory.block_bytes
        self._num_blocks = memory.num_blocks

    def of(self, block_ids: npt.ArrayLike) -> SpanArray:
        """
        Raises:
            IndexError: no such block.
        """
        ids = np.asarray(block_ids, np.int64)
        if not ((ids >= 0) & (ids < self._num_blocks)).all():
            raise IndexError(f"blocks {ids.min()} to {ids.max()} are not all of {self._num_blocks}")
        spans = np.empty((len(ids), 2), np.int64)
        np.multiply(ids, self._block_bytes, out=spans[:, 0])
        spans[:, 0] += self._address
        spans[:, 1] = self._block_bytes
        return spans


class Spans:
    """Some runs after one another in a packed array, which this keeps; their memory is the caller's to keep."""

    __slots__ = ("_owner", "address", "count")

    def __init__(self, address: int, count: int, owner: object) -> None:
        self.address = address
        self.count = count
        self._owner = owner

    @classmethod
    def all_of(cls, array: SpanArray) -> Spans:
        array = np.ascontiguousarray(array)
        return cls(array.ctypes.data, len(array), array)

    def part(self, start: int, end: int) -> Spans:
        return Spans(self.address + start * SPAN_BYTES, end - start, self._owner)

    def rest(self, num_bytes: int) -> Spans:
        """What is left when the first `num_bytes` are done."""
        left = []
        for start, length in self._pairs():
            done = min(num_bytes, length)
            num_bytes -= done
            if done < length:
                left.append((start + done, length - done))
        return Spans.all_of(np.array(left, np.int64).reshape(-1, 2))

    def views(self) -> list[memoryview]:
        """The same runs as writable buffers."""
        return [_view_of(start, length, _WRITABLE) for start, length in self._pairs()]

    def _pairs(self) -> list[tuple[int, int]]:
        return list(_SPAN.iter_unpack(ctypes.string_at(self.address, self.count * SPAN_BYTES)))


class Scratch:
    """Some bytes at an address that is known: what goes before and after blocks in the same call."""

    def __init__(self, num_bytes: int) -> None:
        raw = bytearray(num_bytes)
        self.view = memoryview(raw)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(raw))


class SpanSocket:
    """sendmsg and recvmsg on one socket, for runs of memory. For one thread.

    Args:
        sock: its owner's. Once it is closed, whatever is called here fails.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._message = _Message()
        self._reference = ctypes.byref(self._message)

    def send(self, spans: Spans) -> int:
        """Hands runs to the socket, in order; at most IOV_MAX (1024). Returns how many bytes it took.

        Raises:
            OSError: as socket.sendmsg.
        """
        return self._move(_sendmsg, spans, socket.MSG_NOSIGNAL)

    def receive(self, spans: Spans) -> int:
        """Waits until all runs are full, the stream ends, or the socket's timeout. Returns how many bytes came.

        Raises:
            OSError: as socket.recvmsg_into.
        """
        return self._move(_recvmsg, spans, socket.MSG_WAITALL)

    def _move(self, call: Callable[[int, Any, int], int], spans: Spans, flags: int) -> int:
        message = self._message
        message.spans, message.num_spans = spans.address, spans.count
        while True:
            moved = call(self._socket.fileno(), self._reference, flags)
            if moved >= 0:
                return moved
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


def seal(sums: bytes, block_ids: bytes) -> bytes:
    """What follows the sums of a batch: XXH3-64 of these and of the blocks' ids at the holder, so that blocks or whole
    batches in each other's place do not pass.

    The ids are no seeds: those make a sum of a few kilobytes twice as slow.
    """
    digest: int = xxhash.xxh3_64_intdigest((sums + block_ids).ljust(MIN_SEALED_BYTES, b"\0"))
    return digest.to_bytes(SUM_BYTES, "little")


# Of runs of blocks, their number and ids (uint64), the XXH3-64 of each, and the seal of these: all by address.
Summing = Checksums


@cache
def summing(block_bytes: int) -> Summing:
    """The fastest way to the sums of runs of this size: one compiled call for all, where there is a library."""
    if block_bytes >= MIN_BYTES and sys.byteorder == "little":
        try:
            return checksums()
        except LibraryUnavailableError:
            pass
    return _sum_each


def _sum_each(spans: int, num_spans: int, ids: int, sums: int) -> None:
    runs = Spans(spans, num_spans, None).views()
    found = np.array(list(map(xxhash.xxh3_64_intdigest, runs)), "<u8").tobytes()
    block_ids = np.frombuffer(ctypes.string_at(ids, len(found)), np.uint64).astype("<u8").tobytes()
    ctypes.memmove(sums, found + seal(found, block_ids), len(found) + SUM_BYTES)
