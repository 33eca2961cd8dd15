"""Checks that every relative link in the project's documents leads to a file, and every anchor to a heading.

External addresses are not fetched: a check that needs the network is no check.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6}\s+(.*)$", re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """The anchors that a Markdown renderer gives the headings."""
    titles = HEADING.findall(document.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def problems(document: Path) -> list[str]:
    found = []
    for target in LINK.findall(document.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        if not file.exists():
            found.append(f"{document.relative_to(ROOT)}: {target} does not exist")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            found.append(f"{document.relative_to(ROOT)}: {target}: no such heading")
    return found


def main() -> int:
    documents = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    found = [problem for document in documents for problem in problems(document)]
    print("\n".join(found) if found else f"links of {len(documents)} documents are valid")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
