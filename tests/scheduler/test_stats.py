"""Rates from steps."""

from __future__ import annotations

import pytest

from biphase.scheduler.stats import StepMeter


def test_rates_settle_on_what_is_measured() -> None:
    meter = StepMeter()
    assert (meter.prefill_tokens_per_second, meter.decode_step_seconds) == (0.0, 0.0)
    for _ in range(100):
        meter.record(8, 0, 0.02)
    assert meter.decode_step_seconds == pytest.approx(0.02)
    for _ in range(100):
        meter.record(0, 512, 0.256)
    assert meter.prefill_tokens_per_second == pytest.approx(2000)
    # A mixed step costs its decodes and its prompt tokens.
    for _ in range(100):
        meter.record(8, 100, 0.02 + 0.05)
    assert meter.prefill_tokens_per_second == pytest.approx(2000)
    assert meter.decode_step_seconds == pytest.approx(0.02)
    assert (meter.num_steps, meter.num_prefill_tokens) == (300, 100 * 612)


def test_a_few_prompt_tokens_say_nothing_about_the_rate() -> None:
    meter = StepMeter()
    meter.record(0, 512, 0.256)
    for _ in range(100):
        meter.record(0, 3, 0.01)
    assert meter.prefill_tokens_per_second == pytest.approx(2000)


def test_the_first_decode_step_counts_in_full() -> None:
    meter = StepMeter()
    meter.record(1, 0, 0.03)
    assert meter.decode_step_seconds == pytest.approx(0.03)
