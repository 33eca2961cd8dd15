"""The arrows that import-linter cannot see: stdlib-only rooms as an allow-list, and what a process really loads."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

STDLIB_ONLY = [
    "biphase/cache",
    "biphase/errors.py",
    "biphase/request.py",
    "biphase/scheduler",
    "biphase/settings.py",
    "biphase/telemetry/events.py",
]
# The one module of these rooms that knows tensors.
KNOWS_TENSORS = "biphase/cache/tensors.py"


def files_of(place: str) -> Iterator[Path]:
    path = ROOT / place
    yield from [path] if path.is_file() else path.rglob("*.py")


def imported_roots(file: Path) -> set[str]:
    roots = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            roots |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.partition(".")[0])
    return roots


@pytest.mark.parametrize("place", STDLIB_ONLY)
def test_plain_data_needs_the_standard_library_only(place: str) -> None:
    files = [file for file in files_of(place) if file != ROOT / KNOWS_TENSORS]
    assert files
    foreign = {
        str(file.relative_to(ROOT)): sorted(roots)
        for file in files
        if (roots := imported_roots(file) - sys.stdlib_module_names - {"biphase"})
    }
    assert foreign == {}


@pytest.mark.parametrize("package", ["services.gateway", "services.kvstore", "services.launcher"])
def test_services_that_compute_nothing_never_load_torch(package: str) -> None:
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
heavy = sorted({{"torch", "transformers", "triton"}} & sys.modules.keys())
sys.exit(f"{package} loads {{heavy}}" if heavy else 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=ROOT)


def test_our_kernels_are_not_taken_for_the_package_of_that_name() -> None:
    # transformers probes for a distribution that is imported as `kernels`, and would use it.
    program = "import sys; from transformers.utils import is_kernels_available as f; sys.exit(f() is not False)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, cwd=ROOT)


def test_kernels_holds_a_docstring_and_a_version_only() -> None:
    body = ast.parse((ROOT / "kernels" / "__init__.py").read_text()).body
    assert isinstance(body[0], ast.Expr)
    assert [ast.unparse(node) for node in body[1:]] == ["__version__ = '0'"]
