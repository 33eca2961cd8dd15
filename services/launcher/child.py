"""One child process: starting it so that it cannot outlive us, its ready line, its output, its end.

Owns a single run of a process; when to run it again is the supervisor's business.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from biphase.children import dies_with_parent

# Longest output line that is passed on whole.
_MAX_LINE_BYTES = 1 << 20
# What a child prints before it is ready is held this long: if it ends, those lines are the reason.
_HELD_SECONDS = 2.0

# Exit code of a process that cannot use its settings or its model.
REFUSED = 2

# What a ready child said about itself: {"node_id", "role", "pid", "address", ...}.
ReadyLine = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. Children of one `start_stage` start together; of one `stop_stage`, end together; lowest first."""

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str] = field(default_factory=dict)
    start_stage: int = 0
    stop_stage: int = 0


@dataclass(frozen=True, slots=True)
class Exit:
    """How a run ended. `status` as in subprocess: an exit code, or minus a signal number."""

    status: int
    # Last lines printed that were no log events, oldest first.
    last_words: tuple[str, ...]

    def __str__(self) -> str:
        if self.status >= 0:
            return f"exit code {self.status}"
        with suppress(ValueError):
            return f"killed by {signal.Signals(-self.status).name}"
        return f"killed by signal {-self.status}"


# Called with (child name, line without its end) for every line a child prints.
OnLine = Callable[[str, str], None]
# Says of a line whether it is a log event of ours (and so stands for itself).
IsEvent = Callable[[str], bool]


class Child:
    """A running process. `ready` resolves with its ready line, or with None when it ended before; then see `exited`."""

    def __init__(self, spec: ChildSpec, on_line: OnLine, is_event: IsEvent) -> None:
        self.spec = spec
        self.ready: asyncio.Future[ReadyLine | None] = asyncio.get_running_loop().create_future()
        self._on_line = on_line
        self._is_event = is_event
        self._held: list[str] = []
        self._last_words: list[str] = []
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    async def start(self) -> None:
        """Starts the process. Call from the main thread: the child ends when the thread that made it ends."""
        read_fd, write_fd = os.pipe()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                "--ready-fd",
                str(write_fd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=dict(self.spec.environ),
                pass_fds=(write_fd,),
                # A process group of its own: Ctrl-C reaches the launcher alone, which ends the rest in order.
                process_group=0,
                preexec_fn=dies_with_parent(),
                limit=_MAX_LINE_BYTES,
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
        self._tasks = [asyncio.create_task(self._read_ready(read_fd)), asyncio.create_task(self._read_output())]

    async def exited(self) -> Exit:
        """Waits for the end of the process and of its output."""
        assert self._process is not None, "not started"
        status = await self._process.wait()
        # A grandchild may hold the pipes open; do not wait for it for long.
        _, pending = await asyncio.wait(self._tasks, timeout=1.0)
        for task in pending:
            task.cancel()
        if not self.ready.done():
            self.ready.set_result(None)
        held, self._held = self._held, []
        # A last sentence and exit code 2 is how a service refuses its settings: the supervisor says it, once. One that
        # was told to end while it started has nothing to add: it was refusing for the same reason as another.
        for line in held[:-1] if status in (REFUSED, -signal.SIGTERM) else held:
            self._on_line(self.spec.name, line)
        return Exit(status, tuple(self._last_words[-20:]))

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    def terminate(self) -> None:
        """Asks it to drain and end. Does nothing when it does not run."""
        self._signal(signal.SIGTERM)
        # A stopped process handles no signal until it is continued.
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        """Ends it and what it has started, now. Does nothing when it does not run."""
        if self.running:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self.running:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _read_ready(self, fd: int) -> None:
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", buffering=0)
        )
        try:
            line = await reader.readline()
            with suppress(ValueError):
                self._set_ready(json.loads(line) if line.strip() else None)
        finally:
            transport.close()

    def _set_ready(self, line: Any) -> None:
        if isinstance(line, dict) and not self.ready.done():
            self.ready.set_result(line)
            self._release_held()

    async def _read_output(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        while True:
            try:
                raw = await self._process.stdout.readline()
            except ValueError:
                # Longer than the limit: asyncio has dropped it; the output goes on behind it.
                continue
            if not raw:
                return
            self._take(raw.decode(errors="replace").rstrip("\r\n"))

    def _take(self, line: str) -> None:
        if self._is_event(line):
            self._release_held()
            self._on_line(self.spec.name, line)
        elif line.strip():
            self._last_words = [*self._last_words[-19:], line]
            if self.ready.done():
                self._on_line(self.spec.name, line)
            else:
                self._held.append(line)
                asyncio.get_running_loop().call_later(_HELD_SECONDS, self._release_held)

    def _release_held(self) -> None:
        held, self._held = self._held, []
        for line in held:
            self._on_line(self.spec.name, line)
