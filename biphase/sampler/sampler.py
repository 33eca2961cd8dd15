"""From logits to tokens for a batch: processors, greedy or random choice, logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from biphase.sampler import filters, processors
from biphase.sampler.device import argmax
from biphase.sampler.draw import uniforms
from biphase.sampler.logprobs import token_logprobs
from biphase.sampler.row import SamplingRow
from biphase.scheduler.output import SampledToken


@torch.inference_mode()
def sample(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[SampledToken]:
    """Chooses one token for each row.

    Args:
        logits: float32 [num_rows, vocab_size], contiguous; rows whose request asks for changes are overwritten.
        rows: one for each row of logits.
        positions: index in its whole sequence of the token to choose; with the request's seed it decides the draw.

    Returns:
        In the order of `rows`; `logprobs` where the request asked for them.
    """
    if all(row.is_plain_greedy for row in rows):
        return [SampledToken(token) for token in argmax(logits).tolist()]
    asked = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    untouched = logits[asked] if asked else None  # a copy: what follows changes logits
    changed = [i for i, row in enumerate(rows) if row.changes_logits]
    if len(changed) == len(rows):
        processors.apply(logits, rows)
    elif changed:
        part = logits[changed]
        processors.apply(part, [rows[i] for i in changed])
        logits[changed] = part
    tokens = _choose(logits, rows, positions)
    sampled = [SampledToken(token) for token in tokens.tolist()]
    if untouched is not None:
        tops = [rows[i].params.logprobs or 0 for i in asked]
        named = [rows[i].params.logprob_token_ids for i in asked]
        for i, found in zip(asked, token_logprobs(untouched, tokens[asked], tops, named), strict=True):
            sampled[i].logprobs = found
    return sampled


def _choose(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> Tensor:
    random = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not random:
        return argmax(logits)
    params = [rows[i].params for i in random]
    uniform = uniforms([p.seed for p in params], [positions[i] for i in random])
    if len(random) == len(rows):
        return filters.draw(logits, params, uniform)
    tokens = argmax(logits)
    tokens[random] = filters.draw(logits[random], params, uniform)
    return tokens
