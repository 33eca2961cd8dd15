"""What every transport offers a reader, and the words for one read. No I/O here.

A read is asked for in blocks and answered per block: what was verified is kept even when the rest failed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from biphase.cache.memory import BlockMemory
from biphase.errors import BiphaseError
from biphase.rpc.trust import OPEN, Trust
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import FrameError, Kind, Status
from biphase.transfer.handshake import Hello
from biphase.transfer.layout import KVLayout
from biphase.transfer.reslice import Segment


class Handle(Protocol):
    """A BlockHandle message, or anything shaped like it."""

    @property
    def index(self) -> int: ...
    @property
    def block_id(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def block_hash(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """One block to fetch: its handle at the holder, and where it goes here."""

    # Place in the request's chain; names the block in ReadResult.
    index: int
    block_id: int
    generation: int
    # Where all of it goes, if both have the same layout.
    dest_block_id: int
    # Where its parts go, if not.
    segments: Sequence[Segment] = ()

    @classmethod
    def from_handle(cls, handle: Handle, dest_block_id: int) -> ReadRequest:
        return cls(handle.index, handle.block_id, handle.generation, dest_block_id)


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a read ended. No byte lands in any of its destinations any more.

    `verified`, `stale` and `corrupt` are indexes of the blocks asked for; those in none of them were not reached.
    """

    verified: tuple[int, ...]
    stale: tuple[int, ...]
    corrupt: tuple[int, ...]
    # Payload of the verified blocks.
    num_bytes: int
    # From the first byte asked for to the last one checked, without the wait behind other reads.
    seconds: float
    # "tcp", "shm", "nixl"; "none" when no connection came about.
    transport: str
    # None exactly when every block was verified.
    error: BiphaseError | None

    @property
    def error_code(self) -> str:
        """Of the error; "" when there is none."""
        return "" if self.error is None else self.error.code.value


@dataclass(slots=True)
class ReadProgress:
    """Filled in by a channel as blocks come in; its thread's own."""

    verified: list[int] = field(default_factory=list)
    stale: list[int] = field(default_factory=list)
    corrupt: list[int] = field(default_factory=list)
    # What the read went over, or tried to.
    transport: str = "none"

    def any(self) -> bool:
        return bool(self.verified or self.stale or self.corrupt)


@dataclass(frozen=True, slots=True)
class ReaderContext:
    """The reader's side of every channel."""

    memory: BlockMemory
    # Of that memory.
    layout: KVLayout
    # The reader's own, for the holder to judge; another than `layout` when that is a staging memory.
    own_layout: KVLayout
    node_id: str
    incarnation: str
    # Transports that may be used, best first.
    transports: tuple[str, ...]
    # False: a read fails rather than go over another transport than the first.
    allow_fallback: bool
    # The fastest of several transports is taken, and not the first that works.
    by_speed: bool = False
    # What is shown to holders, and asked of them.
    trust: Trust = OPEN

    def hello(self, endpoint: Endpoint, transport: str) -> Hello:
        """What the reader says first to a holder."""
        return Hello(
            node_id=self.node_id,
            incarnation=self.incarnation,
            holder_node_id=endpoint.node_id,
            holder_incarnation=endpoint.incarnation,
            layout=self.own_layout,
            holder_layout=endpoint.layout,
            transport=transport,
        )


def sort_out(
    kind: Kind, statuses: bytes, blocks: Sequence[ReadRequest], progress: ReadProgress
) -> Sequence[ReadRequest]:
    """The blocks that a holder will give, by its DATA frame; the others are noted as stale.

    Raises:
        FrameError: it is no answer to what was asked.
    """
    if kind is not Kind.DATA or len(statuses) != len(blocks):
        raise FrameError(f"a {kind.name} frame of {len(statuses)} blocks in place of DATA for {len(blocks)}")
    num_ok = statuses.count(Status.OK)
    if num_ok == len(blocks):
        return blocks
    if num_ok + statuses.count(Status.STALE) != len(blocks):
        raise FrameError("a DATA frame with an unknown block status")
    pairs = list(zip(blocks, statuses, strict=True))
    progress.stale.extend(block.index for block, status in pairs if status != Status.OK)
    return [block for block, status in pairs if status == Status.OK]


class Channel(Protocol):
    """An open way to one incarnation of one holder, used by one thread."""

    transport: str
    # Of the handshake's test pattern.
    gigabytes_per_second: float

    def fileno(self) -> int:
        """Becomes readable, or hangs up, when the holder is gone."""
        ...

    def read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        """Fetches blocks into their destinations and checks each.

        Returns or raises only when no byte can land in a destination any more.

        Raises:
            TransferFailedError: the channel is of no more use. What is in `progress` stays true.
        """
        ...

    def close(self) -> None: ...

    def abort(self) -> None:
        """From any thread: a read in progress fails soon."""
        ...


Tick = Callable[[], None]
