"""The disk tier of one namespace: blocks in files, found again after a restart.

Owns a folder (one file per block, `layout.json` beside them), its bounded size, least recently used first, and the
threads that touch the disk: one writes and deletes, one verifies what an earlier life left. Nobody waits for either.
What is listed here was written or verified by this life, and is verified again whenever it is read. Owns no memory and
no index: it tells its listener what came and went, under the given lock.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from biphase.transfer.layout import KVLayout
from services.kvstore.diskfile import (
    HEADER_BYTES,
    BadBlockFileError,
    left_behind,
    path_of,
    read_block,
    write_block,
)

log = event_logger(__name__)

LAYOUT_FILE = "layout.json"
_MAX_WANTED = 65536
_FAILED_WRITE_PAUSE_SECONDS = 1.0


class DiskListener(Protocol):
    """Called under the lock; quick."""

    def on_disk(self, block_hash: BlockHash) -> None: ...
    def off_disk(self, block_hash: BlockHash) -> None: ...


@dataclass(slots=True)
class DiskCounts:
    """Changed under the lock only."""

    num_written: int = 0
    num_read: int = 0
    num_evicted: int = 0
    # To be written, but gone from memory before their turn, or too many.
    num_skipped: int = 0
    # Torn, flipped or misnamed: dropped.
    num_corrupt: int = 0
    # The disk would not write or read.
    num_failed: int = 0
    # Left by an earlier life, and good.
    num_recovered: int = 0


# Called under the lock.
BlockSource = Callable[[BlockHash], tuple[memoryview, Callable[[], None]] | None]


class DiskTier:
    """Blocks of one layout under `folder`.

    Args:
        capacity_bytes: file sizes, headers included.
        source: memory of a block that is to be written, or None when it is gone from there. The second part is
            called, once, when the memory was read.
        lock: the pool's, so that what is in memory and what is on disk is known together.
    """

    def __init__(
        self,
        folder: Path,
        layout: KVLayout,
        capacity_bytes: int,
        listener: DiskListener,
        lock: threading.RLock,
        source: BlockSource,
    ) -> None:
        self._folder = folder
        self._layout = layout
        self._source = source
        self._max_blocks = max(1, capacity_bytes // (HEADER_BYTES + layout.block_bytes))
        self._listener = listener
        self._lock = lock
        self._changed = threading.Condition(lock)
        # Hash -> tenant, least recently used first.
        self._entries: OrderedDict[BlockHash, str] = OrderedDict()
        # Named, not held: a block evicted from memory before its turn is not written.
        self._wanted: deque[tuple[BlockHash, str]] = deque()
        self._deletes: deque[BlockHash] = deque()
        # What the writing thread does just now.
        self._writing: BlockHash | None = None
        self._busy = False
        self._closing = False
        # What was found or begun to be written before the last of them is not wanted any more.
        self._num_clears = 0
        self.verified = False
        self.counts = DiskCounts()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAYOUT_FILE).write_text(json.dumps(layout.to_json()))
        self._threads = [
            threading.Thread(target=self._write_forever, name="disk-write", daemon=True),
            threading.Thread(target=self._verify_all, name="disk-verify", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # ---- any thread

    def __contains__(self, block_hash: BlockHash) -> bool:
        return block_hash in self._entries

    def __len__(self) -> int:
        return len(self._entries)

    def hashes(self) -> list[BlockHash]:
        with self._lock:
            return list(self._entries)

    def tenant_of(self, block_hash: BlockHash) -> str | None:
        """None when the block is not here."""
        with self._lock:
            return self._entries.get(block_hash)

    def want(self, hashes: Sequence[BlockHash], tenant: str) -> None:
        """Has the blocks of one chain written soon, those that are in memory still when their turn comes.

        The last one first: writing counts as use, there and here, and a prefix shall outlive what follows it.
        """
        with self._lock:
            missing = [block_hash for block_hash in reversed(hashes) if block_hash not in self._entries]
            room = 0 if self._closing else _MAX_WANTED - len(self._wanted)
            self.counts.num_skipped += max(0, len(missing) - room)
            self._wanted.extend((block_hash, tenant) for block_hash in missing[-room:] if room > 0)
            self._changed.notify_all()

    def clear(self) -> None:
        """Forgets all blocks, also those that are being written or verified, or wait for it."""
        with self._changed:
            self._num_clears += 1
            self._wanted.clear()
            cleared = list(self._entries)
            self._entries.clear()
            self._deletes.extend(cleared)
            for block_hash in cleared:
                self._listener.off_disk(block_hash)
            self._changed.notify_all()

    def read(self, block_hash: BlockHash, into: memoryview) -> bool:
        """Fills `into` with a block, in the caller's thread. False: it is not to be had, and not listed any more."""
        with self._lock:
            if block_hash not in self._entries:
                return False
            self._entries.move_to_end(block_hash)
        path = self._path(block_hash)
        try:
            read_block(path, block_hash, self._layout.namespace, into)
            # The next life takes the last used first.
            os.utime(path)
        except (BadBlockFileError, OSError) as error:
            self._drop(block_hash, error)
            return False
        with self._lock:
            self.counts.num_read += 1
        return True

    def close(self, timeout_seconds: float) -> None:
        """Writes what waits, for so long at most, and ends the threads."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while (self._wanted or self._deletes or self._busy) and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            self._closing = True
            self.counts.num_skipped += len(self._wanted)
            self._wanted.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def wait_idle(self, timeout_seconds: float) -> bool:
        """For tests: whether everything was verified and written in that time."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._wanted or self._deletes or self._busy or not self.verified:
                if (left := deadline - time.monotonic()) <= 0:
                    return False
                self._changed.wait(left)
        return True

    # ---- the writing thread

    def _write_forever(self) -> None:
        while True:
            with self._changed:
                while not (self._wanted or self._deletes or self._closing):
                    self._changed.wait()
                if self._closing and not self._deletes:
                    return
                # A block that came back meanwhile has its file still, or is about to be written anew.
                deletes = [block_hash for block_hash in self._deletes if block_hash not in self._entries]
                self._deletes.clear()
                self._busy = True
            for block_hash in deletes:
                self._path(block_hash).unlink(missing_ok=True)
            self._write_next()
            with self._changed:
                self._writing = None
                self._busy = False
                self._changed.notify_all()

    def _write_next(self) -> None:
        with self._lock:
            if not self._wanted:
                return
            block_hash, tenant = self._wanted.popleft()
            if block_hash in self._entries:
                return
            found = self._source(block_hash)
            if found is None:
                self.counts.num_skipped += 1
                return
            self._writing = block_hash
            num_clears = self._num_clears
        payload, done = found
        path = self._path(block_hash)
        try:
            path.parent.mkdir(exist_ok=True)
            write_block(path, block_hash, self._layout.namespace, tenant, payload)
        except OSError as error:
            self._failed("write", error)
            with self._changed:
                if not self._closing:
                    self._changed.wait(_FAILED_WRITE_PAUSE_SECONDS)
            return
        finally:
            done()
        with self._lock:
            self.counts.num_written += 1
            if num_clears == self._num_clears:
                self._enter(block_hash, tenant)
            else:
                self._deletes.append(block_hash)

    def _enter(self, block_hash: BlockHash, tenant: str) -> None:
        """Lists a block; under the lock. The oldest go for it."""
        if block_hash not in self._entries:
            self._entries[block_hash] = tenant
            self._listener.on_disk(block_hash)
        while len(self._entries) > self._max_blocks:
            oldest, _ = self._entries.popitem(last=False)
            self._deletes.append(oldest)
            self.counts.num_evicted += 1
            self._listener.off_disk(oldest)
            self._changed.notify_all()

    def _drop(self, block_hash: BlockHash, error: BadBlockFileError | OSError) -> None:
        with self._lock:
            if self._entries.pop(block_hash, None) is not None:
                self._deletes.append(block_hash)
                self._listener.off_disk(block_hash)
                self._changed.notify_all()
        if isinstance(error, BadBlockFileError):
            self._corrupt(block_hash, error)
        else:
            self._failed("read", error)

    # ---- the verifying thread

    def _verify_all(self) -> None:
        """Lists what an earlier life left here and is still whole, last used first."""
        start = time.monotonic()
        buffer = memoryview(bytearray(self._layout.block_bytes))
        left = left_behind(self._folder)
        for path in left.unfinished:
            # Whoever wrote it did not live to finish; this life starts with its first write after this scan or writes
            # another name.
            self._unlink_part(path)
        for path in left.blocks:
            if self._closing:
                return
            block_hash = BlockHash(bytes.fromhex(path.name))
            if block_hash in self._entries:
                continue
            try:
                found = read_block(path, block_hash, self._layout.namespace, buffer)
            except BadBlockFileError as error:
                self._corrupt(block_hash, error)
                self._unlink_unlisted(path, block_hash)
                continue
            except OSError as error:
                self._failed("read", error)
                continue
            with self._lock:
                if len(self._entries) < self._max_blocks and not self._num_clears:
                    self._enter(block_hash, found.tenant)
                    # Older than anything this life has used.
                    self._entries.move_to_end(block_hash, last=False)
                    self.counts.num_recovered += 1
                    continue
            self._unlink_unlisted(path, block_hash)
        with self._changed:
            self.verified = True
            self._changed.notify_all()
        if self.counts.num_recovered or self.counts.num_corrupt:
            log.info(
                "disk_verified",
                num_recovered=self.counts.num_recovered,
                num_corrupt=self.counts.num_corrupt,
                seconds=time.monotonic() - start,
            )

    def _unlink_part(self, path: Path) -> None:
        with self._lock:
            writing = self._writing
        if writing is None or writing.hex() != path.stem:
            path.unlink(missing_ok=True)

    def _unlink_unlisted(self, path: Path, block_hash: BlockHash) -> None:
        with self._lock:
            if block_hash not in self._entries and self._writing != block_hash:
                path.unlink(missing_ok=True)

    # ---- odds and ends

    def _path(self, block_hash: BlockHash) -> Path:
        return path_of(self._folder, block_hash)

    def _corrupt(self, block_hash: BlockHash, error: BadBlockFileError) -> None:
        with self._lock:
            self.counts.num_corrupt += 1
        log.warning("disk_block_corrupt", block=block_hash.hex()[:16], reason=str(error))

    def _failed(self, what: str, error: OSError) -> None:
        with self._lock:
            self.counts.num_failed += 1
        log.warning("disk_failed", during=what, reason=error.strerror or str(error))
