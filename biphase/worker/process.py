"""The life of a worker process: settings, model, ports, ready, drain, exit code.

Exit codes: 0 after a drain; 2 when settings or model cannot be used (one sentence on stderr, no port was opened);
1 for anything else.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence

from biphase.errors import BiphaseError, ConfigError, ModelLoadError
from biphase.index.registry import default_node_id
from biphase.rpc.server import Registration
from biphase.rpc.trust import require_fence, trust_of
from biphase.settings import parse_flags
from biphase.telemetry import events, tracing
from biphase.worker.core import WorkerCore, build_core
from biphase.worker.settings import WORKER_FLAGS, WorkerSettings
from biphase.worker.worker import Worker

log = events.event_logger(__name__)

# Registers the role's own servicer on the server of a worker.
RoleServicer = Callable[[Worker], Registration]


def run_worker(role: str, servicer: RoleServicer, argv: Sequence[str] | None = None) -> int:
    """Runs a worker until it is told to stop. Returns the exit code."""
    description = {
        "prefill": "Reads prompts and lets decode workers read their KV blocks.",
        "decode": "Generates tokens; asks prefill workers for prompts' KV, or prefills itself.",
    }[role]
    try:
        settings = parse_flags(f"biphase {role}", description, WORKER_FLAGS, WorkerSettings, argv)
        events.configure(settings.node_id or role, log_format=settings.log_format, level=settings.log_level)
        tracing.configure(role, settings.node_id or default_node_id(role), settings.otlp_endpoint)
        require_fence(trust_of(settings), settings.host, settings.insecure)
        core = build_core(settings, role)
        asyncio.run(_serve(role, settings, core, servicer))
    except (ConfigError, ModelLoadError) as error:
        print(f"biphase {role}: {error.message}", file=sys.stderr)
        return 2
    except BiphaseError as error:
        print(f"biphase {role}: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _serve(role: str, settings: WorkerSettings, core: WorkerCore, servicer: RoleServicer) -> None:
    worker = Worker(role, settings, core)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.request_stop)
    await worker.start(servicer(worker))
    announce_ready(settings.ready_fd, worker)
    await worker.run_until_stopped()
    if worker.failure is not None:
        raise worker.failure


def announce_ready(ready_fd: int | None, worker: Worker) -> None:
    """Says that the worker serves: one log line, and one JSON line to whoever started us."""
    info = worker.identity.info()
    line = {
        "node_id": info.node_id,
        "role": info.role,
        "pid": info.pid,
        "address": info.address,
        "incarnation": info.incarnation,
        "model": info.model.model,
        "dtype": info.model.dtype,
        "num_blocks": info.num_blocks,
        "block_bytes": info.layout.block_bytes,
        "max_model_len": info.model.max_model_len_tokens,
        "transports": list(info.endpoint.transports),
    }
    log.info("ready", **line)
    if ready_fd is not None:
        os.write(ready_fd, json.dumps(line).encode() + b"\n")
        os.close(ready_fd)
