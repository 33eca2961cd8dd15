"""Model families: one small file each, turning a checkpoint's config into a ModelSpec. Stdlib only.

Every module of this package that has a `FAMILIES` tuple is found by itself; see docs/adding-a-model-family.md.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace
from functools import cache

from biphase.errors import ModelLoadError
from biphase.model.config import Config
from biphase.model.families.decoder import Family
from biphase.model.packing import packing_of
from biphase.model.source import ModelSource
from biphase.model.spec import ModelSpec


@cache
def supported_families() -> dict[str, Family]:
    """Architecture name -> family, sorted by name."""
    found: dict[str, Family] = {}
    for module in pkgutil.iter_modules(__path__):
        for family in getattr(importlib.import_module(f"{__name__}.{module.name}"), "FAMILIES", ()):
            found[family.architecture] = family
    return dict(sorted(found.items()))


def family_of(config: Config) -> Family:
    """The family that reads this config.

    Raises:
        ModelLoadError: the architecture is not supported, by name.
    """
    families = supported_families()
    name = config.architecture
    if name not in families:
        raise ModelLoadError(f"Architecture {name} is not supported; supported are {', '.join(families)}.")
    return families[name]


def spec_of(source: ModelSource) -> ModelSpec:
    """What the model is, without reading its weights.

    Raises:
        ModelLoadError: the config is missing, damaged, incomplete, or of an unsupported architecture or packing.
    """
    config = Config(source.config())
    try:
        spec = family_of(config).spec(config)
        packing_of(config)  # Refused as early as an architecture.
        ends = Config(source.generation_config()).token_ids("eos_token_id")
    except ModelLoadError as error:
        raise ModelLoadError(f"{source.path}: {error.message}") from error
    # generation_config.json is where chat models name the end of a turn.
    return replace(spec, eos_token_ids=tuple(dict.fromkeys((*ends, *spec.eos_token_ids))))
