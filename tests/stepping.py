"""Drives a ModelRunner without an engine: shuffled blocks, poisoned memory, chunked prefill mixed with decodes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from biphase.cache.tensors import kv_block_bytes, kv_view
from biphase.model.loader import LoadedModel
from biphase.model.spec import ModelSpec
from biphase.request import Request, RequestId, SamplingParams
from biphase.runner import ModelRunner
from biphase.scheduler.output import RunnerOutput, ScheduledRequest, SchedulerOutput


def poisoned_cache(spec: ModelSpec, num_blocks: int, block_size: int, dtype: torch.dtype) -> torch.Tensor:
    """A KV cache whose every slot is NaN: whoever reads an unused one shows it."""
    shape = (spec.num_layers, spec.num_kv_heads, block_size, spec.head_dim, dtype)
    return kv_view(torch.full((num_blocks, kv_block_bytes(*shape)), 255, dtype=torch.uint8), *shape)


class Stepper:
    """A runner with the smallest scheduler that can feed it."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        block_size: int = 16,
        num_blocks: int = 256,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 64,
        max_model_len: int = 512,
        native: bool = False,
        seed: int = 0,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.kv_cache = poisoned_cache(model.spec, num_blocks, block_size, kv_dtype or model.dtype)
        self.block_size = block_size
        self.budget = max_num_batched_tokens
        self.free_blocks = list(range(num_blocks))
        random.Random(seed).shuffle(self.free_blocks)
        self.blocks: dict[RequestId, list[int]] = {}
        self.outputs: list[RunnerOutput] = []
        self.runner = ModelRunner(
            model,
            self.kv_cache,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            num_threads=1,
            native=native,
        )

    def step(self, requests: Sequence[Request], *, chunk: int | None = None) -> RunnerOutput:
        """Decodes and prefill chunks of those requests, decodes first, within the token budget."""
        scheduled: list[ScheduledRequest] = []
        budget = self.budget
        for request in sorted(requests, key=lambda r: r.num_tokens - r.num_computed_tokens > 1):
            count = min(request.num_tokens - request.num_computed_tokens, chunk or self.budget, budget)
            if count == 0:
                continue
            budget -= count
            blocks = self.blocks.setdefault(request.request_id, [])
            start, end = request.num_computed_tokens, request.num_computed_tokens + count
            while len(blocks) * self.block_size < end:
                blocks.append(self.free_blocks.pop())
            scheduled.append(ScheduledRequest(request, start, count, blocks, end == request.num_tokens))
        out = self.runner.execute(SchedulerOutput(scheduled))
        for item in scheduled:
            item.request.num_computed_tokens += item.num_scheduled_tokens
        for request in requests:
            if request.request_id in out.sampled:
                request.output_token_ids.append(out.sampled[request.request_id].token_id)
        self.outputs.append(out)
        return out

    def generate(self, requests: Sequence[Request], *, chunk: int | None = None) -> list[list[int]]:
        """Steps until each request has its max_tokens."""
        while running := [r for r in requests if r.num_output_tokens < r.sampling.max_tokens]:
            self.step(running, chunk=chunk)
        return [r.output_token_ids for r in requests]


def requests_of(prompts: Sequence[Sequence[int]], params: SamplingParams | None = None) -> list[Request]:
    params = params or SamplingParams()
    return [Request(RequestId(f"r{i}"), list(prompt), params) for i, prompt in enumerate(prompts)]
