"""For every test: Triton's interpreter where there is no GPU, and a failed test's log with what the events say.

What is said in the environment must be said before anything imports torch, triton or gRPC.
"""

from __future__ import annotations

import os

import pytest

# What gRPC does at a fork ends children that are about to become another program.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Two processes whose OpenMP threads spin for each other's cores would take many times as long.
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from biphase.telemetry.events import TextFormatter

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """pytest's own format has the events' names alone."""
    plugin = config.pluginmanager.get_plugin("logging-plugin")
    if plugin is not None:
        plugin.report_handler.setFormatter(TextFormatter("test"))
