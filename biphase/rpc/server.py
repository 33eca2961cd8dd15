"""A process's gRPC server: starting on a port, standard health service, stopping gracefully."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from biphase.errors import ConfigError
from biphase.rpc.carrying import RequestCarrier
from biphase.rpc.trust import OPEN, Trust

_OPTIONS = (
    # Without it two processes given the same port would both get it, and each half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 64 * 2**20),
    ("grpc.max_send_message_length", 64 * 2**20),
    # A caller that froze or cannot be reached is not worth working for.
    ("grpc.keepalive_time_ms", 5_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Whoever connects and says nothing is gone after this; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
)

Registration = Callable[[grpc.aio.Server], None]


def reachable_host(host: str) -> str:
    """The host that peers use for what listens on `host`: where that is a wildcard, this machine's address.

    The address rather than the name, since a container's name means nothing to most others; the name where it stands
    for loopback only, as Debian's /etc/hosts has it, in the hope that peers know it better.
    """
    if host not in ("0.0.0.0", "::", "[::]"):
        return host
    name = socket.gethostname()
    family = socket.AF_INET if host == "0.0.0.0" else socket.AF_UNSPEC
    try:
        found = socket.getaddrinfo(name, None, family, socket.SOCK_STREAM)
    except OSError:
        return name
    for *_, address in found:
        ip = ipaddress.ip_address(str(address[0]).partition("%")[0])
        if not (ip.is_loopback or ip.is_link_local):
            return str(ip)
    return name


def join_address(host: str, port: int) -> str:
    """ "host:port", with brackets around an IPv6 address that has none yet."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


class RpcServer:
    """One gRPC server with health checking. `set_serving` is what load balancers and probes see."""

    def __init__(self, server: grpc.aio.Server, health: HealthServicer, address: str) -> None:
        self._server = server
        self._health = health
        # "host:port" as peers reach it.
        self.address = address

    @classmethod
    async def start(
        cls,
        host: str,
        port: int,
        registrations: Sequence[Registration],
        *,
        advertise_host: str = "",
        trust: Trust = OPEN,
    ) -> RpcServer:
        """Opens the port and serves; health says NOT_SERVING until `set_serving(True)`.

        Args:
            port: 0 takes a free one.
            registrations: each adds one servicer, for example
                `lambda server: add_DecodeServicer_to_server(servicer, server)`.
            advertise_host: the address peers use when `host` is a wildcard.
            trust: what callers have to show, of every method and health checks too.

        Raises:
            ConfigError: the port is taken or the address is not ours.
        """
        server = grpc.aio.server(interceptors=(*trust.interceptors(), RequestCarrier()), options=_OPTIONS)
        health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        for register in registrations:
            register(server)
        try:
            bound = trust.add_port(server, join_address(host, port))
        except RuntimeError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: it is taken or not an address of this host") from error
        if bound == 0:
            raise ConfigError(f"cannot listen on {host}:{port}: it is taken or not an address of this host")
        await server.start()
        rpc = cls(server, health, join_address(advertise_host or reachable_host(host), bound))
        await rpc.set_serving(False)
        return rpc

    async def set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuses new calls at once and gives running ones `grace_seconds` to end."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_seconds)
