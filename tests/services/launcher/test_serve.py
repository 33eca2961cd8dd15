"""`biphase serve` as a process, with fake services: signals, exit codes, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.services.launcher.fake_children import is_running


class Serve:
    """One run. `stdout` holds the table, `stderr` the log."""

    def __init__(self, folder: Path, *flags: str, **environ: str) -> None:
        self.folder = folder
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._stdout = (folder / "stdout").open("w")
        self._stderr = (folder / "stderr").open("w")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.launcher.serve_with_fakes", str(folder), "--port", "0", *flags],
            stdout=self._stdout,
            stderr=self._stderr,
            env={**os.environ, "TMPDIR": str(self.temporary), **environ},
            start_new_session=True,
        )

    @property
    def stdout(self) -> str:
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self.folder / "stderr").read_text()

    def wait_ready(self) -> None:
        self.wait_for(lambda: "curl " in self.stdout)

    def wait_for(self, condition: object, seconds: float = 20.0) -> None:
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.02)

    def pids(self) -> dict[str, int]:
        """Service name -> process id, from the table."""
        return {name: int(pid) for name, pid in re.findall(r"^(\w+(?:-\d)?)\s+(\d+)\s", self.stdout, re.MULTILINE)}

    def end(self, *signals: signal.Signals) -> int:
        for number in signals:
            self.process.send_signal(number)
            time.sleep(0.3)
        return self.process.wait(20)

    def assert_nothing_left(self, pids: dict[str, int]) -> None:
        deadline = time.monotonic() + 5
        while any(is_running(pid) for pid in pids.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert [name for name, pid in pids.items() if is_running(pid)] == []
        assert list(self.temporary.iterdir()) == []

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(10)
        self._stdout.close()
        self._stderr.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    run = Serve(tmp_path)
    yield run
    run.close()


def exit_of(folder: Path, *flags: str, **environ: str) -> tuple[int, str]:
    """Exit code and stderr of a run that ends by itself."""
    run = Serve(folder, *flags, **environ)
    try:
        return run.process.wait(20), run.stderr
    finally:
        run.close()


def test_the_table_names_every_process_and_a_request_to_try(serve: Serve) -> None:
    serve.wait_ready()
    pids = serve.pids()
    assert pids.keys() == {"valkey", "kvstore-0", "prefill-0", "decode-0", "gateway-0"}
    assert all(is_running(pid) for pid in pids.values())
    assert '"model": "tiny"' in serve.stdout
    assert "\x1b" not in serve.stdout


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_in_order_and_leaves_nothing(serve: Serve, number: signal.Signals) -> None:
    serve.wait_ready()
    pids = serve.pids()
    assert serve.end(number) == 0
    order = (serve.folder / "trace").read_text().split()
    assert order[0] == "gateway-0"
    assert order[-1] == "kvstore-0"
    assert sorted(order[1:3]) == ["decode-0", "prefill-0"]
    serve.assert_nothing_left(pids)


def test_a_second_signal_kills_at_once(tmp_path: Path) -> None:
    run = Serve(tmp_path, BROKEN="hangs")
    try:
        run.wait_ready()
        pids = run.pids()
        started = time.monotonic()
        assert run.end(signal.SIGINT, signal.SIGINT) == 128 + signal.SIGINT
        assert time.monotonic() - started < 5
        run.assert_nothing_left(pids)
    finally:
        run.close()


def test_a_child_that_does_not_drain_is_killed_and_the_exit_code_says_so(tmp_path: Path) -> None:
    run = Serve(tmp_path, "--drain-timeout", "0.1", BROKEN="hangs")
    try:
        run.wait_ready()
        pids = run.pids()
        assert run.end(signal.SIGTERM) == 1
        run.assert_nothing_left(pids)
        assert "child_killed child=decode-0" in run.stderr
    finally:
        run.close()


def test_kill_9_of_the_launcher_takes_everything_along(serve: Serve) -> None:
    serve.wait_ready()
    pids = serve.pids()
    serve.process.kill()
    serve.process.wait(10)
    deadline = time.monotonic() + 5
    while any(is_running(pid) for pid in pids.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert [name for name, pid in pids.items() if is_running(pid)] == []


def test_a_dead_valkey_is_replaced_at_the_same_address(serve: Serve) -> None:
    serve.wait_ready()
    path = (serve.folder / "redis_url").read_text().removeprefix("unix://")
    os.kill(serve.pids()["valkey"], signal.SIGKILL)
    serve.wait_for(lambda: "child=valkey" in serve.stderr)

    def answers() -> bool:
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(path) == 0

    serve.wait_for(answers)
    assert serve.end(signal.SIGTERM) == 0


def test_a_taken_port_is_named_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        code, stderr = exit_of(tmp_path, "--port", str(port))
    assert code == 2
    assert f"Port {port} on 127.0.0.1 is taken by" in stderr
    assert f"pid {os.getpid()}" in stderr
    assert "--port" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "redis_url").exists()


def test_a_missing_model_is_one_sentence_before_anything_starts(tmp_path: Path) -> None:
    code, stderr = exit_of(tmp_path, str(tmp_path / "nowhere.gguf"))
    assert code == 2
    assert stderr.startswith("biphase: ")
    assert "nowhere.gguf" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "redis_url").exists()


def test_a_truncated_model_is_one_sentence(tmp_path: Path) -> None:
    model = tmp_path / "cut.gguf"
    model.write_bytes(b"GGUF\x03\x00\x00\x00")
    code, stderr = exit_of(tmp_path, str(model))
    assert code == 2
    assert "cut.gguf" in stderr
    assert stderr.count("\n") == 1


def test_an_unsupported_architecture_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"architectures": ["WaterfallForCausalLM"]}')
    code, stderr = exit_of(tmp_path, str(tmp_path / "model"))
    assert code == 2
    assert "WaterfallForCausalLM" in stderr
    assert stderr.count("\n") == 1
    assert not (tmp_path / "redis_url").exists()


def test_a_worker_that_refuses_speaks_for_the_whole(tmp_path: Path) -> None:
    code, stderr = exit_of(tmp_path, BROKEN="refuses")
    assert code == 2
    assert stderr.splitlines()[-1] == "biphase: The model is in pieces."
    assert stderr.count("The model is in pieces.") == 1


def test_an_unusable_flag_is_one_sentence(tmp_path: Path) -> None:
    code, stderr = exit_of(tmp_path, "--decode", "0")
    assert code == 2
    assert stderr == "biphase: --decode: '0' is not usable: must be at least 1\n"


def test_an_unknown_flag_is_one_sentence_with_a_guess(tmp_path: Path) -> None:
    code, stderr = exit_of(tmp_path, "--max-num-seq=8")
    assert code == 2
    assert stderr == "biphase: unrecognized arguments: --max-num-seq=8 (did you mean --max-num-seqs?)\n"


def test_ready_fd_tells_a_parent(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe()
    (tmp_path / "tmp").mkdir()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.services.launcher.serve_with_fakes", str(tmp_path), "--port", "0",
             "--ready-fd", str(write_fd)],
            stdout=log, stderr=log, pass_fds=(write_fd,), env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        )  # fmt: skip
    os.close(write_fd)
    with os.fdopen(read_fd) as ready:
        assert '"role": "launcher"' in ready.readline()
    process.terminate()
    assert process.wait(20) == 0
