"""Serving: the port, the signals, the drain."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import Generator

import uvicorn
from fastapi import FastAPI

from biphase.errors import ConfigError
from biphase.telemetry.events import event_logger
from services.gateway.gateway import Gateway

log = event_logger(__name__)

_BACKLOG = 2048


def open_socket(host: str, port: int) -> socket.socket:
    """
    Raises:
        ConfigError: the port is taken, or the address is not ours.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.strip("[]"), port))
        listener.listen(_BACKLOG)
    except (OSError, OverflowError) as error:
        listener.close()
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot listen on {host}:{port}: {reason}") from error
    listener.set_inheritable(False)
    return listener


class GatewayServer(uvicorn.Server):
    """uvicorn with our signals: the first drains, the second ends at once; the exit code is 0 after a drain."""

    def __init__(self, config: uvicorn.Config, gateway: Gateway) -> None:
        super().__init__(config)
        self._gateway = gateway
        gateway.begin_drain = self.begin_drain

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        try:
            yield
        finally:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)

    def _on_signal(self, number: int) -> None:
        name = signal.Signals(number).name
        if self.should_exit:
            log.warning("stopping_at_once", signal=name)
            self.force_exit = True
            return
        self.begin_drain(name)

    def begin_drain(self, why: str = "POST /drain") -> None:
        """No new connections and requests; those that run end, within --drain-timeout. Safe to call again."""
        if not self.should_exit:
            log.info("draining", why=why, running=self._gateway.dispatcher.num_running)
        self._gateway.draining = True
        self.should_exit = True


def make_server(app: FastAPI, gateway: Gateway) -> GatewayServer:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        lifespan="on",
        http="httptools",
        ws="none",
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, round(gateway.settings.drain_timeout)),
    )
    return GatewayServer(config, gateway)
