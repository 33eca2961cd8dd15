"""SHA-256 digests of model files, remembered between runs by (path, size, modification time).

Owns the small JSON cache under ~/.cache/biphase. Stdlib only. A digest covers every byte of a file: two checkpoints
with equal digests give equal KV blocks, which is what a cache namespace needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from biphase.errors import ModelLoadError


def _cache_path() -> Path:
    return Path.home() / ".cache" / "biphase" / "digests.json"


def _read_cache(path: Path) -> dict[str, str]:
    try:
        entries = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _write_cache(path: Path, added: dict[str, str]) -> None:
    # Written whole and renamed, so that processes starting together never read half a file. A lost update costs one
    # more hashing, so there is no lock. A read-only home directory is no reason to fail.
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".digests-")
        with os.fdopen(descriptor, "w") as out:
            json.dump(_read_cache(path) | added, out)
        os.replace(temporary, path)


def file_digests(paths: Iterable[Path]) -> list[bytes]:
    """SHA-256 of each file's content, 32 bytes each, from the cache where the file has not changed.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    cache_path = _cache_path()
    known = _read_cache(cache_path)
    added: dict[str, str] = {}
    digests: list[bytes] = []
    for path in paths:
        try:
            real = path.resolve()
            stat = real.stat()
            key = f"{real}|{stat.st_size}|{stat.st_mtime_ns}"
            found = known.get(key)
            if found is None or len(found) != 64:
                with real.open("rb") as source:
                    found = hashlib.file_digest(source, "sha256").hexdigest()
                added[key] = found
        except OSError as error:
            raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
        digests.append(bytes.fromhex(found))
    if added:
        _write_cache(cache_path, added)
    return digests


def combined_digest(paths: Iterable[Path]) -> str:
    """One hex SHA-256 over the names and contents of several files, independent of their order and folder.

    Raises:
        ModelLoadError: a file cannot be read.
    """
    ordered = sorted(paths, key=lambda path: path.name)
    digest = hashlib.sha256()
    for path, content in zip(ordered, file_digests(ordered), strict=True):
        name = path.name.encode()
        digest.update(len(name).to_bytes(8, "little") + name + content)
    return digest.hexdigest()
