"""What of a request's output the host has to know before its next token can be sampled."""

from __future__ import annotations

import sys

from biphase.request import SamplingParams

ALL = sys.maxsize


def num_awaited_outputs(params: SamplingParams) -> int:
    """So many output tokens have to be in a request's row, each before the next is sampled: 0, some or ALL.

    Grammars, penalties and bad words of several tokens look at the whole output; min_tokens counts it; the logprobs of
    a prompt are told before any output.
    """
    if params.structured_output is not None or params.has_penalties or any(len(word) > 1 for word in params.bad_words):
        return ALL
    return max(params.min_tokens, 0 if params.prompt_logprobs is None else 1)


def waits_for_device(params: SamplingParams, vocab_size: int) -> bool:
    """Whether sampling on a device asks something of the host: truncation, logprobs and whatever changes logits do."""
    return bool(
        params.top_p < 1.0
        or 0 < params.top_k < vocab_size
        or params.logprobs is not None
        or params.logit_bias
        or params.bad_words
        or params.allowed_token_ids
    )
