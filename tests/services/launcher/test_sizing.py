"""The KV cache of a box, when the user has not said."""

from __future__ import annotations

from dataclasses import replace

from biphase.model.families import spec_of
from biphase.model.source import resolve_model
from services.launcher.serve import parse_settings
from services.launcher.sizing import Sizing, size_kv_cache

GIB = 2**30
# 8B-like: 128 KiB a token in bfloat16, 16 GiB for 131,072 tokens.
LARGE = replace(
    spec_of(resolve_model("")), num_layers=32, num_kv_heads=8, head_dim=128, max_position_embeddings=131_072
)
SMALL = spec_of(resolve_model(""))


def test_a_small_model_gets_a_gibibyte() -> None:
    assert size_kv_cache(parse_settings([], {}), SMALL, GIB // 8, 20 * GIB) == Sizing(GIB, 0)


def test_a_small_machine_gives_a_tenth() -> None:
    assert size_kv_cache(parse_settings([], {}), SMALL, GIB // 8, 5 * GIB) == Sizing(GIB // 2, 0)


def test_a_large_model_gets_one_full_request_where_there_is_room() -> None:
    assert size_kv_cache(parse_settings([], {}), LARGE, 15 * GIB, 400 * GIB) == Sizing(16 * GIB, 0)


def test_where_there_is_none_the_length_is_cut_to_what_fits() -> None:
    assert size_kv_cache(parse_settings([], {}), LARGE, 15 * GIB, 40 * GIB) == Sizing(4 * GIB, 32_768)
    assert size_kv_cache(parse_settings(["--dtype", "float32"], {}), LARGE, 15 * GIB, 40 * GIB).max_model_len == 16_384


def test_what_the_user_said_stands() -> None:
    given = parse_settings(["--kv-cache-bytes", "1MiB"], {})
    assert size_kv_cache(given, LARGE, 15 * GIB, 40 * GIB) == Sizing(2**20, 0)
    given = parse_settings(["--max-model-len", "100000"], {})
    assert size_kv_cache(given, LARGE, 15 * GIB, 40 * GIB) == Sizing(4 * GIB, 100_000)
