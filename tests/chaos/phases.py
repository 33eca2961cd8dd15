"""Kills at a chosen point of a request's way, in place of a chosen moment.

Owns how each point is recognised from outside: by what passes the proxies in front of a worker, and by what the worker
logs. A trigger in a proxy strikes before the bytes that set it off are forwarded, so the victim never acts on them.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from enum import StrEnum
from pathlib import Path

from tests.chaos.cluster import ChaosCluster
from tests.chaos.processes import ServiceProcess

# A call with a prompt in it is larger than the probes and renewals that pass the same proxy.
_CALL_BYTES = 200
# Parts of answers that pass before a stream is taken to be in its middle.
_ANSWER_PARTS = 20
# Under load every point is passed many times a second; where it is not, the victim dies without.
_WAIT_SECONDS = 3.0


class Phase(StrEnum):
    BEFORE_RESERVE = "before it reserves"
    BEFORE_ACCEPT = "before it accepts"
    MID_CHUNK = "mid-chunk, blocks being read"
    BEFORE_LAST_BLOCK = "between PrefillDone and last block"
    MID_DECODE = "mid-decode"
    MID_RELEASE = "mid-release"


PHASES_OF_ROLE = {
    "prefill": (Phase.BEFORE_ACCEPT, Phase.MID_CHUNK, Phase.BEFORE_LAST_BLOCK, Phase.MID_RELEASE),
    "decode": (Phase.BEFORE_RESERVE, Phase.MID_DECODE, Phase.MID_RELEASE),
}


class LogTail:
    """What a process logs from now on."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._position = path.stat().st_size if path.exists() else 0

    async def wait_for(self, event: str, until: float) -> bool:
        """Whether the event was logged before `until`, monotonic seconds."""
        rest = b""
        while time.monotonic() < until:
            with self._path.open("rb") as log:
                log.seek(self._position)
                new = log.read()
            self._position += len(new)
            *lines, rest = (rest + new).split(b"\n")
            if any(_event(line) == event for line in lines):
                return True
            await asyncio.sleep(0.003)
        return False


def _event(line: bytes) -> str:
    try:
        return str(json.loads(line)["event"])
    except (ValueError, KeyError, TypeError):
        return ""


async def kill_at(cluster: ChaosCluster, victim: ServiceProcess, phase: Phase) -> bool:
    """Kills the process at the next point of this kind that it passes. False: it passed none for too long, and was
    killed all the same."""
    until = time.monotonic() + _WAIT_SECONDS
    rpc, blocks = cluster.rpc_proxies[victim.name], cluster.block_proxies[victim.name]
    struck = threading.Event()

    def strike() -> None:
        victim.kill()
        struck.set()

    try:
        if phase in (Phase.BEFORE_RESERVE, Phase.BEFORE_ACCEPT):
            rpc.on_request(_CALL_BYTES, 1, strike)
        elif phase is Phase.MID_DECODE:
            rpc.on_answer(_ANSWER_PARTS, strike)
        elif phase is Phase.MID_CHUNK:
            blocks.on_request(1, 1, strike)
        else:
            tail = LogTail(victim.log_path)
            if phase is Phase.BEFORE_LAST_BLOCK:
                blocks.hold()
            event = "prefill_done" if victim.role == "prefill" else "request_finished"
            met = await tail.wait_for(event, until)
            victim.kill()
            return met
        while not struck.is_set() and time.monotonic() < until:
            await asyncio.sleep(0.005)
        met = struck.is_set()
        victim.kill()
        return met
    finally:
        rpc.disarm()
        blocks.disarm()
