"""Settings that make no sense are named."""

from __future__ import annotations

from typing import Any

import pytest

from biphase.errors import ConfigError
from biphase.scheduler.config import SchedulerConfig


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_num_seqs": 65, "max_num_batched_tokens": 64}, "must not be below max_num_seqs"),
        ({"watermark": 1.0}, "watermark"),
        ({"policy": "lifo"}, "'lifo' is not one of fcfs, priority, shortest_first"),
        ({"ageing_seconds": 0.0}, "ageing_seconds"),
        ({"max_mixed_prefill_tokens": -1}, "max_mixed_prefill_tokens"),
    ],
)
def test_refuses(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SchedulerConfig(**settings)


def test_defaults_are_accepted() -> None:
    SchedulerConfig()
