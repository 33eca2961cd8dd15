"""Turns logits into tokens, vectorised over the batch. `sample` chooses; `SamplingRow` is what a request carries."""

from biphase.sampler.awaiting import ALL, num_awaited_outputs, waits_for_device
from biphase.sampler.device import TokensOnTheirWay, on_device
from biphase.sampler.logprobs import token_logprobs
from biphase.sampler.row import SamplingRow
from biphase.sampler.sampler import Choice, choose, sample

__all__ = [
    "ALL",
    "Choice",
    "SamplingRow",
    "TokensOnTheirWay",
    "choose",
    "num_awaited_outputs",
    "on_device",
    "sample",
    "token_logprobs",
    "waits_for_device",
]
