"""`biphase drain NODE`: sends one process of a running cluster off, and waits until it has gone.

Asks the gateway's POST /drain with the admin key, and watches its /status with an API key; computes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from biphase.errors import InvalidRequestError, UnauthorizedError, UnavailableError
from biphase.settings import API_FLAGS, Flag, boolean, parse_flags, positive_seconds
from services.launcher.asking import NobodyListensError, RefusedError, ask

_LOOK_SECONDS = 0.5
# For so long a gateway may give no answer while another process is waited for: it may be restarted meanwhile.
_PATIENCE_SECONDS = 30.0

DRAIN_FLAGS = (
    Flag("node", str, "", "id of the process, as `biphase status` shows it"),
    Flag("url", str, "http://127.0.0.1:8000", "address of a gateway"),
    Flag("timeout", positive_seconds, None, "seconds its running requests get; default: its own --drain-timeout"),
    Flag("wait", boolean, True, "return when it has gone"),
    *(flag for flag in API_FLAGS if flag.name in ("admin-key", "api-key")),
)


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """One field per flag in DRAIN_FLAGS."""

    node: str
    url: str
    timeout: float | None
    wait: bool
    admin_key: str
    api_key: tuple[str, ...]


def main(argv: Sequence[str]) -> int:
    """Returns 0: it drains, or has gone.

    Raises:
        BiphaseError: what went wrong, in one sentence.
    """
    settings = parse_flags(
        "biphase drain", "Lets a process finish what it has, take nothing new, and end.", DRAIN_FLAGS, DrainSettings,
        argv, positional=DRAIN_FLAGS[0],
    )  # fmt: skip
    if not settings.node:
        raise InvalidRequestError("say which node: biphase status lists them")
    body: dict[str, Any] = {"node": settings.node}
    if settings.timeout is not None:
        body["timeout_seconds"] = settings.timeout
    # Asked first: whoever may not look could not wait either, and shall know before anything is sent off.
    own = _status(settings).get("gateway") or {} if settings.wait else {}
    said = _call(settings.url, "/drain", settings.admin_key, body)
    if settings.wait:
        _wait_until_gone(settings, said["incarnation"], said["incarnation"] == own.get("incarnation"))
    print(f"{said['node']} {'has gone' if settings.wait else 'drains'}")
    return 0


def _wait_until_gone(settings: DrainSettings, incarnation: str, is_gateway: bool) -> None:
    """
    Args:
        is_gateway: it is the one that is asked.

    Raises:
        UnavailableError: the gateway gave no answer for too long.
    """
    silent_since: float | None = None
    while True:
        try:
            if not _is_there(_status(settings), incarnation):
                return
            silent_since = None
        except UnavailableError as error:
            if is_gateway and isinstance(error, NobodyListensError):
                return
            # A gateway that is busy, or away for a moment, says nothing of the process.
            now = time.monotonic()
            silent_since = silent_since or now
            if now - silent_since >= _PATIENCE_SECONDS:
                raise
        time.sleep(_LOOK_SECONDS)


def _status(settings: DrainSettings) -> dict[str, Any]:
    try:
        return _call(settings.url, "/status?limit=0", settings.api_key[0] if settings.api_key else "")
    except UnauthorizedError as error:
        raise UnauthorizedError(
            f"{settings.url} shows its nodes for an API key only: set BIPHASE_API_KEY, or do not wait (--wait false)"
        ) from error


def _is_there(status: dict[str, Any], incarnation: str) -> bool:
    lives = [status.get("gateway") or {}, *status.get("nodes", [])]
    return any(node.get("incarnation") == incarnation and node.get("state") != "unreachable" for node in lives)


def _call(base_url: str, path: str, key: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    try:
        said: dict[str, Any] = ask(base_url, path, key, body)
        return said
    except RefusedError as error:
        words = error.message or f"{base_url.rstrip('/')}{path} answered HTTP {error.status}"
        if error.status == 401:
            raise UnauthorizedError(words) from error
        raise (InvalidRequestError if error.status < 500 else UnavailableError)(words) from error
    except ValueError as error:
        raise UnavailableError(f"no gateway answers at {base_url} ({error})") from error
