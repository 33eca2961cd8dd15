"""Settings of `biphase serve`: its own, and those it hands on to the services it starts."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from biphase.settings import (
    API_FLAGS,
    COMMON_FLAGS,
    ENGINE_FLAGS,
    MODEL_FLAGS,
    ApiSettings,
    CommonSettings,
    EngineSettings,
    Flag,
    ModelSettings,
    boolean,
    non_negative,
    positive,
)


def words(text: str) -> tuple[str, ...]:
    """`--dtype float32` as a shell would split it."""
    return tuple(shlex.split(text))


_SHARED_FLAGS = tuple(
    replace(flag, default=8000, help="port of the OpenAI API; 0 takes a free one") if flag.name == "port"
    else replace(flag, help="address of the OpenAI API; the workers stay on loopback") if flag.name == "host"
    else replace(flag, help=f"{flag.help.partition(';')[0]}; empty: an embedded Valkey") if flag.name == "redis-url"
    else flag
    for flag in COMMON_FLAGS
)  # fmt: skip

SERVE_FLAGS = (
    Flag("prefill", non_negative, 1, "prefill workers; 0: decode workers prefill for themselves (aggregated mode)"),
    Flag("decode", positive, 1, "decode workers"),
    Flag("kvstore", boolean, True, "run a block store that all workers share"),
    *_SHARED_FLAGS,
    *MODEL_FLAGS,
    *ENGINE_FLAGS,
    *API_FLAGS,
    Flag("prefill-args", words, (), "further flags for the prefill workers, as one text: '--max-num-seqs 8'"),
    Flag("decode-args", words, (), "further flags for the decode workers"),
    Flag("kvstore-args", words, (), "further flags for the block store"),
    Flag("gateway-args", words, (), "further flags for the gateway"),
)


@dataclass(frozen=True, kw_only=True)
class ServeSettings(CommonSettings, ModelSettings, EngineSettings, ApiSettings):
    """One field per flag in SERVE_FLAGS; see there for meaning and units."""

    prefill: int
    decode: int
    kvstore: bool
    prefill_args: tuple[str, ...]
    decode_args: tuple[str, ...]
    kvstore_args: tuple[str, ...]
    gateway_args: tuple[str, ...]
