"""Blocking sockets on dedicated threads, with a deadline on every operation.

Owns deadlines, scatter/gather and the turning of every socket failure into TransferFailedError. Knows frames only as
a header and a body. The kernel does the waiting (SO_RCVTIMEO, SO_SNDTIMEO, MSG_WAITALL): one system call moves many
blocks. A wait is cut into ticks so that its thread can look at the clock and at what else has to be done.
"""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from biphase.errors import TransferFailedError
from biphase.transfer.frames import HEADER_BYTES, Kind, unpack_header
from biphase.transfer.spans import Spans, SpanSocket

TICK_SECONDS = 0.1
# More buffers in one system call are an error (IOV_MAX).
MAX_BUFFERS = 1024
_MIN_TIMEOUT_SECONDS = 0.001
_TIMEVAL = struct.Struct("@ll")
_T = TypeVar("_T")


def _nothing() -> None:
    pass


class DeadlineSocket:
    """A connected stream socket used by one thread; only `abort` may come from others.

    Args:
        sock: becomes this object's own.
        peer: name for error messages.
        on_tick: called about every TICK_SECONDS while waiting; may raise to end the wait.
    """

    def __init__(self, sock: socket.socket, peer: str, on_tick: Callable[[], None] = _nothing) -> None:
        self._socket = sock
        self._spans = SpanSocket(sock)
        self._peer = peer
        self.on_tick = on_tick
        self._timeouts = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}
        sock.setblocking(True)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # An idle connection whose peer's machine is gone ends after about 25 s.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)

    @property
    def raw(self) -> socket.socket:
        return self._socket

    def fileno(self) -> int:
        return self._socket.fileno()

    def recv_into(self, buffers: list[memoryview], num_bytes: int, deadline: float) -> None:
        """Fills all buffers, in order.

        Args:
            buffers: of bytes, at most MAX_BUFFERS.
            num_bytes: their size together.
            deadline: monotonic seconds.

        Raises:
            TransferFailedError: end of stream, reset, or the deadline came first. Part of the buffers may be written.
        """
        self._move(
            socket.SO_RCVTIMEO,
            lambda left: self._socket.recvmsg_into(left, 0, socket.MSG_WAITALL)[0],
            _advance,
            buffers,
            num_bytes,
            deadline,
        )

    def recv(self, num_bytes: int, deadline: float) -> bytes:
        raw = bytearray(num_bytes)
        self.recv_into([memoryview(raw)], num_bytes, deadline)
        return bytes(raw)

    def send(self, buffers: Sequence[bytes | memoryview], num_bytes: int, deadline: float) -> None:
        """Hands all buffers to the kernel, in order. Arguments as for `recv_into`.

        Raises:
            TransferFailedError: reset, or the deadline came first.
        """
        self._move(
            socket.SO_SNDTIMEO,
            lambda left: self._socket.sendmsg(left, (), socket.MSG_NOSIGNAL),
            _advance,
            buffers,
            num_bytes,
            deadline,
        )

    def recv_spans(self, spans: Spans, num_bytes: int, deadline: float) -> None:
        """`recv_into` for runs of memory (spans.py), of which there may be many."""
        self._move(socket.SO_RCVTIMEO, self._spans.receive, Spans.rest, spans, num_bytes, deadline)

    def send_spans(self, spans: Spans, num_bytes: int, deadline: float) -> None:
        """`send` for runs of memory."""
        self._move(socket.SO_SNDTIMEO, self._spans.send, Spans.rest, spans, num_bytes, deadline)

    def send_bytes(self, raw: bytes, deadline: float) -> None:
        self.send([raw], len(raw), deadline)

    def recv_frame(self, deadline: float, max_bytes: int) -> tuple[Kind, bytes]:
        """
        Raises:
            FrameError: not a frame of this protocol, or one over `max_bytes`.
            TransferFailedError: as `recv_into`.
        """
        kind, length = unpack_header(self.recv(HEADER_BYTES, deadline), max_bytes)
        return kind, self.recv(length, deadline)

    def next_header(self, seconds: float, max_bytes: int) -> tuple[Kind, int, float] | None:
        """Waits, for ever, for the next frame of a peer that may leave between two of them.

        Args:
            seconds: that the frame, and what is said to it, may take from its first byte on.

        Returns:
            Kind and length of the frame, and its deadline; None when the peer has left.

        Raises:
            FrameError, TransferFailedError: as `recv_frame`.
        """
        self.wait_readable()
        deadline = time.monotonic() + seconds
        try:
            first = self.recv(1, deadline)
        except TransferFailedError:
            return None
        return *unpack_header(first + self.recv(HEADER_BYTES - 1, deadline), max_bytes), deadline

    def wait_readable(self) -> None:
        """Waits, for ever and without using the processor, for bytes, the end of the stream, or `abort`."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.poll()

    def shake_hands(self, deadline: float) -> None:
        """Whatever has to happen before the first frame; nothing, in plain text."""

    def abort(self) -> None:
        """From any thread: whoever waits in this socket fails at once."""
        with contextlib.suppress(OSError):  # Not connected any more.
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _move(
        self,
        timeout: int,
        move: Callable[[_T], int],
        advance: Callable[[_T, int], _T],
        what: _T,
        num_bytes: int,
        deadline: float,
    ) -> None:
        """Calls `move`, which says how many bytes it moved, until all have."""
        while num_bytes:
            self._arm(timeout, deadline)
            try:
                moved = move(what)
            except BlockingIOError:
                self._tick(deadline)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if moved == 0:
                raise TransferFailedError(f"{self._peer} closed the connection")
            num_bytes -= moved
            if num_bytes:
                what = advance(what, moved)
                self._tick(deadline)

    def _arm(self, option: int, deadline: float) -> None:
        # Full ticks until the end is near: the option is set once, not per call.
        seconds = min(TICK_SECONDS, max(deadline - time.monotonic(), _MIN_TIMEOUT_SECONDS))
        if seconds != self._timeouts[option]:
            self._timeouts[option] = seconds
            micros = int(seconds * 1e6)
            self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(micros // 1_000_000, micros % 1_000_000))

    def _tick(self, deadline: float) -> None:
        self.on_tick()
        if time.monotonic() >= deadline:
            raise TransferFailedError(f"{self._peer} did not answer before the deadline")

    def _lost(self, error: OSError) -> TransferFailedError:
        return TransferFailedError(f"connection to {self._peer} lost: {error.strerror or error}")


# Turns a connected socket, its peer's name and `on_tick` into one with deadlines.
MakeSocket = Callable[[socket.socket, str, Callable[[], None]], DeadlineSocket]


def connect_tcp(
    address: str,
    peer: str,
    deadline: float,
    on_tick: Callable[[], None] = _nothing,
    make: MakeSocket = DeadlineSocket,
) -> DeadlineSocket:
    """Connects to "host:port".

    Raises:
        TransferFailedError: no such host, refused, or the deadline came first.
    """
    try:
        host, port = split_address(address)
        family, kind, proto, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, ValueError) as error:
        raise TransferFailedError(f"{peer} has no usable tcp address: {address!r}: {error}") from error
    return _connect(socket.socket(family, kind, proto), target, peer, deadline, on_tick, make)


def connect_abstract(name: str, peer: str, deadline: float, on_tick: Callable[[], None] = _nothing) -> DeadlineSocket:
    """Connects to the abstract unix socket `name`, if its owner has our uid.

    Raises:
        TransferFailedError: nobody listens, somebody else does, or the deadline came first.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    return _connect(sock, "\0" + name, peer, deadline, on_tick)


def split_address(address: str) -> tuple[str, int]:
    """
    Raises:
        ValueError: not "host:port".
    """
    host, separator, port = address.rpartition(":")
    if not separator or not host:
        raise ValueError("expected host:port")
    return host.removeprefix("[").removesuffix("]"), int(port)


def peer_uid(sock: socket.socket) -> int:
    """Uid of the process at the other end of a unix socket."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[1])


def _connect(
    sock: socket.socket,
    target: object,
    peer: str,
    deadline: float,
    on_tick: Callable[[], None],
    make: MakeSocket = DeadlineSocket,
) -> DeadlineSocket:
    try:
        sock.setblocking(False)
        status = sock.connect_ex(target)  # type: ignore[arg-type]
        while status in (errno.EINPROGRESS, errno.EAGAIN):
            if time.monotonic() >= deadline:
                raise TransferFailedError(f"{peer} did not accept a connection before the deadline")
            on_tick()
            if status == errno.EAGAIN:  # The backlog of a unix socket is full.
                time.sleep(TICK_SECONDS / 10)
                status = sock.connect_ex(target)  # type: ignore[arg-type]
            elif _writable(sock):
                status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise TransferFailedError(f"cannot connect to {peer}: {errno.errorcode.get(status, status)}")
        return make(sock, peer, on_tick)
    except BaseException:
        sock.close()
        raise


def _writable(sock: socket.socket) -> bool:
    """Waits up to a tick."""
    poll = select.poll()
    poll.register(sock, select.POLLOUT)
    return bool(poll.poll(TICK_SECONDS * 1000))


def _advance(buffers: Sequence[bytes | memoryview], num_bytes: int) -> list[memoryview]:
    """What is left of `buffers` when their first `num_bytes` are done."""
    for position, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [memoryview(buffer)[num_bytes:], *(memoryview(later) for later in buffers[position + 1 :])]
        num_bytes -= len(buffer)
    return []
