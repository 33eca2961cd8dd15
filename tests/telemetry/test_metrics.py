"""What every process exposes is what the table and docs/metrics.md say, on a real stack that has served requests."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from biphase.telemetry import exposition
from biphase.telemetry.exposition import MetricsServer
from biphase.telemetry.settings import port_or_off
from biphase.telemetry.table import GATEWAY, SERVICES, metrics_of
from tests.e2e.stack import Stack


@pytest.fixture(scope="module", autouse=True)
def load(stack: Stack) -> None:
    prompts = [f"{number} " + "the quick brown fox " * (number * 3) for number in range(1, 13)]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: _complete(stack, prompt), [*prompts, *prompts[:4]]))


def _complete(stack: Stack, prompt: str) -> Any:
    return stack.post("/v1/completions", {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0})


def _pages(stack: Stack) -> dict[str, str]:
    """Role -> what its /metrics says, found as Prometheus finds it."""
    pages = {GATEWAY: stack.get("/metrics", raw=True).decode()}
    for entry in stack.get("/metrics/targets"):
        (target,) = entry["targets"]
        with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain; version=")
            pages[entry["labels"]["role"]] = answer.read().decode()
    return pages


def _families(page: str) -> dict[str, Any]:
    return {family.name: family for family in text_string_to_metric_families(page)}


def test_what_is_documented_is_emitted_and_the_other_way_round(stack: Stack) -> None:
    pages = _pages(stack)
    assert pages.keys() == set(SERVICES)
    for role, page in pages.items():
        declared = {metric.name: metric for metric in metrics_of(role)}
        found = _families(page)
        assert found.keys() == declared.keys(), role
        for name, family in found.items():
            assert family.type == declared[name].kind, name
            assert family.documentation == declared[name].help
            for sample in family.samples:
                assert sample.labels.keys() - {"le"} == set(declared[name].labels), name


def test_figures_of_the_load(stack: Stack) -> None:
    found = {role: _families(page) for role, page in _pages(stack).items()}

    def total(role: str, name: str, suffix: str = "_total", **labels: str) -> float:
        samples = found[role][name].samples
        return sum(s.value for s in samples if s.name == name + suffix and labels.items() <= s.labels.items())

    assert total("gateway", "vllm:request_success") >= 16
    assert total("gateway", "biphase:http_requests", endpoint="/v1/completions", status="200") >= 16
    assert total("gateway", "vllm:request_params_n", "_count") >= 16
    assert total("decode", "vllm:e2e_request_latency_seconds", "_count") >= 16
    assert total("decode", "vllm:time_to_first_token_seconds", "_count") >= 16
    assert total("decode", "vllm:generation_tokens") >= 16
    remote = total("decode", "biphase:prefill_modes", mode="remote")
    assert remote > 0 and total("prefill", "vllm:request_prefill_time_seconds", "_count") >= remote
    read = total("decode", "biphase:transfer_bytes")
    assert read > 0 and total("decode", "biphase:transfer_blocks", outcome="verified") > 0
    assert total("decode", "biphase:handoff_bytes", "_sum") <= read
    assert total("decode", "vllm:iteration_tokens_total", "_count") == total("decode", "biphase:engine_steps")
    assert total("kvstore", "biphase:store_offers", outcome="received") > 0
    assert total("decode", "vllm:kv_cache_usage_perc", "") == 0, "idle"


def test_prometheus_itself_reads_it(stack: Stack) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed")
    for role, page in _pages(stack).items():
        checked = subprocess.run([promtool, "check", "metrics"], input=page.encode(), capture_output=True, check=False)
        # 3: read, but its lint has opinions, of the colons in vLLM's names for instance.
        assert checked.returncode in (0, 3), (role, checked.stderr.decode())


def test_nothing_else_is_served(stack: Stack) -> None:
    (target,) = stack.get("/metrics/targets")[0]["targets"]
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"http://{target}/", timeout=10)
    assert refused.value.code == 404
    refused.value.close()


def test_loopback_unless_told(stack: Stack) -> None:
    assert json.dumps(stack.get("/metrics/targets")).count("127.0.0.1") == 3


def test_ports() -> None:
    assert (port_or_off("off"), port_or_off("0"), port_or_off("9100")) == (None, 0, 9100)
    with pytest.raises(ValueError, match="a port"):
        port_or_off("65536")


def test_a_caller_that_drips_has_no_more_time_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_CALL_SECONDS", 1.0)
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    host, port = server.address.split(":")
    with contextlib.ExitStack() as stack:
        callers = [stack.enter_context(socket.create_connection((host, int(port)))) for _ in range(4)]
        stack.callback(server.close)
        deadline = time.monotonic() + 20
        while callers:
            assert time.monotonic() < deadline, "whoever sends a byte now and then keeps its place"
            for caller in list(callers):
                caller.settimeout(0.05)
                try:
                    caller.sendall(b"G")
                    is_over = caller.recv(1) == b""
                except TimeoutError:
                    is_over = False
                except OSError:
                    is_over = True
                if is_over:
                    callers.remove(caller)
        with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10) as answer:
            assert answer.status == 200


def test_what_cannot_be_collected_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def collect(self) -> Any:
            raise ValueError("no such figure")

        def describe(self) -> Any:
            return ()

    registry = CollectorRegistry()
    registry.register(Broken())
    server = MetricsServer(registry, "127.0.0.1", 0)
    try:
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://{server.address}/metrics", timeout=10)
        assert refused.value.code == 500
        refused.value.close()
        assert "metrics_not_collected" in caplog.text and "no such figure" in caplog.text
    finally:
        server.close()


def test_callers_beyond_a_few_are_turned_away() -> None:
    server = MetricsServer(CollectorRegistry(), "127.0.0.1", 0)
    host, port = server.address.split(":")
    silent = [socket.create_connection((host, int(port))) for _ in range(8)]
    try:
        # Those in excess are closed at once; the others have their time.
        silent[-1].settimeout(10)
        assert silent[-1].recv(1) == b""
    finally:
        for connection in silent:
            connection.close()
        server.close()
