"""The ops that tokens are chosen with on a GPU. Importing this needs triton; see `biphase.sampler.device`.

Logits must lie on a CUDA device, or on CPU under Triton's interpreter (tests). Not yet run on a GPU.
"""

from __future__ import annotations

from kernels.triton_ops.sampling import argmax, draw, gather_logprobs

__all__ = ["argmax", "draw", "gather_logprobs"]
