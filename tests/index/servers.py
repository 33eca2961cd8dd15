"""Servers configured as people run them: with passwords, TLS, sentinels, as a cluster; Valkey and, where it is
installed (or named by BIPHASE_TEST_REDIS_SERVER), Redis."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from biphase.index.embedded import server_binary


def redis_binary() -> str | None:
    return os.environ.get("BIPHASE_TEST_REDIS_SERVER") or shutil.which("redis-server")


# A node of a cluster listens ten thousand ports higher too.
_MAX_PORT = 55_535


def free_port() -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port <= _MAX_PORT:
            return port


class ServerProcess:
    """One server with the given lines of configuration, on a port of its own."""

    def __init__(self, folder: Path, *lines: str, binary: str | None = None, sentinel: bool = False) -> None:
        folder.mkdir(exist_ok=True)
        self.port = free_port()
        config = folder / "server.conf"
        config.write_text("\n".join([f"dir {folder}", 'save ""', *(line.format(port=self.port) for line in lines), ""]))
        if sentinel:
            config.write_text(
                "\n".join(line for line in config.read_text().splitlines() if not line.startswith("save"))
            )
        command = [binary or str(server_binary()), str(config), *(["--sentinel"] if sentinel else [])]
        self._log = (folder / "log").open("wb")
        self.process = subprocess.Popen(command, stdout=self._log, stderr=subprocess.STDOUT, cwd=folder)
        deadline = time.monotonic() + 10
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            assert self.process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(10)
        self._log.close()


def self_signed(folder: Path) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 and its key."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days",
            "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out",
            str(certificate),
        ],
        check=True,
        capture_output=True,
    )  # fmt: skip
    return certificate, key
