"""Starts the whole of biphase as its users do, `biphase serve`, and tears it down again."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from biphase.children import dies_with_parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Stack:
    """One running `biphase serve`. Everything it prints is in `log_path`."""

    def __init__(self, flags: Sequence[str], environ: dict[str, str] | None = None) -> None:
        self.port = free_port()
        # What a test's parameter made of it, for the test's own use.
        self.mode = ""
        self.base_url = f"http://127.0.0.1:{self.port}"
        self._log_dir = tempfile.TemporaryDirectory(prefix="biphase-e2e-")
        self.log_path = Path(self._log_dir.name) / "serve.log"
        self._log = self.log_path.open("wb")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "services.launcher.cli", "serve", "--port", str(self.port), *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environ or {})},
            start_new_session=True,
            # Its own children die with it.
            preexec_fn=dies_with_parent(),
        )

    def wait_ready(self, timeout_seconds: float = 120.0) -> None:
        """Returns when /status shows every pool ready."""
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"serve exited with {self.process.returncode}:\n{self.log()}")
            with contextlib.suppress(OSError):
                if self.get("/health", raw=True) is not None:
                    return
            time.sleep(0.2)
        raise AssertionError(f"not ready after {timeout_seconds} s:\n{self.log()}")

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def get(self, path: str, *, raw: bool = False) -> Any:
        with urllib.request.urlopen(self.base_url + path, timeout=30) as answer:
            body = answer.read()
        return body if raw else json.loads(body)

    def post(self, path: str, body: dict[str, Any], timeout_seconds: float = 180.0) -> Any:
        request = urllib.request.Request(
            self.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout_seconds) as answer:
            return json.loads(answer.read())

    def status(self) -> Any:
        return self.get("/status")

    def nodes(self, role: str) -> list[dict[str, Any]]:
        return [node for node in self.status()["nodes"] if node["role"] == role]

    def stop(self, timeout_seconds: float = 60.0) -> int:
        """SIGTERM, then the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_seconds)
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self._log.close()

    def cleanup(self) -> None:
        self.close()
        self._log_dir.cleanup()


@contextlib.contextmanager
def running_stack(*flags: str, environ: dict[str, str] | None = None) -> Iterator[Stack]:
    """A stack that is ready; stopped, and its log shown when the test fails, at the end."""
    stack = Stack(flags, environ)
    try:
        stack.wait_ready()
        yield stack
    except BaseException:
        print(f"---- log of biphase serve {' '.join(flags)}\n{stack.log()[-20_000:]}")
        raise
    finally:
        stack.close()
        stack.cleanup()
