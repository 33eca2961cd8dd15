"""Turns logits into tokens, vectorised over the batch. `sample` chooses; `SamplingRow` is what a request carries."""

from biphase.sampler.logprobs import token_logprobs
from biphase.sampler.row import SamplingRow
from biphase.sampler.sampler import sample

__all__ = ["SamplingRow", "sample", "token_logprobs"]
