"""Runs one engine step: SchedulerOutput in, sampled tokens out.

Owns the input tensors, which persist and take only what changed, and the choice of executor. Each running request has
a row: its tokens, its block table, what the sampler keeps of it. Rows are dropped when the scheduler says that their
request finished or was preempted. Knows no model family and no policy; runs in the engine's thread only.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from biphase.errors import UnsupportedError
from biphase.grammar.library import GrammarLibrary
from biphase.grammar.matcher import OutputMatcher
from biphase.model.executors import ExecutorOptions, choose_executor
from biphase.model.forward import ForwardBatch
from biphase.model.loader import LoadedModel
from biphase.request import Request, RequestId, TokenLogprobs
from biphase.sampler import SamplingRow, sample, token_logprobs
from biphase.scheduler.output import RunnerOutput, SchedulerOutput


@dataclass(slots=True, eq=False)
class _Row:
    """One request's place in the persistent tensors. `num_tokens` and `num_blocks` are how much is filled in."""

    index: int
    request: Request
    sampling: SamplingRow
    num_tokens: int = 0
    num_outputs: int = 0
    num_blocks: int = 0


@dataclass(frozen=True, slots=True)
class _Span:
    """Tokens [start, end) of a row, run in this step."""

    row: _Row
    start: int
    end: int


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
        self._block_size = block_size
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
        self._input_device = torch.device("cpu") if executor.takes_host_batches else kv_cache.device
        # The native program has threads of its own. Torch's, which the sampler would use, spin for a while after each
        # call and take the cores from them: with two cores, 27 instead of 18 ms a step at 32 sequences.
        torch.set_num_threads(1 if self.executor == "native" else num_threads)
        max_blocks = -(-(max_model_len + 1) // block_size)
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._rows: dict[RequestId, _Row] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._token_ids = np.empty(max_num_batched_tokens, dtype=np.int32)
        self._positions = np.empty(max_num_batched_tokens, dtype=np.int32)
        self._slots = np.empty(max_num_batched_tokens, dtype=np.int64)
        self._starts = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self._seq_lens = np.empty(max_num_seqs, dtype=np.int32)
        self._arange = np.arange(max_num_batched_tokens, dtype=np.int32)

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        """Runs the scheduled tokens, fills their KV, and samples for each request with `samples`."""
        for request_id in (*step.finished, *step.preempted):
            self._drop(request_id)
        out = RunnerOutput()
        spans: list[_Span] = []
        sampling: list[_Row] = []
        wanted: list[int] = []
        num_tokens = 0
        for scheduled in step.scheduled:
            row = self._row_of(scheduled.request, step)
            self._sync(row, scheduled.block_ids)
            span = _Span(
                row, scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
            )
            request = row.request
            # Wanted once: a request that has output was preempted, or moved here, after it got them.
            if request.sampling.prompt_logprobs is not None and not request.output_token_ids:
                if scheduled.samples:
                    self._begin_masks([row])
                logits = self._run_with_prompt_logprobs(span, out)
                if scheduled.samples:
                    self._sample(logits, [row], out)
                continue
            spans.append(span)
            num_tokens += span.end - span.start
            if scheduled.samples:
                sampling.append(row)
                wanted.append(num_tokens - 1)
        if spans:
            self._begin_masks(sampling)
            logits = self._run(spans, np.array(wanted, dtype=np.int32))
            if sampling:
                self._sample(logits, sampling, out)
        return out

    def _sample(self, logits: Tensor, rows: Sequence[_Row], out: RunnerOutput) -> None:
        tokens = sample(logits, [row.sampling for row in rows], [row.num_tokens for row in rows])
        for row, token in zip(rows, tokens, strict=True):
            matcher = row.sampling.matcher
            if matcher is not None and matcher.error is not None:
                out.failed[row.request.request_id] = matcher.error
            else:
                out.sampled[row.request.request_id] = token

    def _begin_masks(self, rows: Sequence[_Row]) -> None:
        """What grammars allow is found out while the model computes."""
        for row in rows:
            if row.sampling.matcher is not None and self._grammars is not None:
                row.sampling.matcher.begin(self._grammars.masks)

    def _run(self, spans: Sequence[_Span], wanted: npt.NDArray[np.int32]) -> Tensor:
        """One forward pass; logits float32 [len(wanted), vocab_size] of the batch rows `wanted`."""
        num_seqs = len(spans)
        rows = np.array([span.row.index for span in spans], dtype=np.int32)
        begins = np.array([span.start for span in spans], dtype=np.int32)
        seq_lens, starts = self._seq_lens[:num_seqs], self._starts[: num_seqs + 1]
        seq_lens[:] = [span.end for span in spans]
        lengths = seq_lens - begins
        np.cumsum(lengths, out=starts[1:])
        total = int(starts[-1])
        positions, token_ids, slots = self._positions[:total], self._token_ids[:total], self._slots[:total]
        row_of_token = rows
        if total == num_seqs:
            positions[:] = begins
        else:
            np.add(self._arange[:total], np.repeat(begins - starts[:-1], lengths), out=positions)
            row_of_token = np.repeat(rows, lengths)
        token_ids[:] = self._tokens[row_of_token, positions]
        blocks = self._tables[row_of_token, positions // self._block_size]
        np.multiply(blocks, self._block_size, out=slots, casting="unsafe")
        slots += positions % self._block_size
        # Only as wide as this batch needs.
        width = -(-int(seq_lens.max()) // self._block_size)
        tables = self._tables[rows, :width]
        return self._forward(
            ForwardBatch(
                token_ids=self._tensor(token_ids),
                positions=self._tensor(positions),
                slot_mapping=self._tensor(slots),
                query_start_loc=self._tensor(starts),
                seq_lens=self._tensor(seq_lens),
                block_tables=self._tensor(tables),
                logits_indices=self._tensor(wanted),
            )
        )

    def _run_with_prompt_logprobs(self, span: _Span, out: RunnerOutput) -> Tensor:
        """Runs a chunk in pieces small enough for the logits of all their rows; returns those of the last row."""
        row = span.row
        params, num_prompt = row.request.sampling, row.request.num_prompt_tokens
        found: list[TokenLogprobs] = out.prompt_logprobs.setdefault(row.request.request_id, [])
        logits = torch.empty(0)
        for start in range(span.start, span.end, self._max_logits):
            end = min(start + self._max_logits, span.end)
            logits = self._run([_Span(row, start, end)], self._arange[: end - start])
            # Row i predicts token start + i + 1.
            count = min(end, num_prompt - 1) - start
            if count > 0:
                targets = torch.from_numpy(self._tokens[row.index, start + 1 : start + 1 + count]).long()
                tops = [params.prompt_logprobs or 0] * count
                found.extend(token_logprobs(logits[:count], targets.to(logits.device), tops))
        return logits[-1:]

    def _tensor(self, array: npt.NDArray[np.int32] | npt.NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._input_device.type == "cpu" else tensor.to(self._input_device, non_blocking=True)

    def _row_of(self, request: Request, step: SchedulerOutput) -> _Row:
        row = self._rows.get(request.request_id)
        if row is not None and row.request is request:
            return row
        self._drop(request.request_id)
        if not self._free:
            # Only requests in this step need a row; what another one had is built again when it comes back.
            here = {scheduled.request.request_id for scheduled in step.scheduled}
            self._drop(next(request_id for request_id in self._rows if request_id not in here))
        sampling = SamplingRow(
            request.sampling, request.prompt_token_ids, self._spec.vocab_size, self._matcher_of(request)
        )
        row = self._rows[request.request_id] = _Row(self._free.pop(), request, sampling)
        return row

    def _matcher_of(self, request: Request) -> OutputMatcher | None:
        if request.sampling.structured_output is None:
            return None
        if self._grammars is None:
            # Never free text in its place.
            error = UnsupportedError("This worker has no grammars for structured output.")
            return OutputMatcher(error, self._spec.vocab_size)
        return self._grammars.matcher(request.sampling)

    def _drop(self, request_id: RequestId) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.index)

    def _sync(self, row: _Row, block_ids: Sequence[int]) -> None:
        """Takes over the tokens and blocks that were added since the last step; both only grow."""
        request = row.request
        num_tokens = request.num_tokens
        if row.num_tokens < num_tokens:
            new = request.token_slice(row.num_tokens, num_tokens)
            self._tokens[row.index, row.num_tokens : num_tokens] = new
            row.num_tokens = num_tokens
            outputs = request.output_token_ids
            while row.num_outputs < len(outputs):
                row.sampling.add_output(outputs[row.num_outputs])
                row.num_outputs += 1
        num_blocks = len(block_ids)
        if row.num_blocks != num_blocks:
            self._tables[row.index, row.num_blocks : num_blocks] = block_ids[row.num_blocks :]
            row.num_blocks = num_blocks
