"""The units start what there is, and drain it."""

from __future__ import annotations

import configparser
import importlib.util
from pathlib import Path

import pytest

from tests.deploy.manifests import FLAGS_OF_ROLE, SYSTEMD, environment_variables

UNITS = sorted(SYSTEMD.glob("*.service"))


class _Unit(configparser.RawConfigParser):
    """A unit file: keys keep their case, and later ones of a name add to it."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read_string(path.read_text())
        # All values of repeated keys, which configparser would drop.
        self.lines = [line for line in path.read_text().splitlines() if "=" in line and not line.startswith("#")]

    def all(self, key: str) -> list[str]:
        return [line.partition("=")[2] for line in self.lines if line.partition("=")[0] == key]


def _role(path: Path) -> str:
    return path.name.removeprefix("biphase-").removesuffix(".service").removesuffix("@")


def test_there_is_one_for_each_service() -> None:
    assert {_role(path) for path in UNITS} == set(FLAGS_OF_ROLE)


@pytest.mark.parametrize("path", UNITS, ids=_role)
def test_unit(path: Path) -> None:
    unit, role = _Unit(path), _role(path)
    assert set(unit.sections()) == {"Unit", "Service", "Install"}
    module = unit.get("Service", "ExecStart").split()[-1]
    assert module == f"services.{role}" and importlib.util.find_spec(module) is not None
    set_here = {word.partition("=")[0] for line in unit.all("Environment") for word in line.split()}
    assert {name for name in set_here if name.startswith("BIPHASE_")} <= environment_variables(role)
    # Exit code 2: settings that cannot be used.
    assert unit.get("Service", "RestartPreventExitStatus") == "2"
    assert unit.get("Service", "User") == "biphase"
    assert path.name.endswith("@.service") == (role in ("prefill", "decode"))


@pytest.mark.parametrize("path", UNITS, ids=_role)
def test_stopping_takes_longer_than_draining(path: Path) -> None:
    example = dict(
        line.split("=", 1)
        for line in (SYSTEMD / "biphase.env.example").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    )
    known = set().union(*(environment_variables(role) for role in FLAGS_OF_ROLE))
    assert example.keys() <= known
    assert float(_Unit(path).get("Service", "TimeoutStopSec")) > float(example["BIPHASE_DRAIN_TIMEOUT"])
