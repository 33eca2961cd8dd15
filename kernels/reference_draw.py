"""How a token is drawn from a row of logits: the definition, in numpy, of what `kernels.cpu` does in C++ bit for bit.

Single multiplications and additions of float32 make the weights, never fused, and sums are float64 in an order that is
written here. So the same token comes out on every instruction set, and without any compiled library.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
_Doubles = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]

# Sums run over blocks, inside of a block in lanes.
_BLOCK = 512
_LANES = 16
# A cut's place is found in bins; so few values are sorted.
_BINS = 1024
_FEW = 64
_LOG2_E = 1.4426950408889634
_FLOAT32 = np.finfo(np.float32)
# 2^f on [-0.5, 0.5], 1 at 0; fitted to the least relative error (2e-9 before rounding).
_POLYNOMIAL = (
    1.5353361959569156e-4, 1.3398873852565885e-3, 9.61843691766262e-3, 5.5503323674201965e-2, 2.4022647738456726e-1,
    6.931471824645996e-1, 1.0,
)  # fmt: skip
# The last token that stays: its logit and its id.
_Cut = tuple[np.float32, int]


def draw(logits: Floats, *, temperature: float, min_p: float, top_k: int, top_p: float, uniform: float) -> int:
    """The first token, by id, whose running sum of weights exceeds `uniform` times their total.

    A weight is exp((logit - largest) / temperature), and 0 below 2^-125. Tokens of less than `min_p` get 0 as well;
    then all but the `top_k` largest logits; then all but the smallest set of the largest that has `top_p` of the mass.
    Of equal logits the lower id stays; the largest always stays.

    Args:
        logits: [vocab_size]; NaN counts as -inf, which bans. Where all are banned, token 0 comes out.
        temperature: above 0.
        top_k: 0: off.
        top_p: 1: off.
        uniform: in [0, 1).
    """
    row = np.where(np.isnan(logits), np.float32(-np.inf), logits)
    largest = row.max()
    if not np.isfinite(largest):
        return int(row.argmax())
    weights = weights_of(row, temperature, min_p)
    if 0 < top_k < len(row):
        weights[~_stays(row, _top_k_cut(row, top_k))] = 0.0
    if top_p < 1.0:
        cut = _top_p_cut(row, weights, top_p)
        if cut is not None:
            weights[~_stays(row, cut)] = 0.0
    sums = _block_sums(weights)
    cumulative = sums.cumsum()
    target = uniform * cumulative[-1]
    block = int(cumulative.searchsorted(target, side="right"))
    if block == len(sums):
        # Rounding has carried the target up to the total: the last token with any weight.
        block = int(sums.nonzero()[0][-1])
    inside = weights[block * _BLOCK : (block + 1) * _BLOCK].astype(np.float64)
    before = cumulative[block - 1] if block > 0 else 0.0
    exceeding = np.concatenate(([before], inside)).cumsum()[1:] > target
    exceeding &= inside > 0.0
    index = exceeding.argmax() if exceeding.any() else inside.nonzero()[0][-1]
    return block * _BLOCK + int(index)


def weights_of(logits: Floats, temperature: float, min_p: float = 0.0) -> Floats:
    """[vocab_size]: 1 for the largest logit, 0 for those of less than `min_p` or 2^-125."""
    # Kept normal and finite: no difference times it may be NaN.
    with np.errstate(over="ignore", divide="ignore"):
        scale = np.float32(np.clip(np.float64(_LOG2_E) / temperature, _FLOAT32.tiny, _FLOAT32.max))
        y = np.maximum((logits - logits.max()) * scale, np.float32(-160.0))
    whole = np.rint(y)
    f = y - whole
    p = np.full_like(f, _POLYNOMIAL[0])
    for coefficient in _POLYNOMIAL[1:]:
        p = p * f + np.float32(coefficient)
    weights: Floats = (p.view(np.int32) + (whole.astype(np.int32) << 23)).view(np.float32)
    weights[(y < np.float32(-125.0)) | ~(weights >= np.float32(min_p))] = 0.0
    return weights


def _block_sums(weights: Floats) -> _Doubles:
    """Sums of blocks of 512: sixteen lanes, in order, and the lanes as a tree, halves onto halves."""
    num_blocks = -(-len(weights) // _BLOCK)
    padded = np.zeros(num_blocks * _BLOCK, dtype=np.float64)
    padded[: len(weights)] = weights
    blocks = padded.reshape(num_blocks, -1, _LANES)
    lanes = np.zeros((num_blocks, _LANES))
    for step in range(blocks.shape[1]):
        lanes += blocks[:, step]
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = lanes[:, :half] + lanes[:, half:]
    return lanes[:, 0]


def _stays(logits: Floats, cut: _Cut) -> npt.NDArray[np.bool_]:
    least, last = cut
    stays = logits > least
    stays[: last + 1] |= logits[: last + 1] == least
    return stays


def _top_k_cut(logits: Floats, top_k: int) -> _Cut:
    place = len(logits) - top_k
    least = np.partition(logits, place)[place]
    num_equal = top_k - int(np.count_nonzero(logits > least))
    return least, int((logits == least).nonzero()[0][num_equal - 1])


def _top_p_cut(logits: Floats, weights: Floats, top_p: float) -> _Cut | None:
    """After the largest logits, as many as needed for their weights to add up to `top_p` of all; None: all are needed.

    Bins find the place of the cut; only what is near it is sorted.
    """
    mass = float(_block_sums(weights).cumsum()[-1])
    target = top_p * mass
    # All weights below this one together are less than half of what top_p leaves out.
    floor = max(np.float32(0.5 * (1.0 - top_p) * mass / len(logits)), _FLOAT32.tiny)
    ids: _Ids = (weights >= floor).nonzero()[0]
    before = 0.0
    while len(ids) > _FEW:
        values = logits[ids].astype(np.float64)
        most, least = values.max(), values.min()
        if most == least:
            break
        bins = ((most - values) * ((_BINS - 1) / (most - least))).astype(np.int64)
        sums = np.bincount(bins, weights=weights[ids], minlength=_BINS)
        after = np.concatenate(([before], sums)).cumsum()
        reached = (after[1:] >= target).nonzero()[0]
        if len(reached) == 0:
            # The target is more than the sum of all, by rounding.
            return None
        before = float(after[reached[0]])
        ids = ids[bins == reached[0]]
    ids = ids[np.argsort(-logits[ids], kind="stable")]
    befores = np.concatenate(([before], weights[ids])).cumsum(dtype=np.float64)[:-1]
    last = int(((befores < target) | (befores <= 0.0)).sum()) - 1
    return logits[ids[last]], int(ids[last])
