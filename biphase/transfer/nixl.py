"""The nixl transport: one-sided READs through NIXL and UCX (RDMA, NVLink, shared memory, tcp). Optional.

Owns the reader's side: an agent per channel, used by its thread alone; the holder's is nixl_host.py. What is agreed
on, and which blocks may be read, goes over the tcp data connection:

    holder -> reader   AGENT   the holder's agent and the address of its blocks, after WELCOME
    reader -> holder   DONE    the test pattern has been read
    reader -> holder   PIN     as READ: these blocks, under this lease
    holder -> reader   DATA    one status per block; from now on the holder keeps them as they are
    reader -> holder   DONE    after its READ of the blocks whose status is OK
    holder -> reader           the generations of those blocks, read again

A long read goes in parts, and the next PIN leaves before the READ of the one before it starts: the holder looks after
it meanwhile. DONE is for the oldest PIN that had a block with status OK; the answers come in the order of the frames.

What NIXL 1.5 does and does not do, as found by trial, decides the rest. It has no blocking wait and no progress of its
own without a spinning thread, so both sides poll while a transfer is on, the holder too. A frozen peer or a dead link
is never reported: deadlines are ours. Releasing a transfer that is in progress, or disconnecting its peer, does not
keep it from writing later; destroying the agent does, and is what a channel does before it reports a failure. (A
holder that was frozen meanwhile is aborted by UCX when it wakes up and its answer finds nobody; so nixl is no default.)
"""

from __future__ import annotations

import base64
import binascii
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from biphase.cache.memory import SharedRegion
from biphase.errors import BiphaseError, TransferFailedError
from biphase.transfer import frames
from biphase.transfer.channels import ReaderContext, ReadProgress, ReadRequest, Tick, sort_out
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind
from biphase.transfer.handshake import PATTERN_BYTES, introduce, test_pattern
from biphase.transfer.nixl_agent import POLL_SECONDS, Agent, BlockIds
from biphase.transfer.sockets import TICK_SECONDS, DeadlineSocket
from biphase.transfer.tls import connect

# A reader spins for so long first: most READs over shared memory or RDMA are over by then.
_SPIN_SECONDS = 0.001
# A part of a read: enough that what a READ costs beside its bytes does not show.
_PART_BLOCKS = 2048
_PART_BYTES = 64 * 1024 * 1024


class _Part:
    """The blocks of one PIN, column by column: NIXL takes arrays as they are, and lists number by number."""

    def __init__(self, blocks: Sequence[ReadRequest]) -> None:
        self.blocks = blocks
        self.block_ids = frames.pack_words([block.block_id for block in blocks])
        self.generations = frames.pack_words([block.generation for block in blocks])
        self.there = frames.words_of(self.block_ids).astype(np.int32)
        self.here = np.array(array("i", [block.dest_block_id for block in blocks]))


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
        size = max(1, min(_PART_BLOCKS, _PART_BYTES // self._memory.block_bytes))
        part = self._pin(lease_id, blocks[:size], deadline)
        # The one before, whose generations are still to come.
        due = _Part(())
        for start in range(0, len(blocks), size):
            more = blocks[start + size : start + 2 * size]
            following = self._pin(lease_id, more, deadline) if more else None
            good = sort_out(*self._socket.recv_frame(deadline, frames.MAX_PIN_BLOCKS), part.blocks, progress)
            if len(good) < len(part.blocks):
                part = _Part(good)
            if good:
                self._transfer(self._local, part.here, self._remote, part.there, deadline)
                self._socket.send_bytes(frames.pack_header(Kind.DONE, 0), deadline)
            self._verify(due, progress, deadline)
            due = part
            if following is not None:
                part = following
        self._verify(due, progress, deadline)

    def _pin(self, lease_id: str, blocks: Sequence[ReadRequest], deadline: float) -> _Part:
        part = _Part(blocks)
        self._socket.send_bytes(frames.pack_read(lease_id, part.block_ids, part.generations, Kind.PIN), deadline)
        return part

    def _verify(self, part: _Part, progress: ReadProgress, deadline: float) -> None:
        if not part.blocks:
            return
        after = self._socket.recv(len(part.generations), deadline)
        if after == part.generations:
            progress.verified.extend([block.index for block in part.blocks])
            return
        for block, generation in zip(part.blocks, frames.unpack_words(after), strict=True):
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
        first = np.zeros(1, np.int32)
        # The first connects and is not timed.
        for _ in range(2):
            start = time.perf_counter()
            self._transfer(here, first, there, first, deadline)
            seconds = time.perf_counter() - start
            if self._scratch.view != test_pattern():
                raise TransferFailedError("the test pattern arrived changed")
            self._scratch.view[:] = bytes(PATTERN_BYTES)
        self.gigabytes_per_second = PATTERN_BYTES / max(seconds, 1e-9) / 1e9
        self._socket.send_bytes(frames.pack_header(Kind.DONE, 0), deadline)

    def _transfer(self, local: Any, here: BlockIds, remote: Any, there: BlockIds, deadline: float) -> None:
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
                time.sleep(POLL_SECONDS if time.monotonic() - started > _SPIN_SECONDS else 0)
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
