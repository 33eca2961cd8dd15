"""`python -m services.gateway`: the door for clients. Exit code 2 and one sentence when it cannot start."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence

import uvloop

from biphase.errors import ConfigError, ModelLoadError
from biphase.index.registry import default_node_id
from biphase.model.source import resolve_model
from biphase.settings import parse_flags
from biphase.telemetry import events, tracing
from biphase.tokenizer.loader import load_tokenizer
from services.gateway.app import build_app
from services.gateway.gateway import Gateway
from services.gateway.server import GatewayServer, make_server, open_socket
from services.gateway.settings import GATEWAY_FLAGS, GatewaySettings

log = events.event_logger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        settings = parse_flags(
            "gateway", "Serves the OpenAI API for biphase's workers.", GATEWAY_FLAGS, GatewaySettings, argv
        )
        events.configure(settings.node_id or "gateway", log_format=settings.log_format, level=settings.log_level)
        tracing.configure("gateway", settings.node_id or default_node_id("gateway"), settings.otlp_endpoint)
        source = resolve_model(settings.model)
        loaded = load_tokenizer(source, chat_template=settings.chat_template)
        names = settings.served_model_name or (source.default_served_name,)
        digest = source.tokenizer_digest() if settings.check_tokenizer else ""
        gateway = Gateway(settings, loaded, names, settings.model or source.default_served_name, digest)
        listener = open_socket(settings.host, settings.port)
    except (ConfigError, ModelLoadError) as error:
        print(f"gateway: {error.message}", file=sys.stderr)
        return 2
    host, port = listener.getsockname()[:2]
    gateway.address = f"{host}:{port}"
    server = make_server(build_app(gateway), gateway)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(server, gateway, listener))
    log.info("stopped")
    return 0


async def _serve(server: GatewayServer, gateway: Gateway, listener: object) -> None:
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))  # type: ignore[list-item]
    while not server.started and not serving.done():
        await asyncio.sleep(0.005)
    if server.started:
        _announce(gateway)
    await serving


def _announce(gateway: Gateway) -> None:
    """Says that the port is open: in the log, and to whoever started this process."""
    log.info("ready", address=gateway.address, model=gateway.model.names[0])
    if gateway.settings.ready_fd is not None:
        line = {
            "node_id": gateway.node_id,
            "role": "gateway",
            "pid": os.getpid(),
            "address": gateway.address,
            "incarnation": gateway.incarnation,
            "served_names": list(gateway.model.names),
        }
        with os.fdopen(gateway.settings.ready_fd, "w") as pipe:
            pipe.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
