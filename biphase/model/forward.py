"""The border between the runner and whatever runs a model: one batch of ragged sequences in, logits out."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True)
class FedTokens:
    """Tokens of a batch that the step before samples, and that no host has seen: token `at[i]` is `tokens[rows[i]]`."""

    at: torch.Tensor  # int64 [num_fed], CPU, ascending
    rows: torch.Tensor  # int64 [num_fed], CPU
    tokens: torch.Tensor  # int32 [max_num_seqs], where the model runs; complete once the step before is done

    def put(self, token_ids: torch.Tensor) -> None:
        """Writes them into `token_ids`, int32 [num_tokens], where `tokens` is."""
        device = token_ids.device
        token_ids[self.at.to(device)] = self.tokens[self.rows.to(device)]


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
    # Tokens that are not in token_ids yet; only for a Forward that takes them (`Executor.feeds`).
    fed: FedTokens | None = None

    def to(self, device: torch.device) -> ForwardBatch:
        """The same on a device; what is fed stays where it is."""
        moved: dict[str, Any] = {
            item.name: getattr(self, item.name).to(device, non_blocking=True)
            for item in fields(self)
            if item.name != "fed"
        }
        return replace(self, **moved)


class Forward(Protocol):
    """Runs the model, writes K and V of the batch's tokens into the KV cache it was built with.

    KV cache: [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], one block one contiguous run of bytes,
    so that a block travels as one piece.
    """

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Returns float32 logits [num_logits, vocab_size], valid until the next call."""
        ...
