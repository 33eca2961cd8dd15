"""The console script's own words and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import biphase
from services.launcher import cli


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"biphase {biphase.__version__}\n"


@pytest.mark.parametrize("argv", [[], ["sreve"]])
def test_an_unknown_command_is_one_line_and_exit_code_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert "serve" in said.err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in ("serve", "status", *cli.SERVICES))


@pytest.mark.parametrize("name", cli.SERVICES)
def test_a_service_replaces_the_launcher(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []

    def execv(_: str, argv: list[str]) -> None:
        called.append(argv)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execv", execv)
    with pytest.raises(SystemExit):
        cli.main([name, "--port", "1"])
    assert called == [[sys.executable, "-m", f"services.{name}", "--port", "1"]]


def test_the_launcher_needs_no_torch() -> None:
    program = (
        "import sys, services.launcher.cli, services.launcher.serve, services.launcher.status\n"
        "sys.exit(sorted({'torch', 'transformers', 'services.gateway', 'services.decode'} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
