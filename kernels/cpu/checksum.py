"""XXH3-64 of many runs of bytes in one call, without the GIL. Owns the C function's types and which processor runs it;
the algorithm is in src/checksum.cpp, what it is used for is its caller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from functools import cache, partial

from kernels.cpu.library import Isa, LibraryUnavailableError, best_isa, load

# Shorter runs are hashed in another way, which is not here.
MIN_BYTES = 241

# Spans as of struct iovec, packed; how many; the address that gets a uint64 for each.
Checksums = Callable[[bytes, int, int], None]


@cache
def checksums(isa: Isa | None = None) -> Checksums:
    """The function.

    Args:
        isa: None: the best that this machine has.

    Raises:
        LibraryUnavailableError: there is no compiled library, or an older one.
    """
    library = load()
    try:
        function = library.bp_checksums
    except AttributeError as error:
        raise LibraryUnavailableError("the compiled CPU kernels know no checksums: rebuild them") from error
    function.restype = None
    function.argtypes = (c_char_p, c_int64, c_int32, c_void_p)
    return partial(_call, function, best_isa() if isa is None else isa)


def _call(function: Callable[[bytes, int, int, int], None], isa: Isa, spans: bytes, num_spans: int, sums: int) -> None:
    function(spans, num_spans, isa, sums)
