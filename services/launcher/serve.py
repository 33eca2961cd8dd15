"""`biphase serve`: the whole stack on one machine, supervised.

Owns the order: settings and model first (whatever is wrong there is said before any port is opened), then the embedded
Valkey, the children, the table. The first SIGTERM or Ctrl-C drains and ends with 0; a second one ends everything now.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from biphase.errors import BiphaseError, UnavailableError
from biphase.index.embedded import EmbeddedValkey
from biphase.model.families import spec_of
from biphase.model.source import ModelSource, resolve_model
from biphase.rpc.trust import trust_of
from biphase.settings import Flag, parse_flags
from biphase.telemetry.events import configure, event_logger
from biphase.worker.capacity import available_memory_bytes
from services.launcher.banner import show_ready
from services.launcher.child import ReadyLine
from services.launcher.machine import num_cores, require_free_port
from services.launcher.output import ChildOutput
from services.launcher.plan import children
from services.launcher.settings import SERVE_FLAGS, ServeSettings
from services.launcher.sizing import size_kv_cache
from services.launcher.supervisor import RestartPolicy, Supervisor

log = event_logger(__name__)

_MODEL_FLAG = next(flag for flag in SERVE_FLAGS if flag.name == "model")
# A child gets this long beyond --drain-timeout before it is killed.
_DRAIN_GRACE_SECONDS = 5.0
_VALKEY_CHECK_SECONDS = 0.5
# Ready workers are known to the gateway this soon, or something is wrong.
_GATEWAY_HEALTH_SECONDS = 60.0


def parse_settings(argv: Sequence[str], environ: Mapping[str, str] | None = None) -> ServeSettings:
    """Raises ConfigError."""
    positional = Flag("model", str, "", _MODEL_FLAG.help)
    return parse_flags(
        "biphase serve",
        "Runs the whole stack on this machine: embedded Valkey, block store, prefill and decode workers, gateway.",
        SERVE_FLAGS,
        ServeSettings,
        argv,
        dict(environ) if environ is not None else None,
        positional=positional,
    )


def main(argv: Sequence[str]) -> int:
    """Runs until told to stop. Returns the exit code: 0 drained, 1 could not start or drain, 2 unusable settings."""
    started = time.monotonic()
    settings = parse_settings(argv)
    configure("launcher", log_format=settings.log_format, level=settings.log_level)
    trust_of(settings)
    source = resolve_model(settings.model)
    # Headers only, no weights; but an unknown architecture, a missing or a truncated file shows here.
    spec_of(source)
    source.tensors()
    require_free_port(settings.host, settings.port)
    return asyncio.run(_Serve(settings, source, started).run())


class _Serve:
    """One run of the stack."""

    def __init__(self, settings: ServeSettings, source: ModelSource, started: float) -> None:
        """
        Args:
            source: the model's files, known to be whole.
            started: when the command started, on the monotonic clock.
        """
        self._settings = settings
        self._source = source
        self._started = started
        self._valkey = None if settings.redis_url else EmbeddedValkey()
        self._signals: asyncio.Queue[signal.Signals] = asyncio.Queue()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        try:
            if self._valkey is not None:
                # In this thread on purpose: the server ends with the thread that started it.
                self._valkey.start()
            supervisor = self._supervisor()
            return await self._supervise(supervisor)
        finally:
            if self._valkey is not None:
                self._valkey.stop()

    def _supervisor(self) -> Supervisor:
        settings = self._settings
        weights_bytes = sum(file.stat().st_size for file in self._source.weight_files())
        sizing = size_kv_cache(settings, spec_of(self._source), weights_bytes, available_memory_bytes())
        if sizing.max_model_len != settings.max_model_len:
            log.warning(
                "max_model_len_cut",
                max_model_len=sizing.max_model_len,
                why="--kv-cache-bytes was not given, and a tenth of free memory holds no more",
            )
        settings = replace(settings, kv_cache_bytes=sizing.kv_cache_bytes, max_model_len=sizing.max_model_len)
        if not settings.service_token and not settings.service_token_file:
            # Other users of this machine can reach loopback too. Nobody but the children needs to know it.
            settings = replace(settings, service_token=secrets.token_urlsafe(32))
        num_threads = settings.num_threads or num_cores()
        specs = children(
            settings,
            redis_url=settings.redis_url or (self._valkey.url if self._valkey is not None else ""),
            num_threads=num_threads,
            environ=os.environ,
        )
        log.info(
            "starting",
            model=settings.model or self._source.default_served_name,
            processes=len(specs),
            kv_cache_mib_per_worker=sizing.kv_cache_bytes // 2**20,
            threads_per_worker=num_threads,
        )
        return Supervisor(specs, ChildOutput(settings.log_format), RestartPolicy())

    async def _supervise(self, supervisor: Supervisor) -> int:
        first_signal = asyncio.create_task(self._signals.get())
        start = asyncio.create_task(self._start(supervisor))
        watch = asyncio.create_task(self._watch_valkey())
        try:
            await asyncio.wait({first_signal, start}, return_when=asyncio.FIRST_COMPLETED)
            if start.done():
                # Raises what prevented the start.
                start.result()
            number = await first_signal
        except BiphaseError:
            await self._stop(supervisor)
            raise
        finally:
            start.cancel()
            watch.cancel()
        log.info("draining", signal=number.name, timeout_seconds=self._settings.drain_timeout)
        return await self._stop(supervisor)

    async def _start(self, supervisor: Supervisor) -> None:
        lines = await supervisor.start()
        gateway = lines["gateway-0"]
        await _wait_until_healthy(str(gateway["address"]))
        self._announce(lines)

    def _announce(self, lines: Mapping[str, ReadyLine]) -> None:
        seconds = time.monotonic() - self._started
        log.info("ready", seconds=seconds, address=lines["gateway-0"]["address"])
        show_ready(lines, self._settings, seconds, valkey=self._valkey, stream=sys.stdout)
        if self._settings.ready_fd is not None:
            line = {"role": "launcher", "pid": os.getpid(), "address": lines["gateway-0"]["address"]}
            with os.fdopen(self._settings.ready_fd, "w") as ready:
                ready.write(json.dumps(line) + "\n")

    async def _stop(self, supervisor: Supervisor) -> int:
        stop = asyncio.create_task(supervisor.stop(self._settings.drain_timeout + _DRAIN_GRACE_SECONDS))
        second_signal = asyncio.create_task(self._signals.get())
        await asyncio.wait({stop, second_signal}, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            second_signal.cancel()
            clean = stop.result()
            log.info("stopped", clean=clean)
            return 0 if clean else 1
        log.warning("killing", signal=second_signal.result().name)
        stop.cancel()
        await supervisor.kill()
        return 128 + second_signal.result()

    async def _watch_valkey(self) -> None:
        """Restarts the embedded server when it dies. It comes back empty; nodes register again by themselves."""
        while self._valkey is not None:
            await asyncio.sleep(_VALKEY_CHECK_SECONDS)
            if not self._valkey.running:
                log.warning("child_restarting", child="valkey")
                with suppress(UnavailableError):
                    self._valkey.restart()


async def _wait_until_healthy(address: str) -> None:
    """Waits until the gateway at host:port says that it can serve.

    Raises:
        UnavailableError: it does not, in time.
    """
    deadline = time.monotonic() + _GATEWAY_HEALTH_SECONDS
    while time.monotonic() < deadline:
        if await _is_healthy(address):
            return
        await asyncio.sleep(0.1)
    raise UnavailableError(f"the gateway at {address} sees no ready workers after {_GATEWAY_HEALTH_SECONDS:g} seconds")


async def _is_healthy(address: str) -> bool:
    # By hand and not with urllib in a thread: a process that forks does better without threads.
    host, _, port = address.rpartition(":")
    try:
        async with asyncio.timeout(5):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
            writer.write(f"GET /health HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
            status_line = await reader.readline()
            writer.close()
            return b" 200 " in status_line
    except OSError:
        return False
