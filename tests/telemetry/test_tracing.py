"""One request through a real stack is one trace over its processes, and one id in their logs."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import time
import urllib.request
from typing import Any

import pytest

from biphase.errors import ConfigError
from biphase.index.registry import default_node_id
from biphase.telemetry import context, events, tracing
from biphase.worker.process import run_worker
from services.gateway import __main__ as gateway
from services.kvstore import __main__ as kvstore
from tests.e2e.stack import Stack
from tests.telemetry.collector import Collector

SECRET = "xylophone"
PHASES = {"POST /v1/chat/completions", "chat tiny", "prepare", "queue", "route", "first token", "decode", "generate",
          "handoff", "transfer", "prefill", "prefill chunk"}  # fmt: skip


def _chat(stack: Stack, traceparent: str) -> Any:
    # Nothing like it was asked before: it has to be prefilled.
    text = f"{SECRET} {secrets.token_hex(8)} " * 12
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    headers = {"Content-Type": "application/json", "traceparent": traceparent}
    request = urllib.request.Request(f"{stack.base_url}/v1/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_one_trace_over_all_processes(stack: Stack, collector: Collector) -> None:
    trace_id, client_span = secrets.token_hex(16), secrets.token_hex(8)
    answer = _chat(stack, f"00-{trace_id}-{client_span}-01")
    # The block store reads what came of it once it is answered.
    received = collector.trace(trace_id, PHASES | {"store offer"})
    by_id = {span.span_id: (service, span) for service, span in received}

    def parent_of(name: str, of: str) -> tuple[str, str]:
        (span,) = {span.span_id: span for service, span in received if (span.name, service) == (name, of)}.values()
        service, parent = by_id.get(span.parent_span_id, ("client", None))
        return service, "" if parent is None else parent.name

    def attributes(name: str) -> dict[str, Any]:
        span = next(span for _, span in received if span.name == name)
        return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in span.attributes}

    (root,) = [span for _, span in received if span.name == "POST /v1/chat/completions"]
    assert root.parent_span_id.hex() == client_span
    assert parent_of("chat tiny", "biphase-gateway") == ("biphase-gateway", "POST /v1/chat/completions")
    assert parent_of("generate", "biphase-decode") == ("biphase-gateway", "chat tiny")
    assert parent_of("handoff", "biphase-decode") == ("biphase-decode", "generate")
    assert parent_of("prefill", "biphase-prefill") == ("biphase-decode", "generate")
    assert {service for service, span in received if span.name == "prefill chunk"} == {"biphase-prefill"}
    assert {service for service, span in received if span.name == "store offer"} == {"biphase-kvstore"}
    assert all(span.end_time_unix_nano >= span.start_time_unix_nano for _, span in received)
    told = attributes("chat tiny")
    assert told["gen_ai.request.model"] == "tiny" and told["gen_ai.response.id"] == answer["id"]
    assert told["gen_ai.usage.output_tokens"] == answer["usage"]["completion_tokens"]
    (reason,) = told["gen_ai.response.finish_reasons"].values
    assert reason.string_value == answer["choices"][0]["finish_reason"]
    assert attributes("POST /v1/chat/completions")["http.response.status_code"] == 200
    assert SECRET not in repr(received), "no prompt in a span"


def test_what_the_client_did_not_sample_is_not_traced(stack: Stack, collector: Collector) -> None:
    dropped, kept = secrets.token_hex(16), secrets.token_hex(16)
    _chat(stack, f"00-{dropped}-{secrets.token_hex(8)}-00")
    _chat(stack, f"00-{kept}-{secrets.token_hex(8)}-01")
    collector.trace(kept, PHASES)
    assert collector.trace(dropped, set()) == []


def test_every_line_about_a_request_has_its_id(stack: Stack) -> None:
    answer = _chat(stack, "")
    wanted = {("gateway", "request_finished"), ("decode", "request_finished"), ("prefill", "prefill_done")}
    deadline = time.monotonic() + 10
    while True:
        # Lines come by way of the supervisor, after the answer perhaps.
        lines = []
        for line in stack.log().splitlines():
            if answer["id"].partition("-")[2] in line and line.endswith("}"):
                lines.append(json.loads(line[line.index("{") :]))
        heard = {(line["component"].partition("-")[0], line["event"]) for line in lines}
        if wanted <= heard:
            break
        assert time.monotonic() < deadline, f"missing {wanted - heard}"
        time.sleep(0.05)
    assert all(answer["id"].partition("-")[2] in line["request_id"] for line in lines)
    assert SECRET not in stack.log(), "no prompt in a log"


def test_text_lines_have_it_too() -> None:
    code = """
from biphase.telemetry import context, events
events.configure("decode-0")
log = events.event_logger("x")
log.info("before")
context.request_id.set("r-1")
log.info("during", num_tokens=3)
log.info("its own", request_id="r-1~0")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    before, during, own = ran.stderr.splitlines()
    assert "request_id" not in before
    assert during.endswith("decode-0 during request_id=r-1 num_tokens=3")
    assert own.endswith("decode-0 its own request_id=r-1~0")


_MAINS = {
    "gateway": gateway.main,
    "kvstore": kvstore.main,
    "decode": lambda argv: run_worker("decode", lambda _: None, argv),  # type: ignore[arg-type, return-value]
}


@pytest.mark.parametrize("role", _MAINS)
def test_each_process_has_an_instance_id_of_its_own(role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, ...]] = []

    def configure(*args: str) -> None:
        told.append(args)
        raise ConfigError("that is all for now")

    monkeypatch.setattr(tracing, "configure", configure)
    monkeypatch.setattr(events, "configure", lambda *_, **__: None)
    assert _MAINS[role]([]) == 2
    assert told == [(role, default_node_id(role), "")]


def test_asked_for_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'biphase\[tracing\]'"):
        tracing.configure("decode", "decode-0", "http://127.0.0.1:4318")


def test_nothing_is_imported_unless_asked_for() -> None:
    code = """
import sys
from biphase.telemetry import tracing
tracing.configure("decode", "decode-0", "")
with tracing.serving("x") as span:
    span.child("y", 0.0, 1.0)
assert span is tracing.NO_SPAN
assert not any(name.startswith("opentelemetry.sdk") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert context.traceparent.get() == ""
