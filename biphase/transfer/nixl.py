"""The nixl transport: one-sided READs through NIXL and UCX (RDMA, NVLink, shared memory, tcp). Optional.

Owns NIXL agents: one per holder with a thread of its own, one per reading channel in that channel's thread, each used
by no other thread. What is agreed on, and which blocks may be read, goes over the tcp data connection:

    holder -> reader   AGENT   the holder's agent and the address of its blocks, after WELCOME
    reader -> holder   DONE    the test pattern has been read
    reader -> holder   PIN     as READ: these blocks, under this lease
    holder -> reader   DATA    one status per block; from now on the holder keeps them as they are
    reader -> holder   DONE    after its READ of the blocks whose status is OK
    holder -> reader           the generations of those blocks, read again

What NIXL 1.5 does and does not do, as found by trial, decides the rest. It has no blocking wait and no progress of its
own without a spinning thread, so both sides poll while a transfer is on, the holder too. A frozen peer or a dead link
is never reported: deadlines are ours. Releasing a transfer that is in progress, or disconnecting its peer, does not
keep it from writing later; destroying the agent does, and is what a channel does before it reports a failure. (A
holder that was frozen meanwhile is aborted by UCX when it wakes up and its answer finds nobody; so nixl is no default.)
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from biphase.cache.memory import BlockMemory, SharedRegion
from biphase.errors import BiphaseError, ConfigError, TransferFailedError
from biphase.transfer import frames
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick, sort_out
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind, Status
from biphase.transfer.handshake import PATTERN_BYTES, introduce, test_pattern
from biphase.transfer.leases import HolderPool, LeaseTable, generations_of
from biphase.transfer.nixl_agent import Agent
from biphase.transfer.sockets import TICK_SECONDS, DeadlineSocket
from biphase.transfer.tls import connect

# A reader that pinned blocks and then says nothing for so long is taken for dead.
PIN_SECONDS = 30.0
_PATTERN_SECONDS = 10.0
# Each poll does all that can be done at once, so the pause between two costs latency and not speed.
_POLL_SECONDS = 0.00005
# A reader spins for so long first: most READs over shared memory or RDMA are over by then.
_SPIN_SECONDS = 0.001


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
        while True:
            sock.wait_readable()
            deadline = time.monotonic() + PIN_SECONDS
            try:
                first = sock.recv(1, deadline)
            except TransferFailedError:
                return  # Between two reads everybody may leave.
            header = first + sock.recv(frames.HEADER_BYTES - 1, deadline)
            kind, length = frames.unpack_header(header, frames.MAX_PIN_BYTES)
            if kind is not Kind.PIN:
                raise FrameError(f"a {kind.name} frame in place of PIN")
            self._pin(sock, deadline, *frames.unpack_read(sock.recv(length, deadline), frames.MAX_PIN_BLOCKS))

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()
        self._pattern.close()

    def _pin(
        self, sock: DeadlineSocket, deadline: float, lease_id: str, block_ids: list[int], generations: list[int]
    ) -> None:
        lease = self._leases.begin_io(lease_id)
        if lease is None:
            sock.send_bytes(frames.pack_data(bytes([Status.STALE]) * len(block_ids)), deadline)
            return
        try:
            current = self._leases.current(lease, block_ids, generations)
            statuses = bytes(len(block_ids))
            if current is not None:
                statuses = bytes(Status.OK if ok else Status.STALE for ok in current)
                block_ids = list(itertools.compress(block_ids, current))
            with self._progress():
                sock.send_bytes(frames.pack_data(statuses), deadline)
                if not block_ids:
                    return
                _expect(sock, Kind.DONE, deadline)
            sock.send_bytes(frames.pack_words(generations_of(self._pool.generations, block_ids)), deadline)
        finally:
            self._leases.end_io(lease)

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
            time.sleep(_POLL_SECONDS)
        mine.destroy()


class NixlChannel:
    """The reader's side."""

    transport = "nixl"

    def __init__(self, sock: DeadlineSocket, context: ReaderContext, peer: str) -> None:
        self._socket = sock
        self._memory = context.memory
        self._peer = peer
        self._scratch = SharedRegion("biphase-pattern", PATTERN_BYTES)
        self._mine: Agent | None = Agent(f"{context.node_id}/{context.incarnation}", [context.memory, self._scratch])
        self._local: Any = self._mine.blocks(
            "", self._memory.address, self._memory.block_bytes, self._memory.num_blocks
        )
        self._remote: Any = None
        self.gigabytes_per_second = 0.0

    @classmethod
    def connect(cls, endpoint: Endpoint, context: ReaderContext, deadline: float, on_tick: Tick) -> NixlChannel:
        """
        Raises:
            LayoutMismatchError, StaleHandleError: refused.
            TransferFailedError: no connection in time, or NIXL cannot reach the holder.
        """
        trust = context.trust
        sock = connect(endpoint.tcp_address, endpoint.node_id, deadline, on_tick, trust.tls)
        channel = None
        try:
            welcome = introduce(sock, endpoint, context.hello(endpoint, "nixl"), deadline, trust.token)
            channel = cls(sock, context, endpoint.node_id)
            channel._meet(welcome.num_blocks, deadline)
            return channel
        except BaseException as error:
            if channel is not None:
                channel.close()
            sock.close()
            if isinstance(error, Exception) and not isinstance(error, BiphaseError):
                raise TransferFailedError(f"NIXL cannot reach {endpoint.node_id}: {error!r}") from error
            raise

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._destroy()
        self._socket.close()
        self._scratch.close()

    def abort(self) -> None:
        self._socket.abort()

    def read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        for start in range(0, len(blocks), frames.MAX_PIN_BLOCKS):
            self._read(lease_id, blocks[start : start + frames.MAX_PIN_BLOCKS], progress, deadline)

    def _read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        sock = self._socket
        ids, generations = [block.block_id for block in blocks], [block.generation for block in blocks]
        sock.send_bytes(frames.pack_read(lease_id, ids, generations, Kind.PIN), deadline)
        good = sort_out(*sock.recv_frame(deadline, frames.MAX_PIN_BLOCKS), blocks, progress)
        if not good:
            return
        self._transfer(
            self._local,
            [block.dest_block_id for block in good],
            self._remote,
            [block.block_id for block in good],
            deadline,
        )
        sock.send_bytes(frames.pack_header(Kind.DONE, 0), deadline)
        after = frames.unpack_words(sock.recv(len(good) * frames.WORD_BYTES, deadline))
        if after == [block.generation for block in good]:
            progress.verified.extend([block.index for block in good])
            return
        for block, generation in zip(good, after, strict=True):
            (progress.verified if generation == block.generation else progress.stale).append(block.index)

    def _meet(self, num_blocks: int, deadline: float) -> None:
        """Learns of the holder's agent, and reads and times the test pattern."""
        assert self._mine is not None
        kind, raw = self._socket.recv_frame(deadline, frames.MAX_HELLO_BYTES)
        if kind is not Kind.AGENT:
            raise FrameError(f"a {kind.name} frame in place of AGENT")
        body = frames.unpack_json(raw)
        try:
            metadata = base64.b64decode(frames.text_field(body, "metadata"), validate=True)
        except binascii.Error as error:
            raise FrameError("a NIXL agent that is not base64") from error
        address = frames.count_field(body, "address", 1, 2**64 - 1)
        pattern_address = frames.count_field(body, "pattern_address", 1, 2**64 - 1)
        name = self._mine.api.add_remote_agent(metadata)
        self._remote = self._mine.blocks(name, address, self._memory.block_bytes, num_blocks)
        here = self._mine.blocks("", self._scratch.address, PATTERN_BYTES, 1)
        there = self._mine.blocks(name, pattern_address, PATTERN_BYTES, 1)
        # The first connects and is not timed.
        for _ in range(2):
            start = time.perf_counter()
            self._transfer(here, [0], there, [0], deadline)
            seconds = time.perf_counter() - start
            if self._scratch.view != test_pattern():
                raise TransferFailedError("the test pattern arrived changed")
            self._scratch.view[:] = bytes(PATTERN_BYTES)
        self.gigabytes_per_second = PATTERN_BYTES / max(seconds, 1e-9) / 1e9
        self._socket.send_bytes(frames.pack_header(Kind.DONE, 0), deadline)

    def _transfer(self, local: Any, here: list[int], remote: Any, there: list[int], deadline: float) -> None:
        """One READ, waited for.

        Raises:
            TransferFailedError: no agent is left then, and nothing that could still write.
        """
        mine = self._mine
        assert mine is not None
        try:
            handle, state = mine.start(local, here, remote, there)
            started = time.monotonic()
            tick_at = started + TICK_SECONDS
            while state == "PROC":
                time.sleep(_POLL_SECONDS if time.monotonic() - started > _SPIN_SECONDS else 0)
                now = time.monotonic()
                if now >= deadline:
                    raise TransferFailedError(f"{self._peer} did not answer before the deadline")
                if now >= tick_at:
                    tick_at = now + TICK_SECONDS
                    self._socket.on_tick()
                state = mine.api.check_xfer_state(handle)
            if state != "DONE":
                raise TransferFailedError(f"NIXL could not read from {self._peer}")
            mine.finish(handle)
        except Exception as error:
            self._destroy()
            if isinstance(error, BiphaseError):
                raise
            raise TransferFailedError(f"NIXL could not read from {self._peer}: {error!r}") from error

    def _destroy(self) -> None:
        mine, self._mine = self._mine, None
        if mine is not None:
            mine.destroy()


def _expect(sock: DeadlineSocket, wanted: Kind, deadline: float) -> None:
    kind, _ = sock.recv_frame(deadline, 0)
    if kind is not wanted:
        raise FrameError(f"a {kind.name} frame in place of {wanted.name}")
