"""XXH3-64 of many runs of bytes, and of these sums, in one call, without the GIL. Owns which processor it is
for; the algorithm is in src/checksum.cpp, what it is used for is its caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

from kernels.cpu.library import Isa, best_isa, load

# Shorter runs are hashed in another way, which is not here.
MIN_BYTES = 241
# What follows the sums is XXH3-64 of them and the ids, padded to so many bytes.
MIN_SEALED_BYTES = 256
# At most so many runs in a call.
MAX_RUNS = 256

# Addresses: of runs (struct iovec), how many, of their ids (uint64), of what gets a uint64 for each and one for all.
Checksums = Callable[[int, int, int, int], None]


@cache
def checksums(isa: Isa | None = None) -> Checksums:
    """The function.

    Args:
        isa: None: the best that this machine has.

    Raises:
        LibraryUnavailableError: there is no compiled library.
    """
    function = load().bp_sum_blocks
    chosen = int(best_isa() if isa is None else isa)

    def call(spans: int, num_spans: int, ids: int, sums: int) -> None:
        assert num_spans <= MAX_RUNS
        function(spans, num_spans, ids, chosen, sums)

    return call
