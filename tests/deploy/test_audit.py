"""The dependency audit finds what it is for, and says so when it could not look."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

AUDIT = Path(__file__).parents[2] / ".ci" / "audit.py"


class _Osv(BaseHTTPRequestHandler):
    """Answers as osv.dev does; knows one weakness."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["queries"]
        weak = {"vulns": [{"id": "GHSA-test"}]}
        body = json.dumps({"results": [weak if q["package"]["name"] == "jinja2" else {} for q in asked]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def osv() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), _Osv)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def audit(url: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {"PATH": "/usr/bin:/bin", "BIPHASE_OSV_URL": url, **environ}
    return subprocess.run([sys.executable, str(AUDIT)], capture_output=True, text=True, env=environ, timeout=60)


def test_an_advisory_fails_the_check(osv: str) -> None:
    done = audit(osv)
    assert done.returncode == 1 and "GHSA-test" in done.stderr and "jinja2" in done.stderr


def test_nobody_to_ask_is_said_and_may_be_an_error() -> None:
    done = audit("http://127.0.0.1:9/")
    assert done.returncode == 0 and "WERE NOT CHECKED" in done.stderr
    assert audit("http://127.0.0.1:9/", BIPHASE_AUDIT="require").returncode == 1
