"""`biphase serve` with everything real but the services: run as a program by test_serve.

The first argument is the folder that the fakes leave their traces in; BROKEN in the environment replaces a fake.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from services.launcher import cli, serve
from services.launcher.child import ChildSpec
from services.launcher.settings import ServeSettings
from tests.services.launcher.fake_children import DRAINS, IGNORES_SIGTERM, REFUSES, fake

GATEWAY = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
signal.signal(signal.SIGTERM, lambda *_: (append({trace!r}, 'gateway-0'), os._exit(0)))
server = HTTPServer(("127.0.0.1", {port}), Handler)
ready(role="gateway", address="127.0.0.1:%d" % server.server_port, served_names=["tiny"])
server.serve_forever()
"""


def main() -> int:
    trace = str(Path(sys.argv[1]) / "trace")
    stop_stages = {"decode-0": 1, "prefill-0": 1, "kvstore-0": 2}

    def children(settings: ServeSettings, *, redis_url: str, **_: Any) -> tuple[ChildSpec, ...]:
        (Path(sys.argv[1]) / "redis_url").write_text(redis_url)
        scripts = {name: DRAINS.format(trace=trace, name=name) for name in stop_stages}
        broken = os.environ.get("BROKEN", "")
        if broken == "refuses":
            scripts["decode-0"] = REFUSES
        elif broken == "hangs":
            scripts["decode-0"] = IGNORES_SIGTERM
        return (
            *(fake(name, script, stop_stage=stop_stages[name]) for name, script in scripts.items()),
            fake("gateway-0", GATEWAY.format(trace=trace, port=settings.port), start_stage=1),
        )

    serve.children = children  # type: ignore[attr-defined]
    return cli.main(["serve", *sys.argv[2:]])


if __name__ == "__main__":
    sys.exit(main())
