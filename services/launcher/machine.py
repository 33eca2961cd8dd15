"""What this machine has to give: cores, and whether a port is free. Linux, stdlib only."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path

from biphase.errors import ConfigError


def num_cores() -> int:
    """Cores this process may run on, at least 1."""
    return len(os.sched_getaffinity(0))


def require_free_port(host: str, port: int) -> None:
    """Raises ConfigError, naming port and holder, when nothing can listen on host:port. Port 0 is always free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As servers do: a port whose last connections still linger is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            pid = port_holder(port)
            holder = f" by {_command_name(pid)} (pid {pid})" if pid is not None else ""
            raise ConfigError(
                f"Port {port} on {host} is taken{holder}: stop what listens there, or choose another with --port."
            ) from error
        if error.errno == errno.EACCES:
            raise ConfigError(f"Port {port} needs more rights than this user has; choose one above 1023.") from error
        raise ConfigError(f"Cannot listen on {host}:{port}: {error.strerror or error}.") from error


def port_holder(port: int) -> int | None:
    """Process id of who listens on a TCP port, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                # Columns: slot, local address:port in hex, remote, state (0A = listening), ..., inode.
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    for folder in Path("/proc").iterdir() if inodes else ():
        if folder.name.isdigit():
            with suppress(OSError):
                if any(os.readlink(entry) in inodes for entry in (folder / "fd").iterdir()):
                    return int(folder.name)
    return None


def _command_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "another process"
