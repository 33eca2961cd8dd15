"""Whom a process believes: what its settings say about token and TLS, in the form that servers and channels use.

Owns the rule that a worker or store does not listen for others with neither. See docs/adr for why both exist.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from biphase.errors import ConfigError
from biphase.rpc.guard import CallGuard, proving
from biphase.rpc.metadata import MetadataChannel
from biphase.rpc.tls import Tls
from biphase.rpc.token import ServiceToken
from biphase.settings import TrustSettings
from biphase.telemetry.events import event_logger

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Trust:
    """What is shown to peers and asked of them; both None: anybody who gets through is believed."""

    token: ServiceToken | None = None
    tls: Tls | None = None

    def interceptors(self) -> tuple[grpc.aio.ServerInterceptor, ...]:
        return () if self.token is None else (CallGuard(self.token),)

    def add_port(self, server: grpc.aio.Server, address: str) -> int:
        """Opens "host:port" on a server that is not started. Returns the port.

        Raises:
            RuntimeError: it is taken.
        """
        if self.tls is None:
            return int(server.add_insecure_port(address))
        return int(server.add_secure_port(address, self.tls.server_credentials()))

    def aio_channel(self, address: str, options: tuple[tuple[str, Any], ...]) -> Any:
        if self.tls is None:
            channel = grpc.aio.insecure_channel(address, options=options)
        else:
            options = (*options, *self.tls.channel_options())
            channel = grpc.aio.secure_channel(address, self.tls.channel_credentials(), options=options)
        return channel if self.token is None else MetadataChannel(channel, proving(self.token))

    def blocking_channel(self, address: str) -> Any:
        """For short-lived callers without an event loop. Has to be closed."""
        if self.tls is None:
            channel = grpc.insecure_channel(address)
        else:
            channel = grpc.secure_channel(address, self.tls.channel_credentials(), options=self.tls.channel_options())
        return channel if self.token is None else MetadataChannel(channel, proving(self.token))


# Anybody may come: tests, and processes that listen on loopback and were given nothing.
OPEN = Trust()


def trust_of(settings: TrustSettings) -> Trust:
    """
    Raises:
        ConfigError: a file that cannot be read or used, or settings that contradict each other.
    """
    token = None
    if text := _token_text(settings):
        token = ServiceToken(text)
    tls = None
    if settings.tls_cert or settings.tls_key or settings.tls_ca:
        tls = Tls.read(settings.tls_cert, settings.tls_key, settings.tls_ca, settings.tls_name)
    return Trust(token, tls)


def require_fence(trust: Trust, host: str, insecure: bool) -> None:
    """Refuses to listen for others with neither token nor TLS, unless that was asked for in so many words.

    Raises:
        ConfigError: the address can be reached from elsewhere and nothing keeps anybody out.
    """
    if trust.token is not None or trust.tls is not None or is_loopback(host):
        return
    if not insecure:
        raise ConfigError(
            f"listening on {host} with neither a service token nor TLS would let everybody in: set "
            "BIPHASE_SERVICE_TOKEN to one secret for the whole cluster, or --insecure if the network keeps others out"
        )
    log.warning("listening_insecurely", host=host, why="--insecure, with neither service token nor TLS")


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine reach what listens there. Names other than localhost count as not."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _token_text(settings: TrustSettings) -> str:
    if not settings.service_token_file:
        return settings.service_token.strip()
    if settings.service_token:
        raise ConfigError("--service-token and --service-token-file are two ways to say the same: give one")
    try:
        text = Path(settings.service_token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"--service-token-file: cannot read {settings.service_token_file}: {reason}") from error
    if not text:
        raise ConfigError(f"--service-token-file: {settings.service_token_file} is empty")
    return text
