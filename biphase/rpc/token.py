"""The secret that the processes of one cluster share, and the two ways in which it is proved without being sent.

A gRPC call carries a proof in its metadata: the method, the time and a number used once under a MAC. Within a minute it
is good once per process, for that method with any message: neither the called process nor the message is under the MAC.
Who sees it pass can still use it at another process of the cluster, or at the same one after a restart; only TLS stops
that. A data connection answers a challenge instead (biphase.transfer.handshake). Owns no sockets and no files.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable

from biphase.errors import ConfigError, UnauthorizedError

PROOF_METADATA_KEY = "biphase-proof"
# Two machines' clocks may differ by this much.
MAX_SKEW_SECONDS = 60.0
_MIN_CHARACTERS = 16
_WANTED = "it wants the service token of its cluster (--service-token, BIPHASE_SERVICE_TOKEN)"


class ServiceToken:
    """A shared secret. Printing it shows nothing.

    Raises:
        ConfigError: too short to be one.
    """

    __slots__ = ("_key",)

    def __init__(self, text: str) -> None:
        if len(text) < _MIN_CHARACTERS:
            raise ConfigError(f"--service-token is too short: give at least {_MIN_CHARACTERS} random characters")
        # A key of its own: nothing that is sent is a function of the token as other programs may know it.
        self._key = hashlib.sha256(b"biphase service token\0" + text.encode()).digest()

    def __repr__(self) -> str:
        return "ServiceToken(...)"

    def mac(self, purpose: bytes, *parts: bytes) -> bytes:
        """32 bytes that only who has the token can make; parts cannot be shifted into each other."""
        lengths = b"".join(len(part).to_bytes(8, "little") for part in (purpose, *parts))
        return hmac.digest(self._key, lengths + purpose + b"".join(parts), "sha256")

    def prove_call(self, method: str, now: float | None = None) -> str:
        """The proof for one call of `method` ("/package.Service/Method"), as text."""
        milliseconds = int((time.time() if now is None else now) * 1000)
        return self._proof(method, milliseconds, secrets.randbits(64))

    def _proof(self, method: str, milliseconds: int, nonce: int) -> str:
        stamp = f"{milliseconds:x}.{nonce:016x}"
        return f"{stamp}.{self.mac(b'call', method.encode(), stamp.encode()).hex()}"


class ProofChecker:
    """Checks calls' proofs, each of which is good once here; other processes count for themselves. For one thread.

    Remembers the numbers of the calls of the last two to four minutes, about 100 bytes each; only who has the token
    can add to them.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, token: ServiceToken, clock: Callable[[], float] = time.time) -> None:
        self._token = token
        self._clock = clock
        self._seen: set[int] = set()
        self._seen_before: set[int] = set()
        self._turn_at = 0.0

    def check(self, method: str, proof: str | bytes | None) -> None:
        """
        Raises:
            UnauthorizedError: there is none, it is false, for another call, too old, or was used before.
        """
        if not isinstance(proof, str):
            raise UnauthorizedError(f"this call carries no proof: {_WANTED}")
        try:
            stamp, nonce_text, _ = proof.split(".")
            milliseconds, nonce = int(stamp, 16), int(nonce_text, 16)
            good = hmac.compare_digest(self._token._proof(method, milliseconds, nonce).encode(), proof.encode())
        except (ValueError, OverflowError):
            good = False
        if not good:
            raise UnauthorizedError(f"this call's proof is false: {_WANTED}")
        now = self._clock()
        age = now - milliseconds / 1000
        if abs(age) > MAX_SKEW_SECONDS:
            when = f"{age:.0f} s old" if age > 0 else f"{-age:.0f} s in the future"
            raise UnauthorizedError(f"this call's proof is {when}: set the clocks of both machines")
        if now >= self._turn_at:
            # A number has to be known for as long as its proof could still be in time.
            self._seen_before, self._seen = self._seen, set()
            self._turn_at = now + 2 * MAX_SKEW_SECONDS
        if nonce in self._seen or nonce in self._seen_before:
            raise UnauthorizedError("this call's proof was used before")
        self._seen.add(nonce)
