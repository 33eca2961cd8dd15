"""Typed reading of a checkpoint's config.json. Stdlib only.

Owns saying, in one sentence, which key is missing or of the wrong kind. Families ask it; nothing else reads configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from biphase.errors import ModelLoadError
from biphase.model.spec import RopeSpec

_ROPE_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONS = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")


class Config:
    """A config's values by Hugging Face's keys. A key that is null counts as absent."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    @property
    def from_gguf(self) -> bool:
        return bool(self._values.get("from_gguf"))

    @property
    def architecture(self) -> str:
        """First entry of `architectures`.

        Raises:
            ModelLoadError: there is none.
        """
        names = self._values.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            raise ModelLoadError("config.json names no architecture (key 'architectures').")
        return names[0]

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._number(key, default)
        if value != int(value) or value < 0:
            raise ModelLoadError(f"config.json: {key} is {value}; a whole number is needed.")
        return int(value)

    def positive(self, key: str, default: int | None = None) -> int:
        value = self.integer(key, default)
        if value < 1:
            raise ModelLoadError(f"config.json: {key} is {value}; it must be at least 1.")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        return float(self._number(key, default))

    def _number(self, key: str, default: float | None) -> float:
        value = self._values.get(key)
        if value is None:
            if default is None:
                raise ModelLoadError(f"config.json lacks {key}.")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"config.json: {key} is {value!r}; a number is needed.")
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        value = self._values.get(key)
        return default if value is None else bool(value)

    def text(self, key: str, default: str) -> str:
        value = self._values.get(key)
        return default if value is None else str(value)

    def token_ids(self, key: str) -> tuple[int, ...]:
        """A token id, a list of them, or nothing."""
        value = self._values.get(key)
        items = value if isinstance(value, list) else [value]
        return tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool))

    def rope(self, rotary_dim: int, layer_type: str = "full_attention", theta: float = 10_000.0) -> RopeSpec:
        """The rotary embedding, from `rope_parameters` (also one per layer type) or `rope_theta` and `rope_scaling`.

        Raises:
            ModelLoadError: a kind of scaling that is not supported, or one of its numbers is missing.
        """
        fields = self._values.get("rope_parameters") or self._values.get("rope_scaling") or {}
        if not isinstance(fields, dict):
            raise ModelLoadError("config.json: rope_parameters is no object.")
        if isinstance(fields.get(layer_type), dict):
            fields = fields[layer_type]
        theta = float(fields.get("rope_theta") or self.real("rope_theta", theta))
        kind = str(fields.get("rope_type") or fields.get("type") or "default")
        if kind == "default":
            return RopeSpec(theta, rotary_dim)
        if kind == "factors":
            numbered = ((f"{i:04d}", float(factor)) for i, factor in enumerate(fields["factors"]))
            return RopeSpec(theta, rotary_dim, kind, tuple(numbered))
        if kind not in _ROPE_SCALINGS:
            known = ", ".join(("default", *_ROPE_SCALINGS))
            raise ModelLoadError(f"config.json: rope scaling {kind!r} is not supported; supported are {known}.")
        values = {"original_max_position_embeddings": self._values.get("max_position_embeddings"), **fields}
        params: dict[str, float] = {}
        for name in (*_ROPE_SCALINGS[kind], *(_YARN_OPTIONS if kind == "yarn" else ())):
            value = values.get(name)
            if value is not None:
                params[name] = float(value)
            elif name in _ROPE_SCALINGS[kind]:
                raise ModelLoadError(f"config.json: rope scaling {kind!r} lacks {name}.")
        return RopeSpec(theta, rotary_dim, kind, tuple(sorted(params.items())))
