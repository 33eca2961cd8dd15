"""`biphase status` against an HTTP server that answers like a gateway."""

from __future__ import annotations

import io
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from biphase.errors import UnauthorizedError, UnavailableError
from services.launcher import status

STATUS = {
    "gateway": {"id": "gateway-0", "role": "gateway", "state": "ready", "pid": 10, "address": "127.0.0.1:8000"},
    "nodes": [
        {"id": "prefill-0", "role": "prefill", "state": "ready", "pid": 11, "address": "127.0.0.1:4000",
         "blocks": {"total": 2048, "used": 3, "leased": 2}, "running": 1, "waiting": 4},
        {"id": "decode-0", "role": "decode", "state": "ready", "pid": 12, "address": "127.0.0.1:4001",
         "peers": [{"id": "prefill-0", "transport": "shm", "gigabytes_per_second": 9.96, "bytes_read": 3 << 20}]},
    ],
    "requests": [
        {"request_id": "cmpl-1", "prefill_mode": "remote", "prefill_node": "prefill-0", "transport": "shm",
         "num_cached_tokens": 16, "num_transferred_tokens": 112, "num_computed_tokens": 112},
    ],
}  # fmt: skip


@pytest.fixture
def gateway_url() -> Iterator[str]:
    """Answers /status to whoever has the key "sesame"; / with something else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            allowed = self.headers.get("Authorization") == "Bearer sesame"
            self.send_response(200 if allowed else 401)
            self.end_headers()
            body = STATUS if self.path == "/status" else {"hello": "world"}
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_json_is_the_gateways_own(gateway_url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status.main(["--json", "--url", gateway_url, "--api-key", "sesame"]) == 0
    assert json.loads(capsys.readouterr().out) == STATUS


def test_the_table_shows_nodes_and_requests() -> None:
    stream = io.StringIO()
    status.show(STATUS, stream)
    lines = stream.getvalue().splitlines()
    assert any(line.split()[:4] == ["prefill-0", "prefill", "ready", "11"] and "3 / 2,048" in line for line in lines)
    assert any(line.split()[:2] == ["cmpl-1", "remote"] and "shm" in line for line in lines)
    assert any(line.split() == ["prefill-0", "decode-0", "shm", "10.0", "3.0"] for line in lines)
    assert any(line.split()[:2] == ["gateway-0", "gateway"] for line in lines)


def test_a_missing_key_is_said(gateway_url: str) -> None:
    with pytest.raises(UnauthorizedError, match="BIPHASE_API_KEY"):
        status.fetch(gateway_url)


def test_nobody_there_is_said() -> None:
    with pytest.raises(UnavailableError, match=r"no gateway answers at http://127\.0\.0\.1:1 "):
        status.fetch("http://127.0.0.1:1")


def test_another_kind_of_server_is_said(gateway_url: str) -> None:
    with pytest.raises(UnavailableError, match="is no biphase gateway"):
        status.fetch(gateway_url + "/elsewhere", "sesame")
