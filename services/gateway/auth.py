"""API keys: from flags, environment and a file that is read again when it changes. Keys never reach a log."""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from biphase.errors import ConfigError, UnauthorizedError
from biphase.telemetry.events import event_logger
from services.gateway.key_file import KeyGrant, digest_of, parse_key_file

log = event_logger(__name__)

# A changed key file is noticed within this time.
_RELOAD_SECONDS = 1.0
_ANYBODY = KeyGrant(digest_of(""))


class ApiKeys:
    """Decides whether a request may come in. With no key configured everybody may.

    Args:
        keys: fixed ones.
        path: a file as `key_file` describes it.
        defaults: the limits of keys that have none of their own. Where no key is asked for, it is everybody's grant.

    Raises:
        ConfigError: the file cannot be read, or says what makes no sense.
    """

    def __init__(
        self,
        keys: Sequence[str] = (),
        path: str = "",
        *,
        defaults: KeyGrant = _ANYBODY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._anybody = defaults
        self._fixed = [replace(defaults, digest=digest_of(key)) for key in keys]
        self._path = Path(path) if path else None
        self._clock = clock
        self._from_file: list[KeyGrant] = []
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

    def check(self, authorization: str | None) -> KeyGrant:
        """
        Args:
            authorization: value of the header, "Bearer <key>".

        Returns:
            What the key may do.

        Raises:
            UnauthorizedError: no key, or one that is not known.
        """
        if not self.required:
            return self._anybody
        self._reload()
        scheme, _, key = (authorization or "").partition(" ")
        given = digest_of(key.strip())
        found: KeyGrant | None = None
        # Every key is compared, and digests are of one length: the time taken says nothing.
        for grant in (*self._fixed, *self._from_file):
            if hmac.compare_digest(grant.digest, given):
                found = grant
        if scheme.lower() == "bearer" and found is not None:
            return found
        raise UnauthorizedError("Unauthorized: send a valid API key as 'Authorization: Bearer <key>'.")

    def _reload(self) -> None:
        now = self._clock()
        if self._path is None or now - self._checked < _RELOAD_SECONDS:
            return
        self._checked = now
        try:
            self._read(self._path)
        except (OSError, ConfigError) as error:
            # The keys read before stay good.
            log.warning("api_keys_unreadable", path=str(self._path), error=str(error))

    def _read(self, path: Path) -> None:
        stat = path.stat()
        stamp = (stat.st_mtime_ns, stat.st_size)
        if stamp == self._stamp:
            return
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"--api-key-file: {path} is not UTF-8") from error
        self._from_file = parse_key_file(text, self._anybody)
        self._stamp = stamp
        log.info("api_keys_read", path=str(path), num_keys=len(self._from_file))
