"""The holder's side of the nixl transport: one agent on a thread of its own, and the blocks it keeps for readers.

Owns that thread, which makes progress only while somebody reads, and what is said to a reader on its data connection;
nixl.py has the exchange.
"""

from __future__ import annotations

import base64
import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from biphase.cache.memory import BlockMemory, SharedRegion
from biphase.errors import ConfigError
from biphase.transfer import frames
from biphase.transfer.frames import FrameError, Kind, Status, Words
from biphase.transfer.handshake import PATTERN_BYTES, test_pattern
from biphase.transfer.leases import HolderPool, LeaseTable, generations_of
from biphase.transfer.nixl_agent import POLL_SECONDS, Agent
from biphase.transfer.sockets import DeadlineSocket

# A reader that pinned blocks and then says nothing for so long is taken for dead.
PIN_SECONDS = 30.0
_PATTERN_SECONDS = 10.0
# One that is being read, one that is next; and one whose DONE is on its way.
_MAX_PINS = 3


@dataclass(frozen=True, slots=True)
class _Pin:
    """Blocks that a reader is reading, or about to."""

    block_ids: Words
    # By then it must have said DONE.
    deadline: float
    undo: contextlib.ExitStack


class NixlHost:
    """The holder's side: an agent that makes progress while somebody reads.

    Raises:
        ConfigError: NIXL is not installed or does not start.
    """

    def __init__(self, memory: BlockMemory, pool: HolderPool, leases: LeaseTable, name: str) -> None:
        self._memory = memory
        self._pool = pool
        self._leases = leases
        self._name = name
        self._pattern = SharedRegion("biphase-pattern", PATTERN_BYTES)
        self._pattern.view[:] = test_pattern()
        self._changed = threading.Condition()
        self._num_active = 0
        self._closing = False
        self._metadata = b""
        self._failure: BaseException | None = None
        ready = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="nixl-holder", daemon=True)
        self._thread.start()
        ready.wait()
        if self._failure is not None:
            self._thread.join()
            raise ConfigError(f"NIXL does not start: {self._failure}") from self._failure

    def serve(self, sock: DeadlineSocket) -> None:
        """Answers one reader, after WELCOME, until it goes.

        Raises:
            TransferFailedError: it went in the middle of something, was too slow, or sent nonsense.
        """
        with self._progress():
            said = {
                "metadata": base64.b64encode(self._metadata).decode(),
                "address": self._memory.address,
                "pattern_address": self._pattern.address,
            }
            deadline = time.monotonic() + _PATTERN_SECONDS
            sock.send_bytes(frames.pack_json(Kind.AGENT, said), deadline)
            _expect(sock, Kind.DONE, deadline)
        pins: deque[_Pin] = deque()
        try:
            while (header := _next_header(sock, pins)) is not None:
                kind, length, deadline = header
                if kind is Kind.PIN and len(pins) < _MAX_PINS:
                    read = frames.unpack_read(sock.recv(length, deadline), frames.MAX_PIN_BLOCKS)
                    self._pin(sock, pins, deadline, *read)
                elif kind is Kind.DONE and pins and not length:
                    pin = pins.popleft()
                    with pin.undo:
                        generations = generations_of(self._pool.generations, pin.block_ids)
                    sock.send_bytes(frames.pack_words(generations), deadline)
                else:
                    raise FrameError(f"a {kind.name} frame with {len(pins)} parts pinned")
        finally:
            for pin in pins:
                pin.undo.close()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._pattern.close()

    def _pin(
        self,
        sock: DeadlineSocket,
        pins: deque[_Pin],
        deadline: float,
        lease_id: str,
        block_ids: Words,
        generations: Words,
    ) -> None:
        lease = self._leases.begin_io(lease_id)
        if lease is None:
            sock.send_bytes(frames.pack_data(bytes([Status.STALE]) * len(block_ids)), deadline)
            return
        with contextlib.ExitStack() as undo:
            undo.callback(self._leases.end_io, lease)
            undo.enter_context(self._progress())
            current = self._leases.current(lease, block_ids, generations)
            statuses = bytes(len(block_ids))
            if current is not None:
                statuses = bytes(Status.OK if ok else Status.STALE for ok in current)
                block_ids = block_ids[current]
            sock.send_bytes(frames.pack_data(statuses), deadline)
            if len(block_ids):
                pins.append(_Pin(block_ids, deadline, undo.pop_all()))

    @contextlib.contextmanager
    def _progress(self) -> Iterator[None]:
        with self._changed:
            self._num_active += 1
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._num_active -= 1

    def _run(self, ready: threading.Event) -> None:
        try:
            mine = Agent(self._name, [self._memory, self._pattern])
            self._metadata = mine.api.get_agent_metadata()
        except Exception as error:
            self._failure = error
            return
        finally:
            ready.set()
        while True:
            with self._changed:
                if not self._num_active and not self._closing:
                    self._changed.wait()
                if self._closing:
                    break
            mine.api.get_new_notifs()
            time.sleep(POLL_SECONDS)
        mine.destroy()


def _expect(sock: DeadlineSocket, wanted: Kind, deadline: float) -> None:
    kind, _ = sock.recv_frame(deadline, 0)
    if kind is not wanted:
        raise FrameError(f"a {kind.name} frame in place of {wanted.name}")


def _next_header(sock: DeadlineSocket, pins: deque[_Pin]) -> tuple[Kind, int, float] | None:
    """The next frame's, and until when it must be dealt with; None when the reader, with nothing pinned, has left."""
    if not pins:
        return sock.next_header(PIN_SECONDS, frames.MAX_PIN_BYTES)
    raw = sock.recv(frames.HEADER_BYTES, pins[0].deadline)
    return *frames.unpack_header(raw, frames.MAX_PIN_BYTES), time.monotonic() + PIN_SECONDS
