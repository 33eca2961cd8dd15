"""API keys: from flags, environment and a file that is read again when it changes. Keys never reach a log."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from biphase.errors import ConfigError, UnauthorizedError
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

# A changed key file is noticed within this time.
_RELOAD_SECONDS = 1.0


class ApiKeys:
    """Decides whether a request may come in. With no key configured everybody may.

    Args:
        keys: fixed ones.
        path: a file with one key a line; blank lines and lines that begin with "#" do not count.

    Raises:
        ConfigError: the file cannot be read.
    """

    def __init__(
        self, keys: Sequence[str] = (), path: str = "", *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fixed = [_digest(key) for key in keys]
        self._path = Path(path) if path else None
        self._clock = clock
        self._from_file: list[bytes] = []
        self._stamp: tuple[int, int] | None = None
        self._checked = 0.0
        if self._path is not None:
            try:
                self._read(self._path)
            except OSError as error:
                raise ConfigError(f"--api-key-file: cannot read {path}: {error.strerror or error}") from error

    @property
    def required(self) -> bool:
        # A key file that has become empty shuts the door, it does not open it.
        return bool(self._fixed) or self._path is not None

    def check(self, authorization: str | None) -> None:
        """
        Args:
            authorization: value of the header, "Bearer <key>".

        Raises:
            UnauthorizedError: no key, or one that is not known.
        """
        if not self.required:
            return
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        known = False
        # Every key is compared, and digests are of one length: the time taken says nothing.
        for digest in (*self._fixed, *self._from_file):
            known |= hmac.compare_digest(digest, given)
        if scheme.lower() != "bearer" or not known:
            raise UnauthorizedError("Unauthorized: send a valid API key as 'Authorization: Bearer <key>'.")

    def _reload(self) -> None:
        now = self._clock()
        if self._path is None or now - self._checked < _RELOAD_SECONDS:
            return
        self._checked = now
        try:
            self._read(self._path)
        except OSError as error:
            log.warning("api_keys_unreadable", path=str(self._path), error=error.strerror or str(error))

    def _read(self, path: Path) -> None:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp == self._stamp:
            return
        lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        self._from_file = [_digest(line) for line in lines if line and not line.startswith("#")]
        self._stamp = stamp
        log.info("api_keys_read", path=str(path), num_keys=len(self._from_file))


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
