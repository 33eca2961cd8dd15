"""When sequences end, and which are refused."""

from __future__ import annotations

from typing import Any

import pytest

from biphase.errors import InvalidRequestError
from biphase.request import FinishReason, Request, RequestId, SamplingParams
from biphase.scheduler.stopping import check_request, finish_reason, max_kv_tokens


def request(num_prompt: int = 3, output: list[int] | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 10, "eos_token_ids": frozenset({0}), **sampling})
    return Request(RequestId("r"), [9] * num_prompt, params, output_token_ids=output or [])


@pytest.mark.parametrize(
    ("req", "reason", "stop_token_id"),
    [
        (request(output=[5]), None, None),
        (request(output=[0]), FinishReason.STOP, None),
        (request(output=[0], ignore_eos=True), None, None),
        (request(output=[0], min_tokens=2), None, None),
        (request(output=[5, 0], min_tokens=2), FinishReason.STOP, None),
        (request(output=[7], stop_token_ids=frozenset({7})), FinishReason.STOP, 7),
        (request(output=[7], stop_token_ids=frozenset({7}), min_tokens=2), None, None),
        (request(output=[0], ignore_eos=True, stop_token_ids=frozenset({0})), FinishReason.STOP, 0),
        (request(output=[5] * 10), FinishReason.LENGTH, None),
        (request(output=[5] * 9 + [0]), FinishReason.STOP, None),
        (request(num_prompt=15, output=[5] * 5), FinishReason.LENGTH, None),
        (request(num_prompt=15, output=[5] * 5, min_tokens=8), FinishReason.LENGTH, None),
        (request(num_prompt=15, output=[5] * 4), None, None),
    ],
)
def test_finish_reason(req: Request, reason: FinishReason | None, stop_token_id: int | None) -> None:
    assert finish_reason(req, max_model_len=20) is reason
    assert req.stop_token_id == stop_token_id


def test_max_kv_tokens() -> None:
    assert max_kv_tokens(request(num_prompt=3), 100) == 12  # the last token's KV is never needed
    assert max_kv_tokens(request(num_prompt=95), 100) == 99
    prefill = request(num_prompt=3)
    prefill.prefill_only = True
    assert max_kv_tokens(prefill, 100) == 3
    waits = request(num_prompt=3, max_tokens=1)
    waits.awaits_kv = True
    assert max_kv_tokens(waits, 100) == 4


@pytest.mark.parametrize(
    ("req", "param", "words"),
    [
        (request(num_prompt=0), "prompt", "no tokens"),
        (request(num_prompt=100), "prompt", "context ends at 100"),
        (request(output=[5] * 10), "max_tokens", "nothing is left"),
        (request(num_prompt=30, max_tokens=40), "max_tokens", "69 tokens and this worker has 16 blocks of 4"),
    ],
)
def test_refuses_what_can_never_run(req: Request, param: str, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_request(req, max_model_len=100, num_blocks=16, block_size=4)
    assert caught.value.param == param


def test_accepts_what_just_fits() -> None:
    check_request(request(num_prompt=30, max_tokens=35), max_model_len=100, num_blocks=16, block_size=4)
    check_request(request(num_prompt=99, max_tokens=1), max_model_len=100, num_blocks=25, block_size=4)
