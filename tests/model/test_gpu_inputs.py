"""A step's inputs at fixed addresses: what is padded, what is copied, what stays."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from biphase.model.forward import FedTokens, ForwardBatch
from biphase.model.gpu_forward import recorded_sizes
from biphase.model.gpu_inputs import StepInputs

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def batch_of(query_lens: list[int], seq_lens: list[int], tables: list[list[int]], logits: list[int]) -> ForwardBatch:
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    num_tokens = int(starts[-1])
    return ForwardBatch(
        token_ids=torch.arange(10, 10 + num_tokens, dtype=torch.int32),
        positions=torch.arange(num_tokens, dtype=torch.int32),
        slot_mapping=torch.arange(2**33, 2**33 + num_tokens),
        query_start_loc=starts,
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        logits_indices=torch.tensor(logits, dtype=torch.int32),
    )


def same(loaded: ForwardBatch, given: ForwardBatch) -> None:
    for name in ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "logits_indices"):
        actual, expected = getattr(loaded, name), getattr(given, name)
        assert actual.dtype == expected.dtype
        assert torch.equal(actual.cpu(), expected), name
    width = given.block_tables.shape[1]
    assert torch.equal(loaded.block_tables[:, :width].cpu(), given.block_tables)


def test_a_batch_arrives_as_it_is() -> None:
    inputs = StepInputs(DEVICE, 16, 4, 8)
    batch = batch_of([3, 1, 7], [3, 9, 20], [[1, 0], [5, 6], [7, 9]], [2, 3])
    same(inputs.load(batch, 3), batch)


def test_padding_is_empty_sequences_of_one_token() -> None:
    inputs = StepInputs(DEVICE, 16, 8, 8)
    inputs.load(batch_of([1] * 8, [9] * 8, [[3]] * 8, list(range(8))), 8)
    batch = batch_of([1, 1, 1], [5, 6, 7], [[1], [2], [3]], [0, 1, 2])
    loaded = inputs.load(batch, 6)
    assert loaded.query_start_loc.tolist() == list(range(7))
    assert loaded.seq_lens.tolist() == [5, 6, 7, 0, 0, 0]
    assert loaded.slot_mapping.tolist() == [2**33, 2**33 + 1, 2**33 + 2, -1, -1, -1]
    assert loaded.token_ids.tolist() == [10, 11, 12, 0, 0, 0]
    assert loaded.positions.tolist() == [0, 1, 2, 0, 0, 0]


def test_tokens_that_only_the_device_knows_are_put_in_there() -> None:
    inputs = StepInputs(DEVICE, 16, 8, 8)
    batch = batch_of([1, 3, 1], [5, 6, 7], [[1], [2], [3]], [0, 3, 4])
    last = torch.tensor([40, 41, 42, 43], dtype=torch.int32, device=DEVICE)
    fed = replace(batch, fed=FedTokens(torch.tensor([0, 4]), torch.tensor([3, 1]), last))
    loaded = inputs.load(fed, 3)
    assert loaded.token_ids.tolist() == [43, 11, 12, 13, 41]
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14]
    # Not again, unless it is said again.
    assert inputs.load(batch, 3).token_ids.tolist() == [10, 11, 12, 13, 14]
    token_ids = batch.token_ids.to(DEVICE)
    assert fed.fed is not None
    fed.fed.put(token_ids)
    assert token_ids.tolist() == [43, 11, 12, 13, 41]
    moved = fed.to(DEVICE)
    same(moved, batch)
    assert moved.fed is fed.fed


def test_addresses_do_not_move() -> None:
    inputs = StepInputs(DEVICE, 16, 8, 8)
    batch = batch_of([1, 1], [5, 6], [[1], [2]], [0, 1])
    first, second = inputs.load(batch, 4), inputs.load(batch, 4)
    view = inputs.view(4, 4, 4)
    for name in ("token_ids", "positions", "slot_mapping", "query_start_loc", "seq_lens", "block_tables"):
        addresses = {getattr(each, name).data_ptr() for each in (first, second, view)}
        assert len(addresses) == 1
        assert addresses.pop() % 4 == 0
    assert first.slot_mapping.data_ptr() % 8 == 0


def test_only_table_entries_that_changed_are_copied() -> None:
    inputs = StepInputs(DEVICE, 16, 4, 8)
    tables = [[1, 2, 3], [4, 5, 6]]
    inputs.load(batch_of([1, 1], [40, 41], tables, [0, 1]), 2)
    assert inputs.num_table_entries_copied == 6
    inputs.load(batch_of([1, 1], [41, 42], tables, [0, 1]), 2)
    assert inputs.num_table_entries_copied == 6
    tables[1][2] = 9
    batch = batch_of([1, 1], [42, 43], tables, [0, 1])
    same(inputs.load(batch, 2), batch)
    assert inputs.num_table_entries_copied == 7


def test_random_batches_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("biphase.model.gpu_inputs._MAX_SCATTERED", 20)  # whole rows now and then
    inputs = StepInputs(DEVICE, 64, 8, 16)
    draw = random.Random(5)
    tables = [[draw.randrange(1000) for _ in range(16)] for _ in range(8)]
    for _ in range(60):
        num_seqs, width = draw.randint(1, 8), draw.randint(1, 16)
        for _ in range(draw.choice([0, 1, 5, 40])):
            tables[draw.randrange(8)][draw.randrange(16)] = draw.randrange(1000)
        queries = [draw.randint(1, 8) for _ in range(num_seqs)]
        lens = [n + draw.randint(0, 50) for n in queries]
        batch = batch_of(
            queries, lens, [row[:width] for row in tables[:num_seqs]], list(range(draw.randint(0, num_seqs)))
        )
        same(inputs.load(batch, num_seqs), batch)


def test_recorded_sizes_cover_every_batch() -> None:
    assert recorded_sizes(1) == (1,)
    assert recorded_sizes(6) == (1, 2, 4, 6)
    assert recorded_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    sizes = recorded_sizes(500)
    assert sizes[-1] == 500
    assert list(sizes) == sorted(set(sizes))
