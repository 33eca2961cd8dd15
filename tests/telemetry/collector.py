"""An OTLP collector in this process: takes spans over HTTP and keeps them."""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

# (service.name, span)
Received = tuple[str, Any]


class Collector:
    def __init__(self) -> None:
        self._received: list[Received] = []
        received = self._received

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    known = {pair.key: pair.value.string_value for pair in resource.resource.attributes}
                    for scope in resource.scope_spans:
                        received.extend((known["service.name"], span) for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def trace(self, trace_id: str, wanted: set[str], seconds: float = 20.0) -> list[Received]:
        """A trace's spans, once the wanted names are among them."""
        deadline = time.monotonic() + seconds
        while True:
            found = [(service, span) for service, span in list(self._received) if span.trace_id.hex() == trace_id]
            names = {span.name for _, span in found}
            if wanted <= names:
                return found
            assert time.monotonic() < deadline, f"missing {wanted - names}, there are {names}"
            time.sleep(0.05)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
