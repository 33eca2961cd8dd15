"""Which requests the host must follow token by token."""

from __future__ import annotations

from typing import Any

import pytest

from biphase.request import SamplingParams, StructuredOutput
from biphase.sampler import ALL, num_awaited_outputs, waits_for_device
from biphase.sampler.row import SamplingRow


@pytest.mark.parametrize(
    ("changes", "awaited", "waits"),
    [
        ({}, 0, False),
        ({"temperature": 0.7, "min_p": 0.1, "seed": 4}, 0, False),
        ({"stop_token_ids": frozenset({3}), "eos_token_ids": frozenset({4})}, 0, False),
        ({"structured_output": StructuredOutput("regex", "a")}, ALL, False),
        ({"repetition_penalty": 1.1}, ALL, False),
        ({"presence_penalty": -0.1}, ALL, False),
        ({"frequency_penalty": 0.1}, ALL, False),
        ({"bad_words": ((5,), (6, 7))}, ALL, True),
        ({"bad_words": ((5,),)}, 0, True),
        ({"min_tokens": 3}, 3, False),
        ({"prompt_logprobs": 0}, 1, False),
        ({"prompt_logprobs": 0, "min_tokens": 3}, 3, False),
        ({"logprobs": 0}, 0, True),
        ({"temperature": 1.0, "top_p": 0.9}, 0, True),
        ({"temperature": 1.0, "top_k": 5}, 0, True),
        ({"temperature": 1.0, "top_k": 100}, 0, False),
        ({"logit_bias": ((1, 1.0),)}, 0, True),
        ({"allowed_token_ids": (1,)}, 0, True),
    ],
)
def test_what_is_awaited(changes: dict[str, Any], awaited: int, waits: bool) -> None:
    params = SamplingParams(**changes)
    assert (num_awaited_outputs(params), waits_for_device(params, 100)) == (awaited, waits)


def test_a_row_that_is_not_awaited_changes_logits_by_its_parameters_alone() -> None:
    params = SamplingParams(min_tokens=2, eos_token_ids=frozenset({3}))
    row = SamplingRow(params, [1], 100)
    assert row.changes_logits and row.banned_now() == [3]
    row.add_output(7)
    assert row.changes_logits and row.banned_now() == [3]
    row.add_output(7)
    assert not row.changes_logits and row.banned_now() == []
