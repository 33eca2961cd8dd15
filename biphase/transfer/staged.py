"""A channel to a holder whose blocks are cut another way: reads them whole into a staging memory, then sorts them.

Owns the staging memory and when it is copied from. The channel below checks what arrives, as for any other read.
"""

from __future__ import annotations

from collections.abc import Sequence

from biphase.cache.memory import BlockMemory
from biphase.transfer.channels import Channel, ReadProgress, ReadRequest
from biphase.transfer.reslice import Reslice, Scatter

# Blocks read at a time: enough for few round trips, little enough to be in the cache when they are copied.
_STAGING_BYTES = 4 * 1024 * 1024
_MAX_STAGING_BLOCKS = 256


def staging_memory(block_bytes: int) -> BlockMemory:
    num_blocks = max(1, min(_MAX_STAGING_BLOCKS, _STAGING_BYTES // block_bytes))
    return BlockMemory(num_blocks, block_bytes, populate=True)


class StagedChannel:
    """
    Args:
        inner: reads into `staging`; becomes this object's own, with it.
        dest: where the parts of blocks go.
    """

    def __init__(self, inner: Channel, staging: BlockMemory, plan: Reslice, dest: BlockMemory) -> None:
        self.transport = inner.transport
        self.gigabytes_per_second = inner.gigabytes_per_second
        self._inner = inner
        self._staging = staging
        self._scatter: Scatter | None = Scatter(plan, staging, dest)

    def fileno(self) -> int:
        return self._inner.fileno()

    def read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        size = self._staging.num_blocks
        for start in range(0, len(blocks), size):
            self._read(lease_id, blocks[start : start + size], progress, deadline)

    def _read(self, lease_id: str, blocks: Sequence[ReadRequest], progress: ReadProgress, deadline: float) -> None:
        assert self._scatter is not None
        staged = [ReadRequest(slot, block.block_id, block.generation, slot) for slot, block in enumerate(blocks)]
        here = ReadProgress()
        try:
            self._inner.read(lease_id, staged, here, deadline)
        finally:
            for slot in here.verified:
                self._scatter.copy(slot, blocks[slot].segments)
            progress.verified.extend(blocks[slot].index for slot in here.verified)
            progress.stale.extend(blocks[slot].index for slot in here.stale)
            progress.corrupt.extend(blocks[slot].index for slot in here.corrupt)

    def close(self) -> None:
        self._inner.close()
        # Its views keep the memory from being unmapped.
        self._scatter = None
        self._staging.close()

    def abort(self) -> None:
        self._inner.abort()
