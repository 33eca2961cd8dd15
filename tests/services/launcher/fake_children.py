"""Tiny stand-ins for services, to be run by `python -c`: they speak the ready protocol and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.launcher.child import ChildSpec

_PRELUDE = """
import json, os, signal, sys, time
def ready(**more):
    line = json.dumps({"pid": os.getpid(), **more}) + "\\n"
    os.write(int(sys.argv[sys.argv.index("--ready-fd") + 1]), line.encode())
def say(text):
    print(text, file=sys.stderr, flush=True)
def append(path, text):
    with open(path, "a") as file:
        file.write(text + "\\n")
"""

SERVES = "ready(); signal.pause()"
# Ends cleanly, with a trace in a file, when told.
DRAINS = """
signal.signal(signal.SIGTERM, lambda *_: (append({trace!r}, {name!r}), sys.exit(0)))
ready()
while True: signal.pause()
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()\nwhile True: time.sleep(1)"
REFUSES = "say('biphase decode: The model is in pieces.'); sys.exit(2)"
CRASHES = "say('Traceback: something broke'); sys.exit(1)"
# Crashes the first time, then serves.
RECOVERS = """
if not os.path.exists({trace!r}):
    append({trace!r}, 'crashed'); sys.exit(1)
ready(); signal.pause()
"""


def fake(name: str, script: str, *, start_stage: int = 0, stop_stage: int = 0) -> ChildSpec:
    return ChildSpec(
        name=name,
        argv=(sys.executable, "-c", _PRELUDE + script),
        environ={"PATH": "/usr/bin:/bin"},
        start_stage=start_stage,
        stop_stage=stop_stage,
    )


@dataclass
class Lines:
    """Collects what children print, instead of ChildOutput."""

    lines: list[tuple[str, str]] = field(default_factory=list)

    def write(self, child: str, line: str) -> None:
        self.lines.append((child, line))

    def is_event(self, line: str) -> bool:
        return line.startswith("EVENT")

    def of(self, child: str) -> list[str]:
        return [line for name, line in self.lines if name == child]


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def environment_of(pid: int) -> Mapping[str, str]:
    with open(f"/proc/{pid}/environ") as file:
        return dict(entry.partition("=")[::2] for entry in file.read().split("\0") if entry)
