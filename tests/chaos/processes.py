"""Processes that can be killed, frozen, thawed and started again under the same address.

Owns one process and its log. Every process dies with the thread that started it: start from the main thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from biphase.children import dies_with_parent


class ServiceProcess:
    """`python -m services.<role> ...`, as often as needed, always with the same arguments."""

    def __init__(self, name: str, role: str, flags: Sequence[str], log_path: Path, prefix: Sequence[str] = ()) -> None:
        self.name = name
        self.role = role
        self.log_path = log_path
        self.num_lives = 0
        self.frozen = False
        self._ready = False
        self.argv = (*prefix, sys.executable, "-m", f"services.{role}", "--node-id", name, *flags)
        self._process: subprocess.Popen[bytes] | None = None
        self._ready_fd: int | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """Of the last life; None while it lasts."""
        return None if self._process is None else self._process.poll()

    def start(self) -> None:
        """Starts it, without waiting for it."""
        assert not self.running
        self._close_fd()
        self._ready_fd, write_fd = os.pipe()
        environ = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "PASSIVE",
            "GRPC_VERBOSITY": "ERROR",
            "TOKENIZERS_PARALLELISM": "false",
        }
        with self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*self.argv, "--ready-fd", str(write_fd)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(write_fd,),
                env=environ,
                process_group=0,
                preexec_fn=dies_with_parent(),
            )
        os.close(write_fd)
        self.num_lives += 1
        self.frozen = self._ready = False

    @property
    def ready(self) -> bool:
        """Whether it has said so in this life. Frozen or dead later, it stays true."""
        if self._ready or self._ready_fd is None:
            return self._ready
        if not select.select([self._ready_fd], [], [], 0)[0]:
            return False
        line = os.read(self._ready_fd, 65536)
        self._close_fd()
        if not line:
            raise AssertionError(f"{self.name} ended while it started:\n{self.log()[-3000:]}")
        assert json.loads(line)["node_id"] == self.name
        self._ready = True
        return True

    def wait_ready(self, seconds: float = 60.0) -> None:
        deadline = time.monotonic() + seconds
        while not self.ready:
            assert time.monotonic() < deadline, f"{self.name} was not ready in {seconds} s:\n{self.log()[-3000:]}"
            time.sleep(0.02)

    def kill(self) -> None:
        if self.running:
            self._signal(signal.SIGKILL)
            assert self._process is not None
            self._process.wait(10)

    def freeze(self) -> None:
        self.frozen = True
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.frozen = False
        self._signal(signal.SIGCONT)

    def stop(self, seconds: float = 10.0) -> None:
        """SIGTERM, then SIGKILL."""
        if self._process is None:
            return
        if self.running:
            self._signal(signal.SIGCONT)
            self._signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
        self.kill()
        self._close_fd()

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def _close_fd(self) -> None:
        if self._ready_fd is not None:
            os.close(self._ready_fd)
            self._ready_fd = None
