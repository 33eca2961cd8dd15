"""Ports and cores of this machine."""

from __future__ import annotations

import os
import socket

import pytest

from biphase.errors import ConfigError
from services.launcher import machine


def test_a_free_port_is_free_and_stays_free() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machine.require_free_port("127.0.0.1", port)
    machine.require_free_port("127.0.0.1", port)
    machine.require_free_port("127.0.0.1", 0)


def test_a_taken_port_is_refused_with_its_holder() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen(1)
        port = holder.getsockname()[1]
        assert machine.port_holder(port) == os.getpid()
        with pytest.raises(ConfigError, match=f"Port {port} on 127.0.0.1 is taken by .* .pid {os.getpid()}."):
            machine.require_free_port("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Cannot listen on 192\.0\.2\.1:8000"):
        machine.require_free_port("192.0.2.1", 8000)


def test_this_machine_has_cores() -> None:
    assert machine.num_cores() >= 1
