"""The border between the runner and whatever runs a model: one batch of ragged sequences in, logits out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Everything one forward pass needs; CPU or device tensors, contiguous.

    Sequences lie one after another: sequence i has query tokens
    [query_start_loc[i], query_start_loc[i + 1]) and, with them, seq_lens[i] tokens of context altogether.
    """

    token_ids: torch.Tensor  # int32 [num_tokens]
    positions: torch.Tensor  # int32 [num_tokens]
    slot_mapping: torch.Tensor  # int64 [num_tokens], block_id * block_size + offset, where K and V go
    query_start_loc: torch.Tensor  # int32 [num_seqs + 1]
    seq_lens: torch.Tensor  # int32 [num_seqs]
    block_tables: torch.Tensor  # int32 [num_seqs, max_blocks_per_seq]; entries past the sequence are undefined
    logits_indices: torch.Tensor  # int32 [num_logits], rows of the batch whose logits are wanted


class Forward(Protocol):
    """Runs the model, writes K and V of the batch's tokens into the KV cache it was built with.

    KV cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], one block one contiguous run of bytes,
    so that a block travels as one piece.
    """

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [num_logits, vocab_size], valid until the next call."""
        ...
