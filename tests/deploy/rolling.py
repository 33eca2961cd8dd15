"""Scaling and a rolling restart of a compose stack that runs, under load: as `make rolling`, but with containers and
the model that the stack serves.

    python -m tests.deploy.rolling --engine docker --compose "docker compose -f compose/compose.yaml"
        --url http://127.0.0.1:8000 --url http://127.0.0.1:8001

Start the stack with `--profile two-gateways` and name both, or gateways are left alone. Owns the steps; the load, its
retrying client and what counts as failed are those of tests/chaos/rolling.py. A line per step, and a summary in JSON;
exit code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from functools import partial

from tests.chaos.rolling import Load, Step, take, tell

POOLS = ("prefill", "decode")
_STOP_SECONDS = 45
_READY_SECONDS = 240.0
# Requests that have to end after a step before the next: whatever the step does to them shows by then.
_REQUESTS_A_STEP = 6


class ComposeStack:
    """The containers of one compose project, by the labels that compose gives them.

    Args:
        engine: command line of docker or what takes its place; `compose` that of its compose.
    """

    def __init__(self, engine: str, compose: str, project: str, urls: Sequence[str]) -> None:
        self._engine, self._compose, self._project = shlex.split(engine), shlex.split(compose), project
        self.urls = list(urls)

    def running(self, service: str) -> list[str]:
        labels = (f"com.docker.compose.project={self._project}", f"com.docker.compose.service={service}")
        filters = [word for label in labels for word in ("--filter", f"label={label}")]
        return sorted(self._run(*self._engine, "ps", *filters, "--format", "{{.Names}}").split())

    def stop(self, name: str) -> None:
        """SIGTERM, and an end of the container's own."""
        self._run(*self._engine, "stop", "-t", str(_STOP_SECONDS), name)
        code = self._run(*self._engine, "inspect", "-f", "{{.State.ExitCode}}", name).strip()
        assert code == "0", f"{name} ended with {code}"

    def restart(self, name: str) -> None:
        self.stop(name)
        self._run(*self._engine, "start", name)
        self.wait_ready()

    def kill(self, name: str) -> None:
        self._run(*self._engine, "kill", "-s", "KILL", name)

    def start(self, name: str) -> None:
        self._run(*self._engine, "start", name)

    def scale(self, prefill: int, decode: int) -> None:
        wanted = {"prefill": prefill, "decode": decode}
        scales = [word for service, count in wanted.items() for word in ("--scale", f"{service}={count}")]
        self._run(*self._compose, "up", "-d", "--no-recreate", *scales, *POOLS)
        # Not every compose takes away what is too much.
        for service, count in wanted.items():
            for name in self.running(service)[count:]:
                self.stop(name)
                self._run(*self._engine, "rm", name)
        self.wait_ready()

    def wait_ready(self) -> None:
        """Until every gateway counts as many nodes ready, of each role, as there are containers."""
        wanted = Counter({service: len(self.running(service)) for service in (*POOLS, "kvstore")})
        deadline = time.monotonic() + _READY_SECONDS
        for url in self.urls:
            seen: Counter[str] = Counter()
            while seen != wanted:
                assert time.monotonic() < deadline, f"{url} sees {seen}, not {wanted}"
                time.sleep(0.25)
                with contextlib.suppress(OSError), urllib.request.urlopen(url + "/status", timeout=10) as answer:
                    nodes = json.load(answer)["nodes"]
                    seen = Counter(node["role"] for node in nodes if node["state"] == "ready")

    def _run(self, *words: str) -> str:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr[-2000:]}"
        return done.stdout


def all_at_once(stack: ComposeStack) -> None:
    """A decode worker dies while Redis and the block stores restart."""
    victim = stack.running("decode")[-1]
    redis, stores = stack.running("redis"), stack.running("kvstore")
    stack.kill(victim)
    for name in (*redis, *stores):
        stack.stop(name)
    for name in (*redis, *stores, victim):
        stack.start(name)
    stack.wait_ready()


def steps_of(stack: ComposeStack, which: str) -> list[Step]:
    if which == "scale":
        sizes = [(1, 1), (3, 1), (1, 1), (1, 3), (1, 1)]
        return [(f"scale to {p} prefill, {d} decode", partial(stack.scale, p, d)) for p, d in sizes]
    if which == "fault":
        return [("kill a decode worker, restart redis and kvstore", partial(all_at_once, stack))]
    gateways = ("gateway", "gateway-2") if len(stack.urls) > 1 else ()
    names = [name for service in ("redis", "kvstore", *POOLS, *gateways) for name in stack.running(service)]
    return [(f"restart {name}", partial(stack.restart, name)) for name in names]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", default="docker")
    parser.add_argument("--compose", default="docker compose -f compose/compose.yaml")
    parser.add_argument("--project", default="biphase")
    parser.add_argument("--url", action="append", required=True, help="a gateway; several times for several")
    parser.add_argument("--steps", nargs="+", choices=("scale", "restart", "fault"), default=["scale", "restart"])
    parser.add_argument("--clients", type=int, default=3)
    given = parser.parse_args(argv)
    stack = ComposeStack(given.engine, given.compose, given.project, given.url)
    stack.wait_ready()
    load = Load(stack.urls, num_clients=given.clients, seed=1)
    load.start()
    try:
        for which in given.steps:
            take(steps_of(stack, which), load, _REQUESTS_A_STEP)
    finally:
        outcome = load.stop()
        code = tell(outcome)
    return code


if __name__ == "__main__":
    sys.exit(main())
