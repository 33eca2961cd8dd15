"""Changes to logits before a token is chosen: allowed ids, bans, bias, penalties, grammars. Only rows that ask pay.

All rows' changes are gathered into flat indices on the host and applied in a few tensor operations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from biphase.grammar.matcher import OutputMatcher
from biphase.sampler.row import SamplingRow

_Flat = list[npt.NDArray[np.int64]]


def apply(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Changes `logits` [num_rows, vocab_size] in place, contiguous float32.

    Order: allowed_token_ids, logit_bias, repetition, frequency and presence penalties, then bans and what the grammar
    does not allow, which win over all; but bans that leave none of allowed_token_ids give way to these.
    """
    # Looked at first: whether a grammar is complete decides on bans.
    masks = [(index, row.matcher, row.matcher.allowed()) for index, row in enumerate(rows) if row.matcher is not None]
    vocab_size = logits.shape[1]
    flat = logits.view(-1)
    bias_at: _Flat = []
    bias: list[npt.NDArray[np.float32]] = []
    banned: _Flat = []
    # Rows with both, and where their allowed tokens are.
    narrow: list[Tensor] = []
    penalised: list[tuple[int, SamplingRow]] = []
    for index, row in enumerate(rows):
        start = index * vocab_size
        if len(row.allowed):
            allowed = torch.from_numpy(row.allowed).to(logits.device)
            kept = logits[index, allowed]
            logits[index] = float("-inf")
            logits[index, allowed] = kept
        if len(row.bias_ids):
            bias_at.append(row.bias_ids + start)
            bias.append(row.bias_values)
        if row.has_penalties:
            penalised.append((start, row))
        if len(row.always_banned):
            banned.append(row.always_banned + start)
        if now := row.banned_now():
            banned.append(np.array(now, dtype=np.int64) + start)
        if len(row.allowed) and (len(row.always_banned) or now):
            narrow.append(allowed + start)
    if bias_at:
        at = _joined(bias_at, logits)
        flat[at] = flat[at] + _joined(bias, logits)
    if penalised:
        _penalise(flat, penalised)
    if banned:
        before = [flat[at] for at in narrow]
        flat[_joined(banned, logits)] = float("-inf")
        for at, values in zip(narrow, before, strict=True):
            if torch.isneginf(flat[at].max()):
                flat[at] = values
    for index, matcher, mask in masks:
        _restrict(logits[index], matcher, mask)


def _restrict(logits: Tensor, matcher: OutputMatcher, allowed: npt.NDArray[np.bool_]) -> None:
    """Leaves one row [vocab_size] the tokens of its grammar."""
    logits.masked_fill_(torch.from_numpy(~allowed).to(logits.device), float("-inf"))
    if torch.isneginf(logits.max()):
        matcher.fail("No token follows the output's grammar and is allowed by the other settings too.")
        # Its token is thrown away; the choice needs one nevertheless.
        logits[0] = 0.0


def _penalise(flat: Tensor, penalised: Sequence[tuple[int, SamplingRow]]) -> None:
    at = _joined([row.seen_ids + start for start, row in penalised], flat)
    counts = _joined([row.seen_counts for _, row in penalised], flat)
    lengths = torch.tensor([len(row.seen_ids) for _, row in penalised], device=flat.device)

    def spread(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=flat.device).repeat_interleave(lengths)

    repetition = spread([row.params.repetition_penalty for _, row in penalised])
    frequency = spread([row.params.frequency_penalty for _, row in penalised])
    presence = spread([row.params.presence_penalty for _, row in penalised])
    values = flat[at]
    values = torch.where(values > 0, values / repetition, values * repetition)
    flat[at] = values - frequency * counts - presence * (counts > 0)


def _joined(parts: Sequence[npt.NDArray[np.int64] | npt.NDArray[np.float32]], like: Tensor) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(like.device)
