"""Names of one request: what the client sees, and what all processes call it."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from services.gateway.domain import Endpoint

_PREFIX = {Endpoint.CHAT: "chatcmpl-", Endpoint.COMPLETIONS: "cmpl-", Endpoint.RESPONSES: "resp_"}
_MAX_LENGTH = 96


@dataclass(frozen=True, slots=True)
class Identity:
    endpoint: Endpoint
    response_id: str
    # Unique also when a client uses one id twice. In logs, traces and /status.
    request_id: str
    created: int


def clean_client_id(text: str | None) -> str:
    """A client's own id, fit for logs and headers; "" when there is none or it is not usable."""
    if not text or len(text) > _MAX_LENGTH or not all(char.isalnum() or char in "-_.:" for char in text):
        return ""
    return text if text.isascii() else ""


def identify(endpoint: Endpoint, client_id: str) -> Identity:
    """
    Args:
        client_id: as `clean_client_id` left it.
    """
    response_id = _PREFIX[endpoint] + (client_id or secrets.token_hex(12))
    request_id = f"{response_id}-{secrets.token_hex(4)}" if client_id else response_id
    if endpoint is Endpoint.RESPONSES:
        # Whoever knows a stored response's id may read it: nothing that is told of the request may give it away.
        request_id = f"respreq-{secrets.token_hex(12)}"
    return Identity(endpoint, response_id, request_id, int(time.time()))
