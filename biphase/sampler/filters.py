"""Temperature, min_p, top_k and top_p: which tokens remain and with what weight, and the draw among them.

Order as in vLLM: temperature, min_p, top_k, then top_p over what top_k left. A row's result depends on nothing else in
the batch: ties are broken by token id, sums run in a fixed order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from biphase.request import SamplingParams
from biphase.sampler.draw import inverse_cdf

# Most truncated distributions end well before this many tokens; rows that do not are sorted whole.
_NUM_CANDIDATES = 512


def draw(logits: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    """One token for each row: int64 [num_rows].

    Args:
        logits: float32 [num_rows, vocab_size], -inf where banned; not changed.
        params: one for each row, temperature above 0.
        uniform: float64 [num_rows], in [0, 1).
    """
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=logits.device)
    # The likeliest token gets weight 1. Subtracted before the division, which could overflow.
    weights = (logits - logits.amax(-1, keepdim=True)).div_(temperature.unsqueeze(1)).exp_()
    if any(p.min_p > 0.0 for p in params):
        floor = torch.tensor([p.min_p for p in params], dtype=torch.float32, device=logits.device)
        weights.masked_fill_(weights < floor.unsqueeze(1), 0.0)
    vocab_size = logits.shape[1]
    cut = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < vocab_size]
    if not cut:
        return inverse_cdf(weights, uniform)
    tokens = torch.empty(len(params), dtype=torch.int64, device=logits.device)
    whole = sorted(set(range(len(params))) - set(cut))
    if whole:
        tokens[whole] = inverse_cdf(weights[whole], uniform[whole])
    tokens[cut] = _draw_truncated(weights[cut] if whole else weights, [params[i] for i in cut], uniform[cut])
    return tokens


def _draw_truncated(weights: Tensor, params: Sequence[SamplingParams], uniform: Tensor) -> Tensor:
    vocab_size = weights.shape[1]
    top_k = torch.tensor([p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], device=weights.device)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float64, device=weights.device)
    totals = weights.sum(-1, dtype=torch.float64)
    values, ids = weights.topk(min(_NUM_CANDIDATES, vocab_size), dim=-1)
    # topk leaves the order of equal values open: sort by id, then stably by value.
    ids, order = ids.sort(dim=-1)
    values, stable = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, stable)
    kept, complete = _keep(values, totals, top_k, top_p, vocab_size)
    tokens = ids.gather(1, inverse_cdf(kept, uniform).unsqueeze(1)).squeeze(1)
    if not bool(complete.all()):
        # These rows' cut lies further down: find it without sorting them, and draw in the order of ids.
        rest = torch.where(~complete)[0].cpu()
        kept_rows = [cut(weights[i].cpu().numpy(), int(top_k[i]), float(top_p[i])) for i in rest.tolist()]
        kept = torch.from_numpy(np.stack(kept_rows)).to(weights.device)
        tokens[rest] = inverse_cdf(kept, uniform[rest])
    return tokens


def _keep(values: Tensor, totals: Tensor, top_k: Tensor, top_p: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Zeroes what is cut off from `values` [num_rows, num_values], which are the largest weights, downwards.

    Returns:
        The kept weights, and for each row whether more values could not change them: the cut lies inside, and no
        tie straddles the end.
    """
    num_values = values.shape[1]
    upto = values.cumsum(-1, dtype=torch.float64)
    in_top_k = torch.arange(num_values, device=values.device) < top_k.unsqueeze(1)
    # What top_p is a share of: the mass that top_k left.
    k_inside = top_k <= num_values
    mass = torch.where(k_inside, upto.gather(1, top_k.clamp(max=num_values).unsqueeze(1) - 1).squeeze(1), totals)
    in_top_p = upto - values < (top_p * mass).unsqueeze(1)
    # The likeliest token always stays, also at top_p 0.
    in_top_p[:, 0] = True
    in_top_p |= top_p.unsqueeze(1) >= 1.0
    keep = in_top_k & in_top_p
    kept = torch.where(keep, values, 0.0)
    if num_values == vocab_size:
        return kept, torch.ones_like(k_inside)
    lowest = values.gather(1, keep.sum(-1, keepdim=True) - 1).squeeze(1)
    ends_inside = (lowest > values[:, -1]) & (k_inside | (top_k == vocab_size))
    return kept, ends_inside | (values[:, -1] == 0)


# float32's bits without the last 20: eight bins for each power of two, in the order of the values.
_BIN_SHIFT = 20


def cut(weights: npt.NDArray[np.float32], top_k: int, top_p: float) -> npt.NDArray[np.float32]:
    """A copy of `weights` [vocab_size] with all but the `top_k` largest, and of those all past `top_p`, at zero.

    Only the bin of values that holds the cut is sorted. Among equal values the lower id stays.
    """
    kept = weights.copy()
    bins = kept.view(np.int32) >> _BIN_SHIFT
    if top_k < len(kept):
        bin_at, above, ids = _bin_with(bins, None, float(top_k))
        order = ids[np.argsort(-kept[ids], kind="stable")]
        kept[bins < bin_at] = 0.0
        kept[order[top_k - int(above) :]] = 0.0
        bins = kept.view(np.int32) >> _BIN_SHIFT
    if top_p < 1.0:
        target = top_p * float(kept.sum(dtype=np.float64))
        bin_at, above, ids = _bin_with(bins, kept, target)
        order = ids[np.argsort(-kept[ids], kind="stable")]
        before = above + np.cumsum(kept[order], dtype=np.float64) - kept[order]
        kept[bins < bin_at] = 0.0
        # The likeliest token always stays.
        kept[order[(before >= target) & (before > 0.0)]] = 0.0
    return kept


def _bin_with(
    bins: npt.NDArray[np.int32], weights: npt.NDArray[np.float32] | None, target: float
) -> tuple[int, float, npt.NDArray[np.intp]]:
    """The bin in which the sum from the top (of weights, or of ones) reaches `target`; the sum above it; its ids."""
    sums = np.bincount(bins, weights=weights)
    downwards = np.cumsum(sums[::-1])
    place = min(int(np.searchsorted(downwards, target)), len(sums) - 1)
    bin_at = len(sums) - 1 - place
    return bin_at, float(downwards[place] - sums[bin_at]), np.flatnonzero(bins == bin_at)
