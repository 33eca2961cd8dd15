"""Questions to a running gateway over HTTP, for commands that do nothing but ask. What an answer means is theirs."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from biphase.errors import UnavailableError

_ANSWER_SECONDS = 10.0
_MAX_ERROR_BYTES = 65536


class RefusedError(Exception):
    """The answer was an error: its status, and its message, "" where it has none."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"HTTP {status}: {message}")
        self.status = status
        self.message = message


class NobodyListensError(UnavailableError):
    """The connection was refused."""


def ask(base_url: str, path: str, key: str = "", body: dict[str, Any] | None = None) -> Any:
    """The JSON of a GET, or of a POST where there is a body.

    Raises:
        RefusedError: the answer was an error.
        UnavailableError: there was none.
        ValueError: it was no JSON.
    """
    headers = {"Content-Type": "application/json"} if body is not None else {}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(base_url.rstrip("/") + path, data, headers)
    try:
        with urllib.request.urlopen(request, timeout=_ANSWER_SECONDS) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            raise RefusedError(error.code, _message(error.read(_MAX_ERROR_BYTES))) from error
    except OSError as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        kind = NobodyListensError if isinstance(reason, ConnectionRefusedError) else UnavailableError
        raise kind(f"no gateway answers at {base_url} ({reason})") from error


def _message(raw: bytes) -> str:
    try:
        return str(json.loads(raw)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
