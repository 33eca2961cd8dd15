"""The rows of a runner: each running request's tokens, block table and sampling state, kept from step to step.

Owns these host arrays, which persist and take only what changed, and the batches that are cut out of them. Does not own
what is done with a batch (runner), nor when a request leaves (scheduler). The engine's thread only; a batch may be read
by another while the next one is made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from biphase.model.forward import FedTokens, ForwardBatch
from biphase.request import Request, RequestId
from biphase.sampler import SamplingRow
from biphase.scheduler.output import ScheduledRequest, SchedulerOutput


@dataclass(slots=True, eq=False)
class Row:
    """One request's place in the persistent arrays. `num_tokens` and `num_blocks` are how much is filled in."""

    index: int
    request: Request
    sampling: SamplingRow
    num_tokens: int = 0
    num_outputs: int = 0
    num_blocks: int = 0
    # The step that sampled for it last.
    sampled_in: int = -1


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens [start, end) of a row, run in this step. One past the row's tokens is what the step before samples."""

    row: Row
    start: int
    end: int


class _Buffers:
    """A batch's arrays."""

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.token_ids = np.empty(max_num_batched_tokens, dtype=np.int32)
        self.positions = np.empty(max_num_batched_tokens, dtype=np.int32)
        self.slots = np.empty(max_num_batched_tokens, dtype=np.int64)
        self.starts = np.zeros(max_num_seqs + 1, dtype=np.int32)
        self.seq_lens = np.empty(max_num_seqs, dtype=np.int32)


class Rows:
    """At most `max_num_seqs` rows.

    Args:
        sampling_of: makes what the sampler keeps of a request.
    """

    def __init__(
        self,
        sampling_of: Callable[[Request], SamplingRow],
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
    ) -> None:
        self._sampling_of = sampling_of
        self._block_size = block_size
        max_blocks = -(-(max_model_len + 1) // block_size)
        self._tokens = np.zeros((max_num_seqs, max_model_len + 1), dtype=np.int32)
        self._tables = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self._rows: dict[RequestId, Row] = {}
        self._free = list(range(max_num_seqs - 1, -1, -1))
        self._num_steps = 0
        self._arange = np.arange(max_num_batched_tokens, dtype=np.int32)
        # In turn, as the step before may still run.
        self._buffers = _Buffers(max_num_batched_tokens, max_num_seqs)
        self._other_buffers = _Buffers(max_num_batched_tokens, max_num_seqs)

    # ---- rows

    def span_of(self, scheduled: ScheduledRequest, step: SchedulerOutput) -> Span:
        """What the step runs of one of its requests, in a row that has all its tokens and blocks."""
        request = scheduled.request
        row = self._rows.get(request.request_id)
        if row is None or row.request is not request:
            self.drop(request.request_id)
            if not self._free:
                # Only requests in this step need a row; what another one had is built again when it comes back.
                here = {share.request.request_id for share in step.scheduled}
                self.drop(next(request_id for request_id in self._rows if request_id not in here))
            row = self._rows[request.request_id] = Row(self._free.pop(), request, self._sampling_of(request))
        self._sync(row, scheduled.block_ids)
        start, end = scheduled.num_computed_tokens, scheduled.num_computed_tokens + scheduled.num_scheduled_tokens
        if end > row.num_tokens:
            assert row.sampled_in == self._num_steps - 1, "a token is awaited that the step before does not sample"
            assert start == row.num_tokens and end == start + 1, "more than one token is not known"
        if scheduled.samples:
            row.sampled_in = self._num_steps
        return Span(row, start, end)

    def drop(self, request_id: RequestId) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free.append(row.index)

    def _sync(self, row: Row, block_ids: Sequence[int]) -> None:
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

    def tokens(self, row: Row, start: int, end: int) -> Tensor:
        """Tokens [start, end) of a row: int64 [end - start]."""
        return torch.from_numpy(self._tokens[row.index, start:end]).long()

    # ---- batches

    def begin_step(self) -> None:
        """Batches of the step before stay as they are until the next call of this."""
        self._num_steps += 1
        self._buffers, self._other_buffers = self._other_buffers, self._buffers

    def batch(self, spans: Sequence[Span], wanted: npt.NDArray[np.int32], last_tokens: Tensor) -> ForwardBatch:
        """One forward pass on the host, valid until the next of the same step.

        Args:
            wanted: batch rows whose logits are wanted, int32.
            last_tokens: what each row sampled last: [max_num_seqs], where the model runs.
        """
        num_seqs, buffers = len(spans), self._buffers
        rows = np.array([span.row.index for span in spans], dtype=np.int32)
        begins = np.array([span.start for span in spans], dtype=np.int32)
        seq_lens, starts = buffers.seq_lens[:num_seqs], buffers.starts[: num_seqs + 1]
        seq_lens[:] = [span.end for span in spans]
        lengths = seq_lens - begins
        np.cumsum(lengths, out=starts[1:])
        total = int(starts[-1])
        positions, token_ids, slots = buffers.positions[:total], buffers.token_ids[:total], buffers.slots[:total]
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
        return ForwardBatch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(positions),
            slot_mapping=torch.from_numpy(slots),
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(seq_lens),
            block_tables=torch.from_numpy(self._tables[rows, :width]),
            logits_indices=torch.from_numpy(wanted),
            fed=_fed(spans, starts, last_tokens),
        )


def _fed(spans: Sequence[Span], starts: npt.NDArray[np.int32], last_tokens: Tensor) -> FedTokens | None:
    """Which tokens of the batch are not on the host yet."""
    fed = [i for i, span in enumerate(spans) if span.end > span.row.num_tokens]
    if not fed:
        return None
    rows = np.array([spans[i].row.index for i in fed], dtype=np.int64)
    return FedTokens(torch.from_numpy(starts[fed].astype(np.int64)), torch.from_numpy(rows), last_tokens)
