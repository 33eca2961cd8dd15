"""Looks over what an install of biphase[dev] brings: its sources, its licences, its known weaknesses.

Sources and licences are checked offline. Advisories are asked of osv.dev, once for all; where that cannot be reached
the check says so loudly and passes, unless BIPHASE_AUDIT=require. That every version is pinned is constraints.py's.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import sys
import urllib.error
import urllib.request

from constraints import closure

OSV_URL = os.environ.get("BIPHASE_OSV_URL", "https://api.osv.dev/v1/querybatch")
_SECONDS = 15.0
# What an Apache-2.0 project may stand on: no licence that would reach over to it. Of alternatives one has to fit.
_WORDS = (
    r"0BSD|Apache(-2\.0| 2\.0| Software)?( License)?( WITH LLVM-exception)?|BSD([- ]?[23]-Clause)?( License)?"
    r"|(2|3)-Clause BSD License|BSL-1\.0|CC0-1\.0|CNRI-Python|ISC License \(ISCL\)|ISC|MIT(-0)?( License)?"
    r"|MPL-2\.0|Mozilla Public License 2\.0 \(MPL 2\.0\)|PSF-2\.0|Python Software Foundation License|Zlib"
    r"|DFSG approved|Unlicense"
)
_PERMITTED = re.compile(rf"({_WORDS})(( AND | OR |; )({_WORDS}))*")
# Advisories that were looked at and do not concern biphase: id -> why.
ACCEPTED: dict[str, str] = {}


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """SPDX expression, classifiers or free text, whichever the package has first; "" for none."""
    expression = metadata.get("License-Expression")
    classifiers = [c.rpartition(" :: ")[2] for c in metadata.get_all("Classifier") or () if c.startswith("License ::")]
    named = [c for c in classifiers if c != "OSI Approved"]
    return expression or "; ".join(named) or (metadata.get("License") or "").strip().partition("\n")[0]


def foreign_source(distribution: importlib.metadata.Distribution) -> str:
    """Where it came from, when that was no package index."""
    raw = distribution.read_text("direct_url.json")
    return json.loads(raw).get("url", "somewhere") if raw else ""


def problems_offline(versions: dict[str, str]) -> list[str]:
    found = []
    for name in sorted(versions):
        distribution = importlib.metadata.distribution(name)
        licence = licence_of(distribution.metadata)
        if not _PERMITTED.fullmatch(licence):
            found.append(f"{name}: licence {licence or 'unknown'!r} is not on the list in .ci/audit.py")
        if source := foreign_source(distribution):
            found.append(f"{name} came from {source}, not from an index")
    return found


def advisories(versions: dict[str, str]) -> list[str]:
    """
    Raises:
        OSError, ValueError: nobody to ask, or no answer that makes sense.
    """
    names = sorted(versions)
    queries = [{"package": {"ecosystem": "PyPI", "name": name}, "version": versions[name]} for name in names]
    body = json.dumps({"queries": queries}).encode()
    request = urllib.request.Request(OSV_URL, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
        results = json.load(answer)["results"]
    if len(results) != len(names):
        raise ValueError(f"{len(results)} answers to {len(names)} questions")
    return [
        f"{name} {versions[name]}: {entry['id']}"
        for name, result in zip(names, results, strict=True)
        for entry in result.get("vulns", ())
        if entry["id"] not in ACCEPTED
    ]


def main() -> int:
    versions = closure()
    found = problems_offline(versions)
    asked = True
    try:
        found += advisories(versions)
    except (OSError, ValueError, KeyError) as error:
        asked = False
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        print(f"audit: ADVISORIES WERE NOT CHECKED: {OSV_URL} gives no answer ({reason})", file=sys.stderr)
        if os.environ.get("BIPHASE_AUDIT") == "require":
            found.append("advisories could not be checked, and BIPHASE_AUDIT=require")
    for problem in found:
        print(f"audit: {problem}", file=sys.stderr)
    if not found:
        print(f"audit: {len(versions)} distributions from indexes, licences permitted" + (", no advisory" * asked))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
