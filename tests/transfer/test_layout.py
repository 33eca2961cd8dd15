"""Layouts: equal, or the field that differs is named."""

from dataclasses import replace

import pytest

from biphase.errors import LayoutMismatchError
from biphase.transfer.layout import KVLayout

LAYOUT = KVLayout(b"\x01" * 32, "bfloat16", 16, 30, 3, 64, 368640)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", b"\x02" * 32),
        ("kv_dtype", "float32"),
        ("block_size_tokens", 32),
        ("num_layers", 31),
        ("num_kv_heads", 6),
        ("head_dim", 128),
        ("block_bytes", 1),
        ("first_kv_head", 3),
        ("family", b"\x02"),
    ],
)
def test_every_field_is_compared_and_named(field: str, value: object) -> None:
    other = replace(LAYOUT, **{field: value})
    difference = LAYOUT.difference(other)
    assert difference is not None and difference.startswith(f"{field} is ")
    with pytest.raises(LayoutMismatchError, match=field):
        LAYOUT.require_same(other)


def test_equal_layouts_have_no_difference() -> None:
    assert LAYOUT.difference(replace(LAYOUT)) is None
    LAYOUT.require_same(replace(LAYOUT))


def test_a_telling_field_is_named_before_the_namespace() -> None:
    assert "kv_dtype" in (LAYOUT.difference(replace(LAYOUT, namespace=b"", kv_dtype="float32")) or "")


def test_round_trips() -> None:
    assert KVLayout.from_proto(LAYOUT.to_proto()) == LAYOUT
    assert KVLayout.from_json(LAYOUT.to_json()) == LAYOUT


@pytest.mark.parametrize("change", [{"num_layers": "30"}, {"num_layers": -1}, {"kv_dtype": 3}, {"namespace": "zz"}])
def test_a_malformed_record_is_a_value_error(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        KVLayout.from_json({**LAYOUT.to_json(), **change})
    with pytest.raises(ValueError):
        KVLayout.from_json({key: value for key, value in LAYOUT.to_json().items() if key not in change})
