"""The memory that holds KV blocks, and the generation table beside it. Stdlib only.

Owns anonymous shared memory (memfd): it has a file descriptor that can be handed to a peer on the same host, and it is
gone when the last process that maps it is gone, even after kill -9; nothing ever stands in /dev/shm. Owns no
bookkeeping: which block is free, leased or cached is the BlockPool's business, what the bytes mean is the layout's.

    BlockMemory        [block 0 | block 1 | ... ]     num_blocks * block_bytes, one contiguous run per block
    SharedGenerations  [g0 g1 g2 ...]                 one uint64 per block, read by same-host peers around a copy

Both are sealed after the owner mapped them: a peer that gets the descriptor can map it for reading only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from functools import cache
from operator import itemgetter

# Not in the mmap and fcntl modules of Python 3.11.
_MADV_POPULATE_WRITE = 23
_F_SEAL_FUTURE_WRITE = 0x0010
# Page faults taken in one go: a few milliseconds' worth.
_TOUCH_BYTES = 16 * 2**20
# A view takes about 200 bytes.
_MAX_KEPT_VIEWS = 65536


class SharedRegion:
    """`num_bytes` of zeroed memory behind a memfd, mapped writable here and read-only anywhere else.

    Args:
        name: shown in /proc/<pid>/maps, for people.
        num_bytes: at least 1.
        populate: touch every page now, so that later writes take no page faults and a lack of memory shows at once.

    Raises:
        MemoryError: the system would not give that much.
    """

    def __init__(self, name: str, num_bytes: int, *, populate: bool = False) -> None:
        if num_bytes < 1:
            raise ValueError(f"num_bytes is {num_bytes}, must be at least 1")
        self.num_bytes = num_bytes
        self._fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, num_bytes)
            self._map = mmap.mmap(self._fd, num_bytes, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(self._fd)
            raise MemoryError(f"cannot map {num_bytes} bytes for {name}: {error.strerror}") from error
        _advise(self._map, mmap.MADV_HUGEPAGE)
        _seal(self._fd)
        if populate and not _advise(self._map, _MADV_POPULATE_WRITE):
            raise MemoryError(f"cannot populate {num_bytes} bytes for {name}")
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._view: memoryview | None = memoryview(self._map)

    @property
    def fd(self) -> int:
        """Descriptor of the memory. Stays the owner's: whoever sends it to a peer sends a duplicate."""
        return self._fd

    @property
    def address(self) -> int:
        """Where the mapping starts in this process."""
        return self._address

    @property
    def view(self) -> memoryview:
        """All of it, as writable bytes."""
        if self._view is None:
            raise ValueError("the memory is closed")
        return self._view

    def touch(self, start: int, num_bytes: int) -> bool:
        """Takes the page faults of a part now, whatever it holds. Other threads go on. False: the system would not.

        The region must not be closed meanwhile.
        """
        start -= start % mmap.PAGESIZE
        length = min(num_bytes, self.num_bytes - start)
        return int(_libc().madvise(self._address + start, length, _MADV_POPULATE_WRITE)) == 0

    def open_read_only(self) -> int:
        """A new descriptor of the same memory that cannot be mapped for writing. The caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Closes the descriptor and lets go of the mapping, which lasts as long as any view or tensor over it.

        It is never unmapped by force: a tensor does not count as a user of the buffer, only of the view object, and
        would read from nowhere. Idempotent.
        """
        if self._view is not None:
            os.close(self._fd)
            self._view = None
            del self._map


class BlockMemory:
    """Memory of a block pool: `num_blocks` runs of `block_bytes`.

    Raises:
        MemoryError: the system would not give that much.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, populate: bool = False) -> None:
        if num_blocks < 1 or block_bytes < 1:
            raise ValueError(f"num_blocks {num_blocks} and block_bytes {block_bytes} must be at least 1")
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._region = SharedRegion("biphase-kv", num_blocks * block_bytes, populate=populate)
        # One view per block, made when the first run of blocks is asked for: slicing costs more than a small copy.
        self._blocks: list[memoryview] | None = None

    @property
    def num_bytes(self) -> int:
        return self._region.num_bytes

    @property
    def fd(self) -> int:
        return self._region.fd

    @property
    def address(self) -> int:
        return self._region.address

    @property
    def view(self) -> memoryview:
        """All blocks, as writable bytes."""
        return self._region.view

    def touch_all(self, stop: Callable[[], bool]) -> bool:
        """Takes the page faults of all blocks, part by part, until `stop`: for a thread of its own, while others use
        the memory already. False: the system would not give that much. Must have returned before `close`.
        """
        for start in range(0, self.num_bytes, _TOUCH_BYTES):
            if stop():
                return True
            if not self._region.touch(start, _TOUCH_BYTES):
                return False
        return True

    def block(self, block_id: int) -> memoryview:
        """The bytes of one block, writable.

        Raises:
            IndexError: no such block.
        """
        if not 0 <= block_id < self.num_blocks:
            raise IndexError(f"block {block_id} is not one of {self.num_blocks}")
        start = block_id * self.block_bytes
        return self._region.view[start : start + self.block_bytes]

    def blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        """The bytes of several blocks, writable.

        Raises:
            IndexError: no such block.
        """
        if len(block_ids) < 2 or self.num_blocks > _MAX_KEPT_VIEWS:
            return [self.block(block_id) for block_id in block_ids]
        if min(block_ids) < 0:
            raise IndexError(f"block {min(block_ids)} is not one of {self.num_blocks}")
        if self._blocks is None:
            self._blocks = [self.block(block_id) for block_id in range(self.num_blocks)]
        return list(itemgetter(*block_ids)(self._blocks))

    def open_read_only(self) -> int:
        return self._region.open_read_only()

    def close(self) -> None:
        self._blocks = None
        self._region.close()


class SharedGenerations:
    """One generation per block in shared memory, so that a same-host peer sees a reuse the moment it happens.

    `table` reads and writes like `array('Q')`: `table[block_id] += 1`, `len(table)`. Hand it to the BlockPool.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, must be at least 1")
        self.num_blocks = num_blocks
        self._region = SharedRegion("biphase-generations", num_blocks * 8, populate=True)
        self.table: memoryview = self._region.view.cast("Q")

    @property
    def fd(self) -> int:
        return self._region.fd

    def open_read_only(self) -> int:
        return self._region.open_read_only()

    def close(self) -> None:
        """Idempotent. The table lasts as long as somebody holds it."""
        self._region.close()


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _advise(region: mmap.mmap, advice: int) -> bool:
    try:
        region.madvise(advice)
    except (OSError, ValueError):
        return False
    return True


def _seal(fd: int) -> None:
    """No resizing by anyone (a shrunk file would be a SIGBUS here), and no new writable mapping."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    # Missing before Linux 5.1. Peers get a read-only descriptor all the same.
    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _F_SEAL_FUTURE_WRITE)
