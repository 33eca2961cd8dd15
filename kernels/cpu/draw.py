"""Draws tokens from rows of logits in one call, without the GIL. Owns the form of its arguments; the algorithm is in
src/draw.h, its definition in `kernels.reference_draw`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kernels.cpu.library import Isa, best_isa, load

# bp_draw, one for each row.
DRAW = np.dtype(
    [("temperature", "f8"), ("top_p", "f8"), ("uniform", "f8"), ("min_p", "f4"), ("top_k", "i4")], align=True
)


def draw_tokens(
    logits: npt.NDArray[np.float32], draws: npt.NDArray[Any], isa: Isa | None = None
) -> npt.NDArray[np.int64]:
    """One token for each row: [num_rows].

    Args:
        logits: [num_rows, vocab_size], rows contiguous; not changed.
        draws: of DRAW, [num_rows], contiguous; what they mean says `kernels.reference_draw.draw`.
        isa: None: the best that this machine has. All draw the same.

    Raises:
        LibraryUnavailableError: there is no compiled library.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == np.float32 and draws.dtype == DRAW and draws.shape == (num_rows,)
    assert vocab_size == 1 or (vocab_size > 1 and logits.strides[1] == 4)
    assert draws.flags.c_contiguous
    tokens = np.empty(num_rows, dtype=np.int64)
    load().bp_draw_tokens(
        logits.ctypes.data, num_rows, vocab_size, logits.strides[0] // 4, draws.ctypes.data,
        best_isa() if isa is None else isa, tokens.ctypes.data,
    )  # fmt: skip
    return tokens
