"""Mutual TLS between services: certificates from files, for gRPC and for the data plane.

Both sides show a certificate of one authority, which should sign for this cluster and nothing else. Pods have addresses
that no certificate can name beforehand, so every certificate carries one agreed DNS name instead of its address. Files
are read when the process starts: renew them by a rolling restart.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from biphase.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM texts, and the name that a called process's certificate must carry; "" for the address that is called."""

    cert: bytes
    key: bytes
    ca: bytes
    name: str
    # Of the data plane.
    server_context: ssl.SSLContext
    client_context: ssl.SSLContext

    def __repr__(self) -> str:
        return f"Tls(name={self.name!r})"

    @classmethod
    def read(cls, cert: str, key: str, ca: str, name: str) -> Tls:
        """
        Args:
            cert, key, ca: paths.

        Raises:
            ConfigError: a file cannot be read, or is no certificate, or not this key's.
        """
        paths = {"--tls-cert": cert, "--tls-key": key, "--tls-ca": ca}
        if missing := [flag for flag, path in paths.items() if not path]:
            raise ConfigError(f"mutual TLS needs --tls-cert, --tls-key and --tls-ca; {', '.join(missing)} is not given")
        texts = {}
        for flag, path in paths.items():
            try:
                texts[flag] = Path(path).read_bytes()
            except OSError as error:
                raise ConfigError(f"{flag}: cannot read {path}: {error.strerror or error}") from error
        return cls(
            cert=texts["--tls-cert"],
            key=texts["--tls-key"],
            ca=texts["--tls-ca"],
            name=name,
            server_context=_context(cert, key, ca, server=True),
            client_context=_context(cert, key, ca, server=False),
        )

    def server_credentials(self) -> grpc.ServerCredentials:
        return grpc.ssl_server_credentials([(self.key, self.cert)], self.ca, require_client_auth=True)

    def channel_credentials(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.key, self.cert)

    def channel_options(self) -> tuple[tuple[str, str], ...]:
        return (("grpc.ssl_target_name_override", self.name),) if self.name else ()


def _context(cert: str, key: str, ca: str, *, server: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_mode = ssl.CERT_REQUIRED
    if server:
        # A session ticket would be something that a holder says unasked.
        context.num_tickets = 0
    try:
        context.load_verify_locations(ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"--tls-ca: {ca} has no usable certificate: {_reason(error)}") from error
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise ConfigError(f"--tls-cert {cert} and --tls-key {key} are no usable pair: {_reason(error)}") from error
    return context


def _no_password() -> str:
    # Without it OpenSSL would ask at the terminal.
    raise ValueError("the key has a password")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or error)
