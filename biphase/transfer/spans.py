"""Runs of memory as the system and the checksum kernel take them: packed starts and lengths, hundreds per call.

Owns the packed form (that of struct iovec), the calls that move such runs through a socket, and the sums of their
bytes. Knows no frames and no deadlines. Whoever packs a span keeps its memory mapped until the call has returned.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
import struct
import sys
from array import array
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from biphase.cache.memory import BlockMemory
from kernels.cpu.checksum import MIN_BYTES, Checksums, checksums
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
        ("spans", ctypes.c_char_p),
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


class BlockSpans:
    """The blocks of one memory as spans. Keeps it mapped."""

    def __init__(self, memory: BlockMemory) -> None:
        self._view = memory.view
        self._address = memory.address
        self._block_bytes = memory.block_bytes
        self._num_blocks = memory.num_blocks

    def of(self, block_ids: npt.ArrayLike) -> bytes:
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
        return spans.tobytes()


class Scratch:
    """A few bytes at an address that is known: what goes before and after blocks in the same call."""

    def __init__(self, num_bytes: int) -> None:
        raw = bytearray(num_bytes)
        self.view = memoryview(raw)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(raw))

    def span(self, start: int, end: int) -> bytes:
        assert 0 <= start <= end <= len(self.view)
        return _SPAN.pack(self.address + start, end - start)


class SpanSocket:
    """sendmsg and recvmsg on one socket, for runs of memory. For one thread.

    Args:
        sock: its owner's. Once it is closed, whatever is called here fails.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._message = _Message()
        self._reference = ctypes.byref(self._message)

    def send(self, spans: bytes) -> int:
        """Hands runs to the socket, in order; at most IOV_MAX (1024). Returns how many bytes it took.

        Raises:
            OSError: as socket.sendmsg.
        """
        return self._move(_sendmsg, spans, socket.MSG_NOSIGNAL)

    def receive(self, spans: bytes) -> int:
        """Waits until all runs are full, the stream ends, or the socket's timeout. Returns how many bytes came.

        Raises:
            OSError: as socket.recvmsg_into.
        """
        return self._move(_recvmsg, spans, socket.MSG_WAITALL)

    def _move(self, call: Callable[[int, Any, int], int], spans: bytes, flags: int) -> int:
        message = self._message
        message.spans, message.num_spans = spans, len(spans) // SPAN_BYTES
        while True:
            moved = call(self._socket.fileno(), self._reference, flags)
            if moved >= 0:
                return moved
            number = ctypes.get_errno()
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))


def views_of(spans: bytes) -> list[memoryview]:
    """The same runs as writable buffers."""
    return [_view_of(address, length, _WRITABLE) for address, length in _SPAN.iter_unpack(spans)]


def rest_of(spans: bytes, num_bytes: int) -> bytes:
    """What is left of the runs when their first `num_bytes` are done."""
    for place, (address, length) in enumerate(_SPAN.iter_unpack(spans)):
        if num_bytes < length:
            return _SPAN.pack(address + num_bytes, length - num_bytes) + spans[(place + 1) * SPAN_BYTES :]
        num_bytes -= length
    return b""


# Spans, how many, and the address that gets the XXH3-64 of each, little-endian.
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


def _sum_each(spans: bytes, num_spans: int, address: int) -> None:
    sums = array("Q", map(xxhash.xxh3_64_intdigest, views_of(spans)))
    assert len(sums) == num_spans
    if sys.byteorder != "little":
        sums.byteswap()
    ctypes.memmove(address, sums.tobytes(), num_spans * SUM_BYTES)
