"""What follows from a request's data."""

from __future__ import annotations

import pytest

from biphase.request import Request, RequestId, RequestStatus, SamplingParams


@pytest.mark.parametrize("num_prompt", [1, 4, 7, 10])
def test_token_slice_is_a_slice_of_all_tokens(num_prompt: int) -> None:
    tokens = list(range(10))
    request = Request(RequestId("r"), tokens[:num_prompt], SamplingParams(), output_token_ids=tokens[num_prompt:])
    assert request.all_token_ids == tokens
    for start in range(11):
        for stop in range(start, 11):
            assert request.token_slice(start, stop) == tokens[start:stop]


def test_statuses_that_end() -> None:
    assert {status for status in RequestStatus if status.is_finished} == {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
    }
