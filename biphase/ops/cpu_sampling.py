"""The op that tokens are drawn with on the host: compiled where there is a library; plain numpy, said aloud, without.

Both give the same tokens, bit for bit: workers of one cluster need not agree on which of them they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from biphase.request import SamplingParams
from biphase.telemetry.events import event_logger
from kernels import reference_draw
from kernels.cpu.draw import DRAW, draw_tokens
from kernels.cpu.library import LibraryUnavailableError, load

log = event_logger(__name__)


def draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """One token for each row: int64 [num_rows]. A row's token depends on nothing else in the batch.

    Args:
        logits: float32 [num_rows, vocab_size] on CPU, rows contiguous, -inf where banned; not changed.
        params: one for each row, temperature above 0.
        uniform: float64 [num_rows], in [0, 1).
    """
    rows: npt.NDArray[np.float32] = logits.numpy()
    if not _is_compiled():
        tokens = [
            reference_draw.draw(
                row, temperature=p.temperature, min_p=p.min_p, top_k=p.top_k, top_p=p.top_p, uniform=target
            )
            for row, p, target in zip(rows, params, uniform.tolist(), strict=True)
        ]
        return torch.tensor(tokens, dtype=torch.int64)
    return torch.from_numpy(draw_tokens(rows, _draws(params, uniform, rows.shape[1])))


def _draws(params: Sequence[SamplingParams], uniform: Tensor, vocab_size: int) -> npt.NDArray[Any]:
    draws = np.empty(len(params), dtype=DRAW)
    draws["temperature"] = [p.temperature for p in params]
    draws["top_p"] = [p.top_p for p in params]
    draws["uniform"] = uniform.numpy()
    draws["min_p"] = [p.min_p for p in params]
    draws["top_k"] = [min(p.top_k, vocab_size) for p in params]
    return draws


@cache
def _is_compiled() -> bool:
    try:
        load()
    except LibraryUnavailableError as error:
        log.warning("draw_kernel_unavailable", reason=str(error), consequence="tokens are drawn by numpy, slowly")
        return False
    return True
