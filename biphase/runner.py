"""Runs engine steps: SchedulerOutput in, sampled tokens out, in one call or in two halves.

Owns the choice of executor, and what is in flight between `begin` and `finish`. On a GPU `begin` launches the step
behind the one before and waits for nothing; on CPU a thread of the runner's computes, one step after the other. The
token that the step before samples is fed on where the model runs. What is kept of requests lies in rows.py. Knows no
model family and no policy; called in the engine's thread only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from biphase.errors import UnsupportedError
from biphase.grammar.library import GrammarLibrary
from biphase.grammar.matcher import OutputMatcher
from biphase.model.executors import ExecutorOptions, choose_executor
from biphase.model.forward import ForwardBatch
from biphase.model.loader import LoadedModel
from biphase.request import Request, SamplingParams, TokenLogprobs
from biphase.rows import Row, Rows, Span
from biphase.sampler import (
    ALL,
    Choice,
    SamplingRow,
    TokensOnTheirWay,
    choose,
    num_awaited_outputs,
    on_device,
    token_logprobs,
    waits_for_device,
)
from biphase.scheduler.output import RunnerOutput, SchedulerOutput


@dataclass(slots=True)
class PendingStep:
    """A step that was begun. `chosen` grows as it runs; `computing` ends when it is complete, on CPU."""

    out: RunnerOutput = field(default_factory=RunnerOutput)
    chosen: list[tuple[list[Row], Choice, TokensOnTheirWay]] = field(default_factory=list)
    computing: Future[None] | None = None


class ModelRunner:
    """Executes steps of one model on one KV cache."""

    def __init__(
        self,
        model: LoadedModel,
        kv_cache: Tensor,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        num_threads: int = 0,
        native: bool = True,
        nice: int = 0,
        cuda_graphs: bool = True,
        grammars: GrammarLibrary | None = None,
    ) -> None:
        """
        Args:
            kv_cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
            num_threads: compute threads; 0 takes all cores that this process may use.
            native: use compiled kernels where they are built and support the model, else plain torch.
            nice: added to the niceness of the native program's threads.
            cuda_graphs: on a GPU, record decode steps and replay them.
            grammars: where matchers for structured output come from; without one such requests fail.
        """
        self._grammars = grammars
        self._spec = model.spec
        # Logits rows of one pass: bounds the logits' memory, also for prompt_logprobs.
        self._max_logits = max_num_seqs
        num_threads = num_threads or len(os.sched_getaffinity(0))
        executor = choose_executor(
            model,
            kv_cache,
            ExecutorOptions(
                block_size=block_size,
                max_num_batched_tokens=max_num_batched_tokens,
                max_num_seqs=max_num_seqs,
                max_model_len=max_model_len,
                num_threads=num_threads,
                nice=nice,
                native=native,
                cuda_graphs=cuda_graphs,
            ),
        )
        self._forward, self.executor = executor.forward, executor.name
        self._feeds, self._waits = executor.feeds, executor.waits
        self._input_device = torch.device("cpu") if executor.takes_host_batches else kv_cache.device
        # The native program has threads of its own. Torch's, which the sampler would use, spin for a while after each
        # call and take the cores from them: with two cores, 27 instead of 18 ms a step at 32 sequences.
        torch.set_num_threads(1 if self.executor == "native" else num_threads)
        self._rows = Rows(
            self._sampling_of,
            block_size=block_size,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
        )
        # What each row sampled last in a step that was begun.
        self._last_tokens = torch.zeros(max_num_seqs, dtype=torch.int32, device=kv_cache.device)
        self._on_gpu = kv_cache.device.type == "cuda"
        self._thread: ThreadPoolExecutor | None = None

    # ---- steps

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        """Runs the scheduled tokens, fills their KV, and samples for each request with `samples`."""
        return self.finish(self._start(step))

    def begin(self, step: SchedulerOutput) -> PendingStep:
        """Starts a step, of which at most one may be in flight. A share past its request's tokens is the token that the
        one in flight samples; no request of either then has outputs to await (`num_awaited_outputs`)."""
        if self._thread is None and not self._on_gpu:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        return self._start(step, self._thread, in_halves=True)

    def finish(self, pending: PendingStep) -> RunnerOutput:
        """Waits for a step that was begun, the oldest first."""
        if pending.computing is not None:
            pending.computing.result()
        for rows, choice, on_their_way in pending.chosen:
            for row, sampled in zip(rows, choice.sampled(on_their_way.tolist()), strict=True):
                matcher = row.sampling.matcher
                if matcher is not None and matcher.error is not None:
                    pending.out.failed[row.request.request_id] = matcher.error
                else:
                    pending.out.sampled[row.request.request_id] = sampled
        return pending.out

    def num_awaited_outputs(self, sampling: SamplingParams) -> int:
        """How many output tokens of such a request have to be in it, each before the next is sampled.

        On a GPU that is all, too, where `begin` would wait for the device.
        """
        waits = self._on_gpu and (self._waits or waits_for_device(sampling, self._spec.vocab_size))
        return ALL if waits else num_awaited_outputs(sampling)

    # ---- inside

    def _start(
        self, step: SchedulerOutput, thread: ThreadPoolExecutor | None = None, in_halves: bool = False
    ) -> PendingStep:
        for request_id in (*step.finished, *step.preempted):
            self._rows.drop(request_id)
        self._rows.begin_step()
        pending = PendingStep()
        spans: list[Span] = []
        sampling: list[Span] = []
        wanted: list[int] = []
        num_tokens = 0
        for scheduled in step.scheduled:
            request = scheduled.request
            span = self._rows.span_of(scheduled, step)
            # Wanted once: a request that has output was preempted, or moved here, after it got them.
            if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
                # Nothing else is in flight, since it awaits its first output.
                if scheduled.samples:
                    self._begin_masks([span])
                logits = self._run_with_prompt_logprobs(span, pending.out)
                if scheduled.samples:
                    self._sample(logits, [span], pending, in_halves)
                continue
            spans.append(span)
            num_tokens += span.end - span.start
            if scheduled.samples:
                sampling.append(span)
                wanted.append(num_tokens - 1)
        if spans:
            self._begin_masks(sampling)
            batch = self._rows.batch(spans, np.array(wanted, dtype=np.int32), self._last_tokens)
            compute = partial(self._compute, batch, sampling, pending, in_halves)
            if thread is None:
                compute()
            else:
                pending.computing = thread.submit(compute)
        return pending

    def _compute(self, batch: ForwardBatch, sampling: Sequence[Span], pending: PendingStep, in_halves: bool) -> None:
        logits = self._run(batch)
        if sampling:
            self._sample(logits, sampling, pending, in_halves)

    def _sample(self, logits: Tensor, spans: Sequence[Span], pending: PendingStep, in_halves: bool) -> None:
        rows = [span.row for span in spans]
        choice = choose(logits, [row.sampling for row in rows], [span.end for span in spans])
        if in_halves:
            at = torch.tensor([row.index for row in rows])
            self._last_tokens.index_copy_(0, on_device(at, logits.device), choice.tokens.int())
        pending.chosen.append((rows, choice, TokensOnTheirWay(choice.tokens)))

    def _begin_masks(self, spans: Sequence[Span]) -> None:
        """What grammars allow is found out while the model computes."""
        for span in spans:
            matcher = span.row.sampling.matcher
            if matcher is not None and self._grammars is not None:
                matcher.begin(self._grammars.masks)

    def _run(self, batch: ForwardBatch) -> Tensor:
        """One forward pass; logits float32 [num_logits, vocab_size]."""
        if self._input_device.type != "cpu":
            batch = batch.to(self._input_device)
        if batch.fed is not None and not self._feeds:
            batch.fed.put(batch.token_ids)
        return self._forward(batch)

    def _run_with_prompt_logprobs(self, span: Span, out: RunnerOutput) -> Tensor:
        """Runs a chunk in pieces small enough for the logits of all their rows; returns those of the last row."""
        row = span.row
        params, num_prompt = row.request.sampling, row.request.num_prompt_tokens
        found: list[TokenLogprobs] = out.prompt_logprobs.setdefault(row.request.request_id, [])
        logits = torch.empty(0)
        for start in range(span.start, span.end, self._max_logits):
            end = min(start + self._max_logits, span.end)
            wanted = np.arange(end - start, dtype=np.int32)
            logits = self._run(self._rows.batch([Span(row, start, end)], wanted, self._last_tokens))
            # Row i predicts token start + i + 1.
            count = min(end, num_prompt - 1) - start
            if count > 0:
                targets = self._rows.tokens(row, start + 1, start + 1 + count)
                tops = [params.prompt_logprobs or 0] * count
                found.extend(token_logprobs(logits[:count], targets.to(logits.device), tops))
        return logits[-1:]

    def _sampling_of(self, request: Request) -> SamplingRow:
        return SamplingRow(request.sampling, request.prompt_token_ids, self._spec.vocab_size, self._matcher_of(request))

    def _matcher_of(self, request: Request) -> OutputMatcher | None:
        if request.sampling.structured_output is None:
            return None
        if self._grammars is None:
            # Never free text in its place.
            error = UnsupportedError("This worker has no grammars for structured output.")
            return OutputMatcher(error, self._spec.vocab_size)
        return self._grammars.matcher(request.sampling)
