"""`biphase drain NODE`: sends one process of a running cluster off, and waits until it has gone.

Asks the gateway's POST /drain and watches its /status; computes nothing.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from biphase.errors import InvalidRequestError, UnauthorizedError, UnavailableError
from biphase.settings import API_FLAGS, Flag, boolean, parse_flags, positive_seconds

_ANSWER_SECONDS = 10.0
_LOOK_SECONDS = 0.5

DRAIN_FLAGS = (
    Flag("node", str, "", "id of the process, as `biphase status` shows it"),
    Flag("url", str, "http://127.0.0.1:8000", "address of a gateway"),
    Flag("timeout", positive_seconds, None, "seconds its running requests get; default: its own --drain-timeout"),
    Flag("wait", boolean, True, "return when it has gone"),
    *(flag for flag in API_FLAGS if flag.name == "admin-key"),
)


@dataclass(frozen=True, slots=True)
class DrainSettings:
    """One field per flag in DRAIN_FLAGS."""

    node: str
    url: str
    timeout: float | None
    wait: bool
    admin_key: str


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
    said = _call(settings, "/drain", body)
    if settings.wait:
        while _is_there(settings, said["incarnation"]):
            time.sleep(_LOOK_SECONDS)
    print(f"{said['node']} {'has gone' if settings.wait else 'drains'}")
    return 0


def _is_there(settings: DrainSettings, incarnation: str) -> bool:
    try:
        status = _call(settings, "/status?limit=0")
    except UnavailableError:
        # The gateway itself was told to go, and did.
        return False
    lives = [status.get("gateway") or {}, *status.get("nodes", [])]
    return any(node.get("incarnation") == incarnation and node.get("state") != "unreachable" for node in lives)


def _call(settings: DrainSettings, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    url = settings.url.rstrip("/") + path
    headers = {"Content-Type": "application/json"}
    if settings.admin_key:
        headers["Authorization"] = f"Bearer {settings.admin_key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=_ANSWER_SECONDS) as answer:
            said: dict[str, Any] = json.load(answer)
            return said
    except urllib.error.HTTPError as error:
        with error:
            words = _message(error.read(65536)) or f"{url} answered HTTP {error.code}"
        if error.code == 401:
            raise UnauthorizedError(words) from error
        raise (InvalidRequestError if error.code < 500 else UnavailableError)(words) from error
    except (OSError, ValueError) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise UnavailableError(f"no gateway answers at {settings.url} ({reason})") from error


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
