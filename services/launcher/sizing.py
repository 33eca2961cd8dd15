"""How much KV cache each worker of a box gets when the user has not said.

1 GiB; or as much as the weights, for a larger model has larger blocks; or what one request of full length takes. But a
tenth of the available memory at most, so that a stack of a few workers leaves most of it to others: where that is less
than one full-length request, the length is cut to what fits, and the log says so.
"""

from __future__ import annotations

from dataclasses import dataclass

from biphase.model.spec import ModelSpec
from services.launcher.settings import ServeSettings

_SMALL_BYTES = 2**30
_MAX_SHARE = 0.10


@dataclass(frozen=True, slots=True)
class Sizing:
    """For each worker. `max_model_len` 0: what the model allows."""

    kv_cache_bytes: int
    max_model_len: int


def size_kv_cache(settings: ServeSettings, spec: ModelSpec, weights_bytes: int, available_bytes: int) -> Sizing:
    """
    Args:
        weights_bytes: size of the model's files.
        available_bytes: memory that can be taken now.
    """
    if settings.kv_cache_bytes is not None:
        return Sizing(settings.kv_cache_bytes, settings.max_model_len)
    block_bytes = _token_bytes(settings, spec) * settings.block_size
    num_tokens = settings.max_model_len or spec.max_position_embeddings
    request_bytes = -(-num_tokens // settings.block_size) * block_bytes
    size = min(max(_SMALL_BYTES, weights_bytes, request_bytes), int(available_bytes * _MAX_SHARE))
    if settings.max_model_len or settings.num_blocks or size >= request_bytes:
        return Sizing(size, settings.max_model_len)
    return Sizing(size, max(size // block_bytes, 1) * settings.block_size)


def _token_bytes(settings: ServeSettings, spec: ModelSpec) -> int:
    """Bytes of one token's keys and values in all layers."""
    row_bytes = spec.head_dim * (4 if settings.dtype == "float32" else 2)
    if settings.kv_cache_dtype.startswith("fp8"):
        row_bytes = spec.head_dim + 1
    return spec.num_layers * 2 * spec.num_kv_heads * row_bytes
