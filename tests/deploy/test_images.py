"""What an image leaves out is not needed there, and torch stays out of gateway and store."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import subprocess
import sys

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.deploy.manifests import COMPOSE, ROOT

_SPEC = importlib.util.spec_from_file_location("image_requirements", COMPOSE / "requirements.py")
assert _SPEC is not None and _SPEC.loader is not None
image_requirements = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(image_requirements)

IMAGES = [
    ("gateway", "services.gateway.__main__"),
    # Which the gateway starts as a process.
    ("gateway", "biphase.grammar.check_process"),
    ("kvstore", "services.kvstore.__main__"),
    ("worker-cpu", "services.prefill.__main__"),
    ("worker-cpu", "services.decode.__main__"),
]
# What may be imported when it happens to be there, and is not asked for.
_OPTIONAL = {"grpcio-tools", "opentelemetry-api", "psutil", "watchfiles", "sniffio", "cython", "uvloop", "setuptools"}


def _requirements(image: str) -> list[str]:
    found: list[str] = image_requirements.requirements(image, ROOT / "pyproject.toml")
    return found


def _closure(texts: list[str]) -> set[str]:
    """The distributions that installing `texts` brings."""
    found: set[str] = set()
    pending = [Requirement(text) for text in texts]
    while pending:
        requirement = pending.pop()
        name = canonicalize_name(requirement.name)
        key = f"{name}{sorted(requirement.extras)}"
        if key in found:
            continue
        found |= {name, key}
        try:
            needed = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in needed:
            inner = Requirement(text)
            extras = requirement.extras or {""}
            if inner.marker is None or any(inner.marker.evaluate({"extra": extra}) for extra in extras):
                pending.append(inner)
    return found


@functools.cache
def _imported_by(module: str) -> frozenset[str]:
    """The distributions whose modules a process has loaded when it is about to start."""
    code = (
        f"import sys, {module}\n"
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    distributions = importlib.metadata.packages_distributions()
    names = {canonicalize_name(dist) for module in done.stdout.split() for dist in distributions.get(module, [])[:1]}
    return frozenset(names - {"biphase"})


@pytest.mark.parametrize("image, module", IMAGES)
def test_what_a_process_imports_is_in_its_image(image: str, module: str) -> None:
    assert _imported_by(module) - _OPTIONAL <= _closure(_requirements(image))


@pytest.mark.parametrize("image", ["gateway", "kvstore"])
def test_no_torch_where_nothing_is_computed(image: str) -> None:
    assert not {"torch", "transformers", "triton"} & _closure(_requirements(image))


def test_what_is_left_out_is_a_dependency() -> None:
    """Else a renamed dependency would come back unnoticed."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {image_requirements.name_of(text) for text in project["dependencies"]}
    assert set().union(*image_requirements.LEFT_OUT.values()) <= names
