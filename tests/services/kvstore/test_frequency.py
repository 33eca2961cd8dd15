"""The sketch never counts too little, seldom too much, and forgets with time."""

from __future__ import annotations

from services.kvstore.frequency import FrequencySketch
from tests.services.kvstore.conftest import h


def test_counts_are_upper_bounds_and_nearly_right() -> None:
    sketch = FrequencySketch(1000)
    for number in range(1000):
        sketch.add([h(number)] * (1 + number % 3))
    estimates = [sketch.estimate(h(number)) for number in range(1000)]
    assert all(estimate >= 1 + number % 3 for number, estimate in enumerate(estimates))
    assert sum(estimate == 1 + number % 3 for number, estimate in enumerate(estimates)) > 950
    assert sum(sketch.estimate(h(number)) == 0 for number in range(2000, 3000)) > 950


def test_counts_stop_at_15() -> None:
    sketch = FrequencySketch(10)
    sketch.add([h(1)] * 100)
    assert sketch.estimate(h(1)) == 15


def test_old_popularity_fades() -> None:
    sketch = FrequencySketch(256)
    sketch.add([h("star")] * 12)
    for number in range(4 * 2560):
        sketch.add([h(number)])
    assert sketch.estimate(h("star")) <= 6
