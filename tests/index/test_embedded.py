"""The embedded server: private, without a port, gone with its starter."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import redis

from biphase.errors import UnavailableError
from biphase.index import embedded
from biphase.index.embedded import EmbeddedValkey, sweep_stale_folders


def test_answers_on_a_private_socket_and_no_port(index_server: EmbeddedValkey) -> None:
    with redis.Redis.from_url(index_server.url) as client:
        assert client.set("a", "b")
        assert client.info("server")["tcp_port"] == 0
        assert client.config_get("save")["save"] == ""
    folder = index_server.socket_path.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(index_server.socket_path.stat().st_mode) == 0o700
    assert psutil.Process(index_server.pid).net_connections(kind="inet") == []


def test_stop_leaves_nothing(index_server: EmbeddedValkey) -> None:
    folder, pid = index_server.socket_path.parent, index_server.pid
    index_server.stop()
    assert not folder.exists()
    assert not psutil.pid_exists(pid)
    index_server.stop()


def test_stop_ends_a_paused_server(index_server: EmbeddedValkey) -> None:
    pid = index_server.pid
    os.kill(pid, signal.SIGSTOP)
    index_server.stop(timeout_seconds=2.0)
    assert not psutil.pid_exists(pid)


def test_restart_is_empty_at_the_same_url(index_server: EmbeddedValkey) -> None:
    url, pid = index_server.url, index_server.pid
    with redis.Redis.from_url(url) as client:
        client.set("a", "b")
        index_server.restart()
        assert index_server.url == url and index_server.pid != pid
        assert client.get("a") is None


def test_starts_again_after_a_crash(index_server: EmbeddedValkey) -> None:
    os.kill(index_server.pid, signal.SIGKILL)
    psutil.Process(index_server.pid).wait(5)
    assert not index_server.running
    index_server.start()
    assert index_server.running


def test_says_why_it_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "server_binary", lambda: Path("/bin/false"))
    server = EmbeddedValkey()
    with pytest.raises(UnavailableError, match="ended at once"):
        server.start()
    assert not server.running


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder in which sockets can be: their paths have 107 characters at most, and `tmp_path` is long already."""
    with tempfile.TemporaryDirectory(prefix="biphase-") as folder:
        yield Path(folder)


def test_dies_with_a_killed_starter(short_path: Path) -> None:
    program = (
        "import time; from biphase.index.embedded import EmbeddedValkey\n"
        "server = EmbeddedValkey(); server.start(); print(server.pid, server.socket_path, flush=True); time.sleep(60)"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(short_path)}
    )
    assert starter.stdout is not None
    pid, path = starter.stdout.readline().split()
    assert Path(path).exists() and path.startswith(str(short_path))
    starter.kill()
    starter.wait()
    starter.stdout.close()
    deadline = time.monotonic() + 5
    while Path(path).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not Path(path).exists()
    assert not psutil.pid_exists(int(pid)) or psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE
    # The empty folder is left to the next start.
    assert sweep_stale_folders(short_path) == 1
    assert list(short_path.iterdir()) == []


def test_a_server_that_still_listens_is_not_swept(index_server: EmbeddedValkey, short_path: Path) -> None:
    (short_path / "biphase-valkey-99999999-other").mkdir()
    (short_path / "biphase-valkey-99999999-ours").mkdir()
    os.link(index_server.socket_path, short_path / "biphase-valkey-99999999-ours" / "valkey.sock")
    assert sweep_stale_folders(short_path) == 1
    assert [folder.name for folder in short_path.iterdir()] == ["biphase-valkey-99999999-ours"]
