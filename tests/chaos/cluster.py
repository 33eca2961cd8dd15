"""A whole biphase of a tiny model, process by process, with fault proxies in front of every worker.

Owns starting and ending it, and the two invariants of an idle cluster: every node ready, no block in use. Ports are
fixed, so whoever is killed comes back under the same address, as another incarnation.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from biphase.index.embedded import EmbeddedValkey
from tests.chaos.faults import FaultProxy
from tests.chaos.processes import ServiceProcess
from tests.e2e.stack import free_port
from tests.tiny_models import save_tiny
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE, save_tokenizer

MAX_MODEL_LEN = 1536
# Every block is accounted for so soon after the load has ended. At worst one thing comes after the other: a read that
# nobody answers holds its blocks for TRANSFER_SECONDS, as bytes could still come; its reader's release is lost with the
# link, so the lease ends LEASE_SECONDS after its last renewal, and the next sweep finds that out; the gateway hears of
# it with its next look. Hence these two are shorter here than they are by default.
IDLE_SECONDS = 5.0
LEASE_SECONDS = 2.0
TRANSFER_SECONDS = 2.0


def save_model(folder: Path) -> Path:
    """Large enough that a stream takes a while, small enough that a worker starts in a few seconds."""
    save_tiny("llama", folder, vocab_size=MODEL_VOCAB_SIZE, max_position_embeddings=2048, num_hidden_layers=4)
    return save_tokenizer(folder)


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """What to start."""

    num_prefill: int = 2
    num_decode: int = 2
    num_gateways: int = 1
    kvstore: bool = True
    # Put proxies in front of the workers' RPC ports and data planes.
    proxied: bool = True
    # Of the workers; several choices, with ";" between, are dealt out in turn.
    transports: str = "tcp"
    dtype: str = "float32"
    num_blocks: int = 640
    request_timeout_seconds: float = 30.0
    # By role: the command that runs a process somewhere else (in a network namespace), and its address there.
    homes: Mapping[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    worker_flags: Sequence[str] = ()
    gateway_flags: Sequence[str] = ()
    kvstore_flags: Sequence[str] = ()


class ChaosCluster:
    """Running after `start`, gone after `close`."""

    def __init__(self, model: Path, plan: ClusterPlan) -> None:
        self.plan = plan
        self.valkey = EmbeddedValkey()
        self._model = model
        self._folder = tempfile.TemporaryDirectory(prefix="biphase-chaos-")
        self._ports = [free_port() for _ in range(plan.num_gateways)]
        self.base_urls = [f"http://127.0.0.1:{port}" for port in self._ports]
        self.base_url = self.base_urls[0]
        # By node: what passes between it and those that call it, or read its blocks.
        self.rpc_proxies: dict[str, FaultProxy] = {}
        self.block_proxies: dict[str, FaultProxy] = {}
        self.processes: dict[str, ServiceProcess] = {}

    def start(self) -> None:
        self.valkey.start()
        plan = self.plan
        if plan.kvstore:
            self._add(
                "kvstore-0",
                "kvstore",
                "--port",
                str(free_port()),
                "--capacity",
                "64MiB",
                "--transfer-timeout-seconds",
                str(TRANSFER_SECONDS),
                "--lease-seconds",
                str(LEASE_SECONDS),
                *plan.kvstore_flags,
            )
        for role, count in (("prefill", plan.num_prefill), ("decode", plan.num_decode)):
            for number in range(count):
                self._add_worker(f"{role}-{number}", role)
        for number, gateway_port in enumerate(self._ports):
            self._add(
                f"gateway-{number}", "gateway", "--port", str(gateway_port), "--model", str(self._model),
                "--request-timeout", str(plan.request_timeout_seconds), *plan.gateway_flags,
            )  # fmt: skip
        for process in self.processes.values():
            process.start()
        for process in self.processes.values():
            process.wait_ready(180.0)
        self.wait_ready(90.0)

    def _add_worker(self, name: str, role: str) -> None:
        port, transfer_port = free_port(), free_port()
        choices = self.plan.transports.split(";")
        _, host = self.plan.homes.get(role, ((), "127.0.0.1"))
        flags = [
            "--host", host, "--port", str(port), "--transfer-port", str(transfer_port), "--model", str(self._model),
            "--dtype", self.plan.dtype, "--num-blocks", str(self.plan.num_blocks), "--num-threads", "1",
            "--max-model-len", str(MAX_MODEL_LEN), "--max-num-batched-tokens", "128",
            "--lease-seconds", str(LEASE_SECONDS), "--transfer-timeout-seconds", str(TRANSFER_SECONDS),
            "--transports", choices[len(self.rpc_proxies) % len(choices)],
        ]  # fmt: skip
        if self.plan.proxied:
            self.rpc_proxies[name] = FaultProxy(f"127.0.0.1:{port}")
            self.block_proxies[name] = FaultProxy(f"127.0.0.1:{transfer_port}")
            flags += ["--advertised-address", self.rpc_proxies[name].address]
            flags += ["--advertised-transfer-address", self.block_proxies[name].address]
        self._add(name, role, *flags, *self.plan.worker_flags)

    def _add(self, name: str, role: str, *flags: str) -> None:
        common = ("--redis-url", self.valkey.url, "--log-format", "json", "--drain-timeout", "2")
        log_path = Path(self._folder.name) / f"{name}.log"
        prefix, _ = self.plan.homes.get(role, ((), ""))
        self.processes[name] = ServiceProcess(name, role, (*common, *flags), log_path, prefix)

    def of_role(self, *roles: str) -> list[ServiceProcess]:
        return [process for process in self.processes.values() if process.role in roles]

    def status(self) -> Any:
        with urllib.request.urlopen(self.base_url + "/status", timeout=5) as answer:
            return json.loads(answer.read())

    def nodes(self) -> list[dict[str, Any]]:
        nodes: list[dict[str, Any]] = self.status()["nodes"]
        return nodes

    def wait_ready(self, seconds: float) -> None:
        """Until the gateway sees every other process ready."""
        expected = {name for name, process in self.processes.items() if process.role != "gateway"}
        self._wait(seconds, lambda nodes: {n["id"] for n in nodes if n["state"] == "ready"} >= expected)

    def wait_idle(self, seconds: float = IDLE_SECONDS) -> None:
        """Until no node has a block in use, leased or draining."""
        self._wait(
            seconds,
            lambda nodes: all(not n["blocks"][kind] for n in nodes for kind in ("used", "leased", "draining")),
        )

    def kill_valkey(self) -> None:
        os.kill(self.valkey.pid, signal.SIGKILL)

    def freeze_valkey(self) -> None:
        os.kill(self.valkey.pid, signal.SIGSTOP)

    def thaw_valkey(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.valkey.pid, signal.SIGCONT)

    def heal(self) -> None:
        """Undoes every fault that was done, and returns when all is ready and idle.

        Raises:
            AssertionError: a node does not come back, or a block is not accounted for.
        """
        for proxy in (*self.rpc_proxies.values(), *self.block_proxies.values()):
            proxy.take()
            proxy.disarm()
            proxy.refuse(False)
        if not self.valkey.running:
            self.valkey.restart()
        self.thaw_valkey()
        for process in self.processes.values():
            if not process.running:
                process.start()
            process.thaw()
        self.wait_ready(180.0)
        self.wait_idle()

    def wait_decode_idle(self, seconds: float) -> None:
        """The same for decode workers alone, while others cannot be reached."""
        self._wait(
            seconds,
            lambda nodes: all(
                not n["blocks"][kind] for n in nodes if n["role"] == "decode" for kind in ("used", "leased", "draining")
            ),
        )

    def _wait(self, seconds: float, condition: Any) -> None:
        deadline = time.monotonic() + seconds
        nodes: Any = None
        while True:
            with contextlib.suppress(OSError):
                nodes = self.nodes()
                if condition(nodes):
                    return
            if time.monotonic() > deadline:
                raise AssertionError(f"not so after {seconds} s: {json.dumps(nodes, indent=1)}")
            time.sleep(0.05)

    def logs(self, num_chars: int = 6000) -> str:
        return "\n".join(
            f"---- {name} (life {process.num_lives})\n{process.log()[-num_chars:]}"
            for name, process in self.processes.items()
        )

    def close(self) -> None:
        for role in ("gateway", "decode", "prefill", "kvstore"):
            for process in self.of_role(role):
                process.stop(5.0)
        for proxy in (*self.rpc_proxies.values(), *self.block_proxies.values()):
            proxy.close()
        self.valkey.stop()
        self._folder.cleanup()


@contextlib.contextmanager
def running_cluster(model: Path, plan: ClusterPlan) -> Iterator[ChaosCluster]:
    """A cluster that is ready; its logs are shown when the test fails."""
    cluster = ChaosCluster(model, plan)
    try:
        cluster.start()
        yield cluster
    except BaseException:
        print(cluster.logs())
        raise
    finally:
        cluster.close()
