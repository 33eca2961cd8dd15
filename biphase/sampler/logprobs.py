"""Log-probabilities that clients see: of the model's own distribution, before penalties, bias and temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from biphase.request import TokenLogprobs
from biphase.sampler.device import kernels_for


def token_logprobs(
    logits: Tensor, token_ids: Tensor, num_top: Sequence[int], named: Sequence[Sequence[int]] | None = None
) -> list[TokenLogprobs]:
    """For each row the given token, then the likeliest `num_top` (which may include it), best first, then the named.

    Args:
        logits: float32 [num_rows, vocab_size]; not changed.
        token_ids: int64 [num_rows].
        num_top: one for each row; 0 gives the token alone.
        named: tokens of each row to tell in any case; those outside of the vocabulary are left out.
    """
    kernels = kernels_for(logits)
    if kernels is None:
        wide = logits.log_softmax(-1)
        chosen = wide.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        ranks = (wide > chosen.unsqueeze(1)).sum(-1).add_(1)
        shift = torch.zeros_like(chosen)
    else:
        chosen, ranks = kernels.gather_logprobs(logits, token_ids)
        # Logits less this are logprobs: only those that are told are made.
        wide, shift = logits, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1) - chosen
    most = min(max(num_top, default=0), logits.shape[1])
    values: list[list[float]] = [[]] * len(num_top)
    ids: list[list[int]] = [[]] * len(num_top)
    if most:
        top_values, top_ids = wide.topk(most, dim=-1)
        values, ids = (top_values - shift.unsqueeze(1)).tolist(), top_ids.tolist()
    found = [
        TokenLogprobs((token, *ids[i][:top]), (value, *values[i][:top]), rank)
        for i, (token, value, rank, top) in enumerate(
            zip(token_ids.tolist(), chosen.tolist(), ranks.tolist(), num_top, strict=True)
        )
    ]
    for i, wanted in enumerate(named or ()):
        if wanted:
            found[i] = _with_named(found[i], wide[i] - shift[i], wanted)
    return found


def _with_named(found: TokenLogprobs, logprobs: Tensor, wanted: Sequence[int]) -> TokenLogprobs:
    """`logprobs`: [vocab_size]."""
    told = set(found.token_ids[1:])
    ids = tuple(token for token in wanted if token < len(logprobs) and token not in told)
    return replace(found, token_ids=found.token_ids + ids, logprobs=(*found.logprobs, *logprobs[list(ids)].tolist()))
