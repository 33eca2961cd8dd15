"""What the bytes of a KV block mean, as two nodes compare it before any byte moves.

Owns the comparison. Owns no addresses (endpoint.py) and no memory (biphase.cache.memory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from biphase.errors import LayoutMismatchError
from biphase.rpc.v1 import common_pb2

_DIGESTS = ("namespace", "family")


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Equal layouts exchange blocks as they are; reslice.py says which others can. Fields as in common.proto."""

    namespace: bytes
    kv_dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    # The first of the heads, where this is a part of the model's.
    first_kv_head: int = 0
    # As the namespace, whatever the block size and the heads: the same tokens have the same KV, however it is cut.
    # Empty: nothing but an equal layout will do.
    family: bytes = b""

    def difference(self, other: KVLayout, names: Sequence[str] = ()) -> str | None:
        """Names the first field that differs with both values, or None when the layouts are equal.

        Namespace and family come last: they cover the others, so a difference in one of those says more.

        Args:
            names: only these fields.
        """
        plain = [field.name for field in fields(self) if field.name not in _DIGESTS]
        for name in names or (*plain, *_DIGESTS):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{name} is {_text(mine)} here and {_text(theirs)} there"
        return None

    def require_same(self, other: KVLayout, names: Sequence[str] = ()) -> None:
        """
        Raises:
            LayoutMismatchError: naming the field.
        """
        difference = self.difference(other, names)
        if difference is not None:
            raise LayoutMismatchError(f"KV blocks cannot be exchanged: {difference}.")

    def to_proto(self) -> common_pb2.KVLayout:
        return common_pb2.KVLayout(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_proto(cls, message: common_pb2.KVLayout) -> KVLayout:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """Plain values for registry records and handshakes; the namespace in hex."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**plain, **{name: plain[name].hex() for name in _DIGESTS}}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> KVLayout:
        """
        Raises:
            ValueError: a field is missing or of another type.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = record.get(field.name)
            if field.name in (*_DIGESTS, "kv_dtype"):
                if not isinstance(value, str):
                    raise ValueError(f"layout field {field.name} is missing or not text")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"layout field {field.name} is missing or not a count")
            values[field.name] = value
        return cls(**{**values, **{name: bytes.fromhex(values[name]) for name in _DIGESTS}})


def _text(value: object) -> str:
    return value.hex()[:16] + "..." if isinstance(value, bytes) and len(value) > 8 else repr(value)
