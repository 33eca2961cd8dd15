"""`biphase drain` against an HTTP server that answers like a gateway."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from biphase.errors import UnauthorizedError, UnavailableError
from services.launcher import drain

GATEWAY = {"id": "gateway-0", "incarnation": "g", "state": "ready"}
NODE = {"id": "decode-0", "incarnation": "d", "state": "ready"}


@dataclass
class Told:
    """A gateway that asks for keys. Each look at /status after the drain takes one of `looks`; the last one stays."""

    url: str = ""
    looks: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    num_looks: int = 0
    drained: list[str] = field(default_factory=list)
    # Called once the answer to /drain is out.
    on_drain: Callable[[], None] = lambda: None


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    monkeypatch.setattr(drain, "_LOOK_SECONDS", 0.01)
    state = Told()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != "Bearer client":
                self.answer(401, {})
            elif not state.drained:
                self.answer(200, {"gateway": GATEWAY, "nodes": [NODE]})
            else:
                state.num_looks += 1
                code, nodes = state.looks.pop(0) if len(state.looks) > 1 else state.looks[0]
                self.answer(code, {"gateway": GATEWAY, "nodes": nodes})

        def do_POST(self) -> None:
            assert self.headers.get("Authorization") == "Bearer admin"
            node = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["node"]
            state.drained.append(node)
            found = next(one for one in (GATEWAY, NODE) if one["id"] == node)
            self.answer(200, {"node": node, "incarnation": found["incarnation"], "state": "draining"})
            state.on_drain()

        def answer(self, code: int, body: dict[str, Any]) -> None:
            raw = json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}"

    def stop() -> None:
        server.shutdown()
        server.server_close()

    state.on_drain = lambda: stop() if state.drained[-1] == "gateway-0" else None
    yield state
    stop()
    thread.join()


def drained(told: Told, node: str, *more: str) -> int:
    return drain.main([node, "--url", told.url, "--admin-key", "admin", *more])


def test_looks_with_an_api_key_until_the_node_has_gone(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    told.looks = [(200, [{**NODE, "state": "draining"}]), (200, [NODE]), (200, [])]
    assert drained(told, "decode-0", "--api-key", "client") == 0
    assert told.num_looks == 3 and capsys.readouterr().out == "decode-0 has gone\n"


def test_says_that_it_may_not_look_before_anything_is_drained(told: Told) -> None:
    with pytest.raises(UnauthorizedError, match="BIPHASE_API_KEY"):
        drained(told, "decode-0")
    assert told.drained == []
    assert drained(told, "decode-0", "--wait", "false") == 0 and told.drained == ["decode-0"]


def test_a_gateway_in_trouble_does_not_mean_that_the_node_has_gone(told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    told.looks = [(503, []), (500, []), (200, [NODE]), (503, []), (200, [])]
    assert drained(told, "decode-0", "--api-key", "client") == 0 and told.num_looks == 5
    monkeypatch.setattr(drain, "_PATIENCE_SECONDS", 0.0)
    told.looks, told.drained[:] = [(503, [])], []
    with pytest.raises(UnavailableError):
        drained(told, "decode-0", "--api-key", "client")


def test_a_gateway_that_drains_itself_has_gone_when_nobody_listens(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    told.looks = [(503, [])]
    assert drained(told, "gateway-0", "--api-key", "client") == 0
    assert capsys.readouterr().out == "gateway-0 has gone\n"
