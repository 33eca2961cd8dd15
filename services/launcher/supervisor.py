"""Keeps a set of child processes running: ordered start, restart with back-off, ordered end.

Owns when a child runs. Knows nothing of what the children are; `plan` decides that. A child's states:

    (start) -> STARTING -> READY -> ended -> wait(back-off) -> STARTING ...      until stop() or kill()

While the whole is starting, a child that refuses its settings (exit code 2), or that fails `max_start_failures` times,
ends the start. Later the same child is tried for ever, ever slower: what else runs still serves.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from biphase.errors import BiphaseError, ConfigError, UnavailableError
from biphase.telemetry.events import event_logger
from services.launcher.child import REFUSED, Child, ChildSpec, Exit, ReadyLine
from services.launcher.output import ChildOutput

log = event_logger(__name__)

_PROGRAM = re.compile(r"^biphase \w+: (error: )?")


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """All times in seconds."""

    first_wait_seconds: float = 0.5
    max_wait_seconds: float = 30.0
    # A child that was ready this long starts again at the first wait.
    forgiven_after_seconds: float = 60.0
    # A child that is not ready after this is ended and counts as failed.
    start_timeout_seconds: float = 600.0
    max_start_failures: int = 3

    def wait_seconds(self, failures: int) -> float:
        """How long to wait after so many failures in a row (at least 1)."""
        return min(self.first_wait_seconds * 2.0 ** min(failures - 1, 100), self.max_wait_seconds)


class _Keeper:
    """One child over all its runs."""

    def __init__(self, spec: ChildSpec, supervisor: Supervisor) -> None:
        self.spec = spec
        self.supervisor = supervisor
        self.child: Child | None = None
        self.num_restarts = 0
        # Resolves with the first ready line, or with the error that ends the start. (A result, not an exception: when
        # several children fail, only the first error is looked at.)
        self.first_ready: asyncio.Future[ReadyLine | BiphaseError] = asyncio.get_running_loop().create_future()

    async def run(self) -> None:
        policy = self.supervisor.policy
        failures = 0
        while not self.supervisor.stopping:
            started = time.monotonic()
            outcome = await self._run_once()
            if self.supervisor.stopping:
                return
            failures = 1 if time.monotonic() - started > policy.forgiven_after_seconds else failures + 1
            if not self.first_ready.done() and (outcome.status == REFUSED or failures >= policy.max_start_failures):
                self.first_ready.set_result(_start_error(self.spec.name, outcome, failures))
                return
            wait = policy.wait_seconds(failures)
            self.num_restarts += 1
            log.warning(
                "child_restarting",
                child=self.spec.name,
                ended=str(outcome),
                restarts=self.num_restarts,
                wait_seconds=wait,
                **({"reason": outcome.last_words[-1]} if outcome.last_words else {}),
            )
            with suppress(TimeoutError):
                await asyncio.wait_for(self.supervisor.stop_requested.wait(), wait)

    async def _run_once(self) -> Exit:
        """One run of the process, from start to end."""
        self.child = child = Child(self.spec, self.supervisor.output.write, self.supervisor.output.is_event)
        try:
            await child.start()
        except OSError as error:
            self.child = None
            return Exit(127, (f"cannot start {self.spec.argv[0]}: {error.strerror or error}",))
        if self.supervisor.stopping:
            child.terminate()
        exited = asyncio.create_task(child.exited())
        try:
            either: set[asyncio.Future[Any]] = {child.ready, exited}
            timeout = self.supervisor.policy.start_timeout_seconds
            await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not any(future.done() for future in either):
                log.error("child_start_timeout", child=self.spec.name, timeout_seconds=timeout)
                child.kill()
            elif (line := child.ready.result() if child.ready.done() else None) is not None:
                if not self.first_ready.done():
                    self.first_ready.set_result(line)
                log.info("child_ready", child=self.spec.name, pid=child.pid, restarts=self.num_restarts)
            return await exited
        finally:
            self.child = None
            exited.cancel()


class Supervisor:
    """Runs the children of `specs`. Use from one event loop, in the main thread."""

    def __init__(self, specs: Sequence[ChildSpec], output: ChildOutput, policy: RestartPolicy | None = None) -> None:
        assert len({spec.name for spec in specs}) == len(specs), "names must differ"
        self.policy = policy or RestartPolicy()
        self.output = output
        self.stop_requested = asyncio.Event()
        self._keepers = [_Keeper(spec, self) for spec in specs]
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def stopping(self) -> bool:
        return self.stop_requested.is_set()

    def pids(self) -> dict[str, int]:
        """Name -> process id of the children that run now."""
        return {keeper.spec.name: keeper.child.pid for keeper in self._keepers if keeper.child and keeper.child.running}

    def num_restarts(self) -> int:
        return sum(keeper.num_restarts for keeper in self._keepers)

    async def start(self) -> Mapping[str, ReadyLine]:
        """Starts stage after stage and returns every child's ready line by name.

        Raises:
            ConfigError: a child refused its settings (exit code 2); the message is its sentence.
            UnavailableError: a child failed too often; the message carries its last words.
        """
        lines: dict[str, ReadyLine] = {}
        for stage in sorted({keeper.spec.start_stage for keeper in self._keepers}):
            keepers = [keeper for keeper in self._keepers if keeper.spec.start_stage == stage]
            for keeper in keepers:
                self._tasks[keeper.spec.name] = asyncio.create_task(keeper.run(), name=keeper.spec.name)
            names = {keeper.first_ready: keeper.spec.name for keeper in keepers}
            waiting = set(names)
            while waiting:
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for future in done:
                    outcome = future.result()
                    if isinstance(outcome, BiphaseError):
                        raise outcome
                    lines[names[future]] = outcome
        return lines

    async def stop(self, timeout_seconds: float) -> bool:
        """Ends the children in the order of their stop stages: SIGTERM, then after the time SIGKILL.

        Args:
            timeout_seconds: for each stage.

        Returns:
            False when some child had to be killed.
        """
        self.stop_requested.set()
        clean = True
        for stage in sorted({keeper.spec.stop_stage for keeper in self._keepers}):
            keepers = [keeper for keeper in self._keepers if keeper.spec.stop_stage == stage]
            for keeper in keepers:
                if keeper.child is not None:
                    keeper.child.terminate()
            tasks = [task for keeper in keepers if (task := self._tasks.get(keeper.spec.name)) is not None]
            if not tasks:
                continue
            _, pending = await asyncio.wait(tasks, timeout=timeout_seconds)
            if pending:
                clean = False
                for keeper in keepers:
                    if keeper.child is not None:
                        log.error("child_killed", child=keeper.spec.name, after_seconds=timeout_seconds)
                        keeper.child.kill()
                await asyncio.wait(pending)
        return clean

    async def kill(self) -> None:
        """Ends every child at once, whatever it is doing."""
        self.stop_requested.set()
        for keeper in self._keepers:
            if keeper.child is not None:
                keeper.child.kill()
        if self._tasks:
            await asyncio.wait(self._tasks.values())


def _start_error(name: str, outcome: Exit, failures: int) -> BiphaseError:
    # Services begin with their own name ("biphase decode: "), and whoever prints this says "biphase" again.
    words = _PROGRAM.sub("", outcome.last_words[-1]) if outcome.last_words else ""
    if outcome.status == REFUSED and words:
        return ConfigError(words)
    detail = f": {words}" if words else ""
    times = f" {failures} times" if failures > 1 else ""
    return UnavailableError(f"{name} did not start{times} ({outcome}){detail}")
