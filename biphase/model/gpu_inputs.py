"""A step's inputs on the device, at addresses that never change, as recorded launches need them.

Owns the copies: all small inputs travel as one, out of page-locked memory, and of the block tables only the entries
that differ from the last step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from biphase.model.forward import ForwardBatch

# More changed table entries than this are copied as whole rows.
_MAX_SCATTERED = 4096


class StepInputs:
    """Takes batches on CPU, gives views of them on the device.

    Args:
        device: CUDA; with CPU everything works the same (tests).
        max_tokens, max_seqs, max_blocks: of one batch; logits rows are at most `max_seqs`.
    """

    def __init__(self, device: torch.device, max_tokens: int, max_seqs: int, max_blocks: int) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        sizes = {
            # What has 64 bits comes first: two words each, aligned.
            "slots": 2 * max_tokens,
            "fed_at": 2 * max_seqs,
            "fed_rows": 2 * max_seqs,
            "token_ids": max_tokens,
            "positions": max_tokens,
            "starts": max_seqs + 1,
            "seq_lens": max_seqs,
            "logits": max_seqs,
        }
        total = sum(sizes.values())
        self._host_words = torch.zeros(total, dtype=torch.int32, pin_memory=self._is_cuda)
        self._words = torch.zeros(total, dtype=torch.int32, device=device)
        self._host, self._fields = _split(self._host_words, sizes), _split(self._words, sizes)
        # What the device's tables hold.
        self._host_tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, pin_memory=self._is_cuda)
        self._tables = torch.zeros(max_seqs, max_blocks, dtype=torch.int32, device=device)
        self._changed_at = torch.zeros(_MAX_SCATTERED, dtype=torch.int64, pin_memory=self._is_cuda)
        self._changed_to = torch.zeros(_MAX_SCATTERED, dtype=torch.int32, pin_memory=self._is_cuda)
        # Set when the copies of the last step are through and its page-locked memory may be written again.
        self._copied = torch.cuda.Event() if self._is_cuda else None  # type: ignore[no-untyped-call]
        self.num_table_entries_copied = 0

    def load(self, batch: ForwardBatch, num_padded: int) -> ForwardBatch:
        """Puts a batch on the device, padded with empty sequences of one token each.

        Tokens that the step before samples are put in on the device, behind that step.

        Args:
            batch: CPU tensors, but for `fed.tokens`.
            num_padded: sequences after padding; more than the batch's only if each of those has one token.

        Returns:
            The padded batch: views that are valid until the next call, at addresses that depend on its sizes alone.
        """
        num_tokens, num_seqs = batch.token_ids.shape[0], batch.seq_lens.shape[0]
        num_logits = batch.logits_indices.shape[0]
        padding = num_padded - num_seqs
        assert padding == 0 or (padding > 0 and num_tokens == num_seqs)
        if self._copied is not None:
            self._copied.synchronize()
        host = self._host
        host["slots"].view(torch.int64)[:num_tokens] = batch.slot_mapping
        host["token_ids"][:num_tokens] = batch.token_ids
        host["positions"][:num_tokens] = batch.positions
        host["starts"][: num_seqs + 1] = batch.query_start_loc
        host["seq_lens"][:num_seqs] = batch.seq_lens
        host["logits"][:num_logits] = batch.logits_indices
        if padding:
            # No slot to write, no keys to read.
            host["slots"].view(torch.int64)[num_tokens:num_padded] = -1
            host["token_ids"][num_tokens:num_padded] = 0
            host["positions"][num_tokens:num_padded] = 0
            host["starts"][num_seqs + 1 : num_padded + 1] = torch.arange(num_seqs + 1, num_padded + 1)
            host["seq_lens"][num_seqs:num_padded] = 0
        num_fed = 0
        if batch.fed is not None:
            num_fed = batch.fed.at.shape[0]
            host["fed_at"].view(torch.int64)[:num_fed] = batch.fed.at
            host["fed_rows"].view(torch.int64)[:num_fed] = batch.fed.rows
        self._words.copy_(self._host_words, non_blocking=True)
        self._load_tables(batch.block_tables)
        if self._copied is not None:
            self._copied.record()
        if batch.fed is not None:
            fields = self._fields
            at, rows = (fields[name].view(torch.int64)[:num_fed] for name in ("fed_at", "fed_rows"))
            fields["token_ids"].index_copy_(0, at, batch.fed.tokens.index_select(0, rows))
        return self.view(num_tokens + padding, num_padded, num_logits)

    def view(self, num_tokens: int, num_seqs: int, num_logits: int) -> ForwardBatch:
        """What the device holds, as a batch of those sizes."""
        fields = self._fields
        return ForwardBatch(
            token_ids=fields["token_ids"][:num_tokens],
            positions=fields["positions"][:num_tokens],
            slot_mapping=fields["slots"].view(torch.int64)[:num_tokens],
            query_start_loc=fields["starts"][: num_seqs + 1],
            seq_lens=fields["seq_lens"][:num_seqs],
            block_tables=self._tables[:num_seqs],
            logits_indices=fields["logits"][:num_logits],
        )

    def _load_tables(self, tables: Tensor) -> None:
        num_seqs, width = tables.shape
        held = self._host_tables.numpy()
        new = tables.numpy()
        rows, columns = np.nonzero(held[:num_seqs, :width] != new)
        count = len(rows)
        self.num_table_entries_copied += count
        if count == 0:
            return
        held[rows, columns] = new[rows, columns]
        if count > _MAX_SCATTERED:
            first, last = int(rows.min()), int(rows.max()) + 1
            self._tables[first:last].copy_(self._host_tables[first:last], non_blocking=True)
            return
        self._changed_at.numpy()[:count] = rows * held.shape[1] + columns
        self._changed_to.numpy()[:count] = new[rows, columns]
        at = self._changed_at[:count].to(self._device, non_blocking=True)
        self._tables.view(-1).index_copy_(0, at, self._changed_to[:count].to(self._device, non_blocking=True))


def _split(words: Tensor, sizes: dict[str, int]) -> dict[str, Tensor]:
    parts = words.split(list(sizes.values()))  # type: ignore[no-untyped-call]
    return dict(zip(sizes, parts, strict=True))
