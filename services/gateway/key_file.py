"""What an API key may do, and the file that says so.

One key a line, then its options, separated by blanks:

    <key> [name=...] [requests-per-minute=N] [tokens-per-minute=N] [cache-salt=...]

Blank lines and lines that begin with "#" do not count. A limit that is not given is the gateway's own
(--requests-per-minute, --tokens-per-minute); 0 is none. With a cache-salt, nothing that was computed for the key is
found by any other one: the time an answer takes then tells nobody what others have asked.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from biphase.errors import ConfigError

_MAX_SALT_CHARACTERS = 128


@dataclass(frozen=True, slots=True)
class KeyGrant:
    """One key, named by its digest. Limits are per minute; 0: none."""

    digest: bytes
    name: str = ""
    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    cache_salt: str = ""

    @property
    def key_id(self) -> str:
        """Names the key where the key itself must not stand."""
        return self.digest.hex()[:32]


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def parse_key_file(text: str, defaults: KeyGrant) -> list[KeyGrant]:
    """
    Args:
        defaults: its limits hold where a line has none.

    Raises:
        ConfigError: an option that is not known or has no sense. The line is named by its number, never shown.
    """
    grants = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            grants.append(_grant(words, replace(defaults, digest=digest_of(words[0])), number))
    return grants


def _grant(words: list[str], grant: KeyGrant, number: int) -> KeyGrant:
    for word in words[1:]:
        name, _, value = word.partition("=")
        if name == "requests-per-minute" and value.isdecimal():
            grant = replace(grant, requests_per_minute=int(value))
        elif name == "tokens-per-minute" and value.isdecimal():
            grant = replace(grant, tokens_per_minute=int(value))
        elif name == "name" and value:
            grant = replace(grant, name=value)
        elif name == "cache-salt" and 1 <= len(value) <= _MAX_SALT_CHARACTERS:
            grant = replace(grant, cache_salt=value)
        else:
            raise ConfigError(
                f"--api-key-file: line {number}: options are name=, requests-per-minute=, tokens-per-minute= and "
                "cache-salt="
            )
    return grant
