"""Where tokens are chosen: by Triton kernels where logits lie on a GPU, by `biphase.ops.cpu_sampling` elsewhere.

Owns that choice, and small copies to and from a device. Both ways give the same tokens, but where a draw falls within
rounding of the border between two.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from biphase.telemetry.events import event_logger

log = event_logger(__name__)


class SamplingKernels(Protocol):
    """What `biphase.ops.sampling` offers; shapes are said there. Logits are float32 [num_rows, vocab_size]."""

    def argmax(self, logits: Tensor) -> Tensor: ...
    def draw(self, logits: Tensor, temperatures: Tensor, min_p: Tensor, uniforms: Tensor) -> Tensor: ...
    def gather_logprobs(self, logits: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]: ...


def kernels_for(logits: Tensor) -> SamplingKernels | None:
    """The kernels for logits on their device, or None."""
    return _triton() if logits.device.type == "cuda" else None


@cache
def _triton() -> SamplingKernels | None:
    try:
        return cast(SamplingKernels, importlib.import_module("biphase.ops.sampling"))
    except ImportError as error:
        log.warning("sampling_kernels_unavailable", reason=str(error), consequence="tokens are chosen by plain torch")
        return None


def argmax(logits: Tensor) -> Tensor:
    """The likeliest token of each row, of equal ones the first: int64 [num_rows]."""
    kernels = kernels_for(logits)
    if kernels is not None:
        return kernels.argmax(logits)
    if logits.device.type == "cpu":
        # On one thread, as the sampler runs beside the CPU program, numpy's search is ten times as fast as torch's.
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Values from the host on a device, behind what it does already, without waiting for that."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


class TokensOnTheirWay:
    """Tokens [num_rows] that a device chooses, copied to the host when it has. Not yet run on a GPU."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = tokens
        self._copied: torch.cuda.Event | None = None
        if tokens.device.type == "cuda":
            self._tokens = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
            self._tokens.copy_(tokens, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def tolist(self) -> list[int]:
        """Waits for them."""
        if self._copied is not None:
            self._copied.synchronize()
        return cast(list[int], self._tokens.tolist())
