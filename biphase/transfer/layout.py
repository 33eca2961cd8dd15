"""What the bytes of a KV block mean, as two nodes compare it before any byte moves.

Owns the comparison. Owns no addresses (endpoint.py) and no memory (biphase.cache.memory).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from biphase.errors import LayoutMismatchError
from biphase.rpc.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Two nodes may exchange blocks only when all of it is equal. Field by field as in common.proto."""

    namespace: bytes
    kv_dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int

    def difference(self, other: KVLayout) -> str | None:
        """Names the first field that differs with both values, or None when the layouts are equal.

        The namespace comes last: it covers the others, so a difference in one of them says more.
        """
        for field in (*fields(self)[1:], fields(self)[0]):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine != theirs:
                return f"{field.name} is {_text(mine)} here and {_text(theirs)} there"
        return None

    def require_same(self, other: KVLayout) -> None:
        """
        Raises:
            LayoutMismatchError: naming the field.
        """
        difference = self.difference(other)
        if difference is not None:
            raise LayoutMismatchError(f"KV blocks cannot be exchanged: {difference}.")

    def to_proto(self) -> common_pb2.KVLayout:
        return common_pb2.KVLayout(**{field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def from_proto(cls, message: common_pb2.KVLayout) -> KVLayout:
        return cls(**{field.name: getattr(message, field.name) for field in fields(cls)})

    def to_json(self) -> dict[str, Any]:
        """Plain values for registry records and handshakes; the namespace in hex."""
        return {**{field.name: getattr(self, field.name) for field in fields(self)}, "namespace": self.namespace.hex()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> KVLayout:
        """
        Raises:
            ValueError: a field is missing or of another type.
        """
        values: dict[str, Any] = {}
        for field in fields(cls):
            value = record.get(field.name)
            if field.name == "namespace" or field.name == "kv_dtype":
                if not isinstance(value, str):
                    raise ValueError(f"layout field {field.name} is missing or not text")
            elif not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"layout field {field.name} is missing or not a count")
            values[field.name] = value
        values["namespace"] = bytes.fromhex(values["namespace"])
        return cls(**values)


def _text(value: object) -> str:
    return value.hex()[:16] + "..." if isinstance(value, bytes) and len(value) > 8 else repr(value)
