"""A process's /metrics for Prometheus: a small HTTP server of its own, on threads of its own.

It answers GET /metrics and nothing else. No event loop and no step waits for it: what is collected is read without
locks that compute holds. Few callers at a time, each with little time for the whole of its call, so that nobody fills
the process with threads or keeps Prometheus out for long.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from socketserver import ThreadingMixIn
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from biphase.errors import ConfigError
from biphase.rpc.server import join_address, reachable_host
from biphase.telemetry.events import event_logger
from biphase.telemetry.settings import MetricsSettings

log = event_logger(__name__)

_CALL_SECONDS = 5.0
_MAX_CALLS = 4


class MetricsServer:
    """Listens from its making until `close`.

    Args:
        port: 0 takes a free one.

    Raises:
        ConfigError: the port is taken or the address is not ours.
    """

    def __init__(self, registry: CollectorRegistry, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        server_class = type("_Server", (_Server,), {"address_family": family})
        try:
            self._server: _Server = server_class((host.strip("[]"), port), _handler(registry))
        except OSError as error:
            raise ConfigError(f"cannot serve metrics on {host}:{port}: {error.strerror or error}") from error
        # "host:port", as others reach it where the host is a wildcard.
        self.address = join_address(reachable_host(host), int(self._server.server_address[1]))
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def serve_metrics(registry: CollectorRegistry, settings: MetricsSettings) -> MetricsServer | None:
    """Where and whether the settings say.

    Raises:
        ConfigError: as MetricsServer.
    """
    if settings.metrics_port is None:
        return None
    return MetricsServer(registry, settings.metrics_host, settings.metrics_port)


class _Server(ThreadingMixIn, HTTPServer):
    daemon_threads = True
    # Calls still running at the end are not waited for.
    block_on_close = False

    def __init__(self, *args: Any) -> None:
        self._places = threading.BoundedSemaphore(_MAX_CALLS)
        self._lock = threading.Lock()
        # Open calls, and when their time is over, monotonic seconds.
        self._deadlines: dict[socket.socket, float] = {}
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._deadlines[request] = time.monotonic() + _CALL_SECONDS
        try:
            super().process_request(request, client_address)
        except BaseException:
            # No thread could be started.
            self._left(request)
            raise

    def service_actions(self) -> None:
        """Every half a second: ends overdue calls. A socket's own timeout begins anew with each byte."""
        now = time.monotonic()
        with self._lock:
            for request, deadline in self._deadlines.items():
                if now > deadline:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._left(request)

    def shutdown_request(self, request: Any) -> None:
        # Before its number may be another file's.
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def _left(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A caller that went away is nobody's business; anything else is a fault of ours."""
        if not isinstance(sys.exception(), OSError):
            log.exception("metrics_call_failed")


def _handler(registry: CollectorRegistry) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = _CALL_SECONDS

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            try:
                body = generate_latest(registry)
            except Exception:
                # A scrape that is marked as failed, with a reason in the log, and not an empty answer.
                log.exception("metrics_not_collected")
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def version_string(self) -> str:
            return "biphase"

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler
