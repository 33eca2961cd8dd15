"""Temperature, min_p, top_k and top_p: which tokens remain and with what weight, and the draw among them.

Order as in vLLM: temperature, min_p, top_k, then top_p over what top_k left. A row's result depends on nothing else in
the batch: ties are broken by token id, sums run in a fixed order. On the host, and wherever top_k or top_p cut a row,
tokens are drawn as `kernels.reference_draw` defines, bit for bit the same on every worker.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biphase.ops import cpu_sampling
from biphase.request import SamplingParams
from biphase.sampler.device import SamplingKernels, kernels_for, on_device


def draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """One token for each row: int64 [num_rows].

    Args:
        logits: float32 [num_rows, vocab_size], -inf where banned; not changed.
        params: one for each row, temperature above 0.
        uniform: float64 [num_rows], in [0, 1).
    """
    kernels = kernels_for(logits)
    if kernels is None:
        return cpu_sampling.draw(logits.cpu(), params, uniform).to(logits.device)
    vocab_size = logits.shape[1]
    cut = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
    if not cut:
        return _draw_whole(kernels, logits, params, uniform)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    whole = sorted(set(range(len(params))) - set(cut))
    if whole:
        tokens[whole] = _draw_whole(kernels, logits[whole], [params[i] for i in whole], uniform[whole])
    tokens[cut] = cpu_sampling.draw(logits[cut].cpu(), [params[i] for i in cut], uniform[cut]).to(logits.device)
    return tokens


def _draw_whole(kernels: SamplingKernels, logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """Rows that neither top_k nor top_p cuts, by the device's kernel."""
    temperatures, min_p = (
        on_device(torch.tensor(values, dtype=torch.float32), logits.device)
        for values in ([p.temperature for p in params], [p.min_p for p in params])
    )
    return kernels.draw(logits, temperatures, min_p, on_device(uniform, logits.device))
