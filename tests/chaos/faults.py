"""A tcp proxy that breaks what passes through it, on command.

Put it between a reader and a holder (or any two who speak tcp): it forwards until a fault is armed, then does the
fault to the bytes that go from the target to the client, counted from the moment of arming. Owns its threads; leaves
nothing behind after `close`.
"""

from __future__ import annotations

import contextlib
import random
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from tests.chaos.triggers import Trigger

_CHUNK_BYTES = 64 * 1024


class FaultKind(StrEnum):
    # Nothing passes for `seconds`.
    DELAY = "delay"
    # Nothing passes any more, and the connection stays open: a dead link.
    DROP = "drop"
    # The stream ends, politely.
    TRUNCATE = "truncate"
    # The stream ends with RST.
    RESET = "reset"
    # One byte is changed.
    CORRUPT = "corrupt"
    # Two neighbouring runs of `num_bytes` change places.
    REORDER = "reorder"
    # `num_bytes` a second pass, for ever.
    SLOW = "slow"


@dataclass(frozen=True, slots=True)
class Fault:
    kind: FaultKind
    # Bytes that still pass unharmed after arming.
    after_bytes: int = 0
    seconds: float = 0.0
    num_bytes: int = 4096

    @classmethod
    def draw(cls, rng: random.Random, max_bytes: int) -> Fault:
        """A random fault somewhere in the next `max_bytes`."""
        return cls(
            rng.choice(list(FaultKind)),
            after_bytes=rng.randrange(max_bytes),
            seconds=rng.random() * 0.3,
            num_bytes=rng.choice((16, 4096, 65536)),
        )


class FaultProxy:
    """Forwards 127.0.0.1:<own port> to `target` ("host:port")."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._lock = threading.Lock()
        self._fault: Fault | None = None
        self._refusing = False
        self._up_trigger: Trigger | None = None
        self._down_trigger: Trigger | None = None
        # Cleared: nothing passes to the clients.
        self._open = threading.Event()
        self._open.set()
        self._connections: list[_Connection] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.num_connections = 0
        self.num_faults = 0
        self._thread = threading.Thread(target=self._accept, name="fault-proxy", daemon=True)
        self._thread.start()

    def arm(self, fault: Fault) -> None:
        """The next connection that carries bytes to its client suffers `fault`, once."""
        with self._lock:
            self._fault = fault

    def refuse(self, refusing: bool = True) -> None:
        """New connections are reset at once."""
        self._refusing = refusing

    def on_request(self, min_bytes: int, num_parts: int, action: Callable[[], None]) -> None:
        """Calls `action` before the next part of at least `min_bytes` goes to the target; `num_parts`: not the next."""
        with self._lock:
            self._up_trigger = Trigger(min_bytes, num_parts, action)

    def on_answer(self, num_parts: int, action: Callable[[], None]) -> None:
        """The same for the other direction, for parts of any size."""
        with self._lock:
            self._down_trigger = Trigger(1, num_parts, action)

    def hold(self) -> None:
        """Nothing passes to the clients until `disarm`."""
        self._open.clear()

    def disarm(self) -> None:
        """Forgets triggers, and lets pass what was held."""
        with self._lock:
            self._up_trigger = self._down_trigger = None
        self._open.set()

    def passes_up(self, num_bytes: int) -> None:
        """A connection is about to forward so much to the target."""
        with self._lock:
            trigger = self._up_trigger
            due = trigger is not None and trigger.sees(num_bytes)
            if due:
                self._up_trigger = None
        if due and trigger is not None:
            trigger.action()

    def passes_down(self, num_bytes: int) -> None:
        """And so much to its client."""
        while not self._open.wait(0.1):
            if self._closed:
                return
        with self._lock:
            trigger = self._down_trigger
            due = trigger is not None and trigger.sees(num_bytes)
            if due:
                self._down_trigger = None
        if due and trigger is not None:
            trigger.action()

    def take(self) -> Fault | None:
        with self._lock:
            fault, self._fault = self._fault, None
            self.num_faults += fault is not None
        return fault

    def cut(self) -> None:
        """Resets all connections there are."""
        with self._lock:
            connections, self._connections = self._connections, []
        for connection in connections:
            connection.reset()

    def close(self) -> None:
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.num_connections += 1
            try:
                if self._refusing:
                    raise ConnectionRefusedError
                target = socket.create_connection(self._target, timeout=5)
            except OSError:
                _reset(client)
                continue
            target.settimeout(None)
            with self._lock:
                self._connections.append(_Connection(self, client, target))


class _Connection:
    def __init__(self, proxy: FaultProxy, client: socket.socket, target: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._target = target
        self._ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._guard, args=(work,), name="fault-pump", daemon=True)
            for work in (self._up, self._down)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for sock in (self._client, self._target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._client.close()
        self._target.close()

    def reset(self) -> None:
        self._ended.set()
        _reset(self._client)
        self.close()

    def _guard(self, work: object) -> None:
        with contextlib.suppress(OSError, ValueError):
            work()  # type: ignore[operator]
        for sock in (self._client, self._target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def _up(self) -> None:
        while data := self._recv(self._client):
            self._proxy.passes_up(len(data))
            self._target.sendall(data)

    def _down(self) -> None:
        fault: Fault | None = None
        left = 0
        while data := self._recv(self._target):
            self._proxy.passes_down(len(data))
            if fault is None:
                fault = self._proxy.take()
                left = fault.after_bytes if fault is not None else 0
            if fault is None:
                self._client.sendall(data)
                continue
            if len(data) <= left:
                self._client.sendall(data)
                left -= len(data)
                continue
            self._client.sendall(data[:left])
            if not self._suffer(fault, data[left:]):
                return
            fault = None

    def _suffer(self, fault: Fault, data: bytes) -> bool:
        """Does the fault to the stream that starts with `data`. False: the stream is over."""
        if fault.kind is FaultKind.DELAY:
            self._ended.wait(fault.seconds)
        elif fault.kind is FaultKind.DROP:
            self._ended.wait()
            return False
        elif fault.kind is FaultKind.TRUNCATE:
            return False
        elif fault.kind is FaultKind.RESET:
            _reset(self._client)
            return False
        elif fault.kind is FaultKind.CORRUPT:
            data = bytes([data[0] ^ 0x10]) + data[1:]
        elif fault.kind is FaultKind.REORDER:
            size = fault.num_bytes
            while len(data) < 2 * size and (more := self._recv(self._target)):
                data += more
            data = data[size : 2 * size] + data[:size] + data[2 * size :]
        elif fault.kind is FaultKind.SLOW:
            return self._trickle(fault.num_bytes, data)
        self._client.sendall(data)
        return True

    def _trickle(self, bytes_per_second: int, data: bytes) -> bool:
        while data:
            for start in range(0, len(data), max(1, bytes_per_second // 20)):
                self._client.sendall(data[start : start + max(1, bytes_per_second // 20)])
                if self._ended.wait(0.05):
                    return False
            data = self._recv(self._target)
        return False

    def _recv(self, sock: socket.socket) -> bytes:
        # Never blocked in recv: a socket that somebody waits in is not reset by closing it.
        while not self._ended.is_set():
            poll = select.poll()
            poll.register(sock.fileno(), select.POLLIN)
            if poll.poll(20):
                return sock.recv(_CHUNK_BYTES)
        return b""


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def wait_until(condition: object, seconds: float = 5.0) -> bool:
    """Polls a callable until it is true. False: it never was."""
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True
