"""From logits to tokens for a batch: processors, greedy or random choice, logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from biphase.request import TokenLogprobs
from biphase.sampler import filters, processors
from biphase.sampler.device import argmax, on_device
from biphase.sampler.draw import uniforms
from biphase.sampler.logprobs import token_logprobs
from biphase.sampler.row import SamplingRow
from biphase.scheduler.output import SampledToken


@dataclass(frozen=True, slots=True)
class Choice:
    """One token for each row, where the logits are: int64 [num_rows]; `logprobs` by row, where they were asked for."""

    tokens: Tensor
    logprobs: dict[int, TokenLogprobs]

    def sampled(self, tokens: Sequence[int]) -> list[SampledToken]:
        """The same with the tokens on the host."""
        sampled = [SampledToken(token) for token in tokens]
        for i, found in self.logprobs.items():
            sampled[i].logprobs = found
        return sampled


def sample(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> list[SampledToken]:
    """Chooses one token for each row and waits for it; arguments as `choose`, results in the order of `rows`."""
    choice = choose(logits, rows, positions)
    return choice.sampled(choice.tokens.tolist())


@torch.inference_mode()
def choose(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> Choice:
    """Chooses one token for each row. On a device it waits for nothing, but for rows of which
    `awaiting.waits_for_device` or `num_awaited_outputs` says otherwise.

    Args:
        logits: float32 [num_rows, vocab_size], contiguous; rows whose request asks for changes are overwritten.
        rows: one for each row of logits.
        positions: index in its whole sequence of the token to choose; with the request's seed it decides the draw.
    """
    if all(row.is_plain_greedy for row in rows):
        return Choice(argmax(logits), {})
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
    logprobs: dict[int, TokenLogprobs] = {}
    if untouched is not None:
        tops = [rows[i].params.logprobs or 0 for i in asked]
        named = [rows[i].params.logprob_token_ids for i in asked]
        logprobs.update(zip(asked, token_logprobs(untouched, tokens[asked], tops, named), strict=True))
    return Choice(tokens, logprobs)


def _choose(logits: Tensor, rows: Sequence[SamplingRow], positions: Sequence[int]) -> Tensor:
    random = [i for i, row in enumerate(rows) if not row.params.is_greedy]
    if not random:
        return argmax(logits)
    params = [rows[i].params for i in random]
    uniform = uniforms([p.seed for p in params], [positions[i] for i in random])
    if len(random) == len(rows):
        return filters.draw(logits, params, uniform)
    tokens = argmax(logits)
    at = on_device(torch.tensor(random), logits.device)
    tokens[at] = filters.draw(logits[at], params, uniform)
    return tokens
