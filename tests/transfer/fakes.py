"""A pool that only counts references, for transfer tests."""

import threading
from array import array
from collections.abc import Sequence


class FakePool:
    """Reference counts and generations. `reuse` is what allocate() would do to a free block."""

    def __init__(self, num_blocks: int, generations: "memoryview | None" = None) -> None:
        self.lock = threading.RLock()
        self.generations = array("Q", [0] * num_blocks) if generations is None else generations
        self.references = [0] * num_blocks

    def acquire(self, block_ids: Sequence[int], /) -> None:
        with self.lock:
            for block_id in block_ids:
                self.references[block_id] += 1

    def release(self, block_ids: Sequence[int], /) -> None:
        with self.lock:
            for block_id in block_ids:
                assert self.references[block_id] > 0, f"block {block_id} released once too often"
                self.references[block_id] -= 1

    def reuse(self, block_id: int) -> None:
        with self.lock:
            self.generations[block_id] += 1
