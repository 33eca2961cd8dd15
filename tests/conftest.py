"""For every test: Triton's interpreter where there is no GPU, and a failed test's log with what the events say.

The former must be said before anything imports triton.
"""

from __future__ import annotations

import os

import pytest
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
