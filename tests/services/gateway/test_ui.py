"""The page's routes, and the timelines that /status tells it."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hatchling.builders.wheel import WheelBuilder

from biphase.errors import UnavailableError
from biphase.rpc.v1 import common_pb2
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import StartGateway

Says = Callable[..., FakeDecode]
STATIC = Path(__file__).parents[3] / "services" / "gateway" / "ui" / "static"


def span(phase: str, node: str, start: float, end: float, **more: Any) -> common_pb2.Span:
    return common_pb2.Span(phase=phase, node_id=node, start_seconds=start, end_seconds=end, **more)


REPORT = common_pb2.RequestReport(
    prefill_mode="remote",
    reason="disaggregated",
    prefill_node_id="prefill-0",
    decode_node_id="decode-0",
    num_cached_tokens=16,
    spans=[
        span("queue", "decode-0", 0.0, 0.001),
        span("chunk", "prefill-0", 0.002, 0.004, num_tokens=15),
        span("read", "decode-0", 0.004, 0.005, num_bytes=4096),
    ],
)


async def test_the_page_and_its_files(start_gateway: StartGateway, says: Says) -> None:
    # No key for the page itself: it holds nothing.
    running = await start_gateway(says(), api_key=("secret",))
    page = await running.client.get("/ui")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    named = re.findall(r'(?:src|href)="(ui/[^"]+)"', page.text)
    assert {"ui/app.js", "ui/ui.css", "ui/icon.svg"} <= set(named)
    kinds = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}
    for file in sorted(STATIC.iterdir()):
        if file.suffix in kinds:
            answer = await running.client.get(f"/ui/{file.name}")
            assert (answer.status_code, answer.headers["content-type"]) == (200, kinds[file.suffix])
            assert answer.content == file.read_bytes()
            again = await running.client.get(f"/ui/{file.name}", headers={"If-None-Match": answer.headers["etag"]})
            assert again.status_code == 304 and not again.content
    slash = await running.client.get("/ui/")
    assert (slash.status_code, slash.headers["location"]) == (307, "../ui")
    head = await running.client.head("/ui")
    assert head.status_code == 200 and not head.content
    for path in ("/ui/index.html", "/ui/none.js", "/ui/../settings.py", "/ui/%2e%2e%2froutes.py", "/ui/a/b.js"):
        assert (await running.client.get(path)).status_code == 404, path
    assert (await running.client.post("/ui")).status_code == 405


async def test_nothing_foreign_and_nothing_inline_may_run(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    for path in ("/ui", "/ui/app.js"):
        headers = (await running.client.get(path)).headers
        policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == policy["img-src"] == "'self'"
        assert policy["frame-ancestors"] == "'none'" and policy["require-trusted-types-for"] == "'script'"
        assert headers["x-content-type-options"] == "nosniff" and headers["referrer-policy"] == "no-referrer"


def test_the_files_ask_for_nothing_from_elsewhere() -> None:
    for file in STATIC.iterdir():
        text = file.read_text()
        addresses = set(re.findall(r"https?://[^\s\"'<>)]*", text)) - {"http://www.w3.org/2000/svg"}
        assert not addresses, (file.name, addresses)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            file
        )
    html = (STATIC / "index.html").read_text()
    # Every script is a file, nothing has a style or a handler of its own, and every address is relative.
    assert not re.search(r"<script(?![^>]*\bsrc=)|\bstyle=|\bon\w+=|(?:src|href)=\"/", html)


def test_a_wheel_brings_the_page() -> None:
    root = STATIC.parents[3]
    packed = {item.distribution_path for item in WheelBuilder(str(root)).recurse_included_files()}
    assert {str(file.relative_to(root)) for file in STATIC.iterdir()} <= packed


async def test_no_page_where_it_is_switched_off(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), disable_ui=True)
    assert [(await running.client.get(path)).status_code for path in ("/ui", "/ui/app.js")] == [404, 404]


async def test_status_asks_for_a_key_where_there_is_one(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(), api_key=("secret",))
    assert (await running.client.get("/status")).status_code == 401
    allowed = await running.client.get("/status", headers={"Authorization": "Bearer secret"})
    assert allowed.status_code == 200 and allowed.json()["nodes"]


async def test_a_timeline_has_the_gateways_phases_and_the_workers(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(report=REPORT, node_id="decode-0"), says(role="prefill", node_id="prefill-0"))
    prompt = "a secret that nobody shall read"
    await running.complete(prompt=prompt, max_tokens=3)
    response = await running.client.get("/status")
    assert "secret" not in response.text, "no prompt in /status"
    body = response.json()
    (row,) = body["requests"]
    phases = [phase["phase"] for phase in row["timeline"]]
    assert sorted(phases) == sorted(["prepare", "queue", "worker_queue", "chunk", "read", "decode"])
    by_phase = {phase["phase"]: phase for phase in row["timeline"]}
    assert by_phase["prepare"]["end"] <= by_phase["queue"]["start"] <= by_phase["queue"]["end"]
    # The worker's times count from the placement, where queueing ended.
    sent = by_phase["queue"]["end"]
    assert by_phase["worker_queue"]["start"] == pytest.approx(sent, abs=2e-5)
    assert by_phase["chunk"]["start"] == pytest.approx(sent + 0.002, abs=2e-5)
    assert (by_phase["chunk"]["node"], by_phase["chunk"]["tokens"]) == ("prefill-0", 15)
    assert by_phase["read"]["bytes"] == 4096
    assert by_phase["decode"]["start"] == pytest.approx(row["ttft_seconds"], abs=1e-4)
    assert by_phase["decode"]["end"] == pytest.approx(row["seconds"], abs=1e-4)
    assert row["routing"]["decode"] == "decode-0" and row["routing"]["prefill"] == ["prefill-0"]
    assert body["routing"]["decisions"] == {row["routing"]["reason"]: 1} and body["active"] == []
    assert body["totals"]["num_finished"] == 1 and body["totals"]["num_output_tokens"] == 3
    assert abs(row["arrival_time"] + row["seconds"] - body["time"]) < 30


async def test_a_lost_worker_shows_in_the_timeline(start_gateway: StartGateway, says: Says) -> None:
    refusing = says(node_id="decode-a", refuses=UnavailableError("not now"))
    running = await start_gateway(refusing, says(node_id="decode-b"))
    # Other words each time: a prompt that is known goes where it was.
    for place in range(8):
        assert (await running.complete(prompt=f"{place} times", max_tokens=4)).status_code == 200
        if refusing.seen:
            break
    rows = (await running.client.get("/status")).json()["requests"]
    moved = [row for row in rows if row.get("num_moves")]
    assert moved and all(row["routing"]["decode"] == "decode-b" for row in rows)
    (lost,) = [phase for phase in moved[0]["timeline"] if phase["phase"] == "lost"]
    assert (lost["node"], lost["error_code"]) == ("decode-a", "unavailable")
    # It waited for a place twice.
    assert [phase["phase"] for phase in moved[0]["timeline"]].count("queue") == 2


async def test_a_request_that_found_no_worker_only_waited(start_gateway: StartGateway) -> None:
    running = await start_gateway()
    assert (await running.chat()).status_code == 503
    body = (await running.client.get("/status")).json()
    assert body["active"] == [] and body["nodes"] == []


async def test_what_is_under_way_is_told_and_then_goes(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(report=REPORT, delay_seconds=0.02))
    pending = asyncio.create_task(running.chat(max_tokens=40))
    await running.settle(lambda: bool(running.gateway.recorder.active(1)))
    await running.settle(lambda: running.gateway.recorder.active(1)[0]["num_output_tokens"] > 1)
    body = (await running.client.get("/status")).json()
    (row,) = body["active"]
    assert body["num_active"] == 1 and body["requests"] == [] and "finish_reason" not in row
    (decode,) = [phase for phase in row["timeline"] if phase["phase"] == "decode"]
    assert decode["end"] == pytest.approx(row["seconds"], abs=1e-3)
    await pending
    after = (await running.client.get("/status")).json()
    assert after["active"] == [] and after["requests"][0]["request_id"] == row["request_id"]


async def test_a_reader_gets_only_what_is_new(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())

    async def numbers(query: str) -> list[int]:
        return [row["number"] for row in (await running.client.get(f"/status{query}")).json()["requests"]]

    for _ in range(3):
        await running.chat(max_tokens=1)
    assert await numbers("") == [3, 2, 1]
    assert await numbers("?after=1") == [3, 2]
    assert await numbers("?after=3") == [] == await numbers("?limit=0")
    assert await numbers("?limit=1&after=0") == [3]
    assert await numbers("?limit=-1&after=x") == [3, 2, 1], "what makes no sense is not asked"


def test_a_chat_that_is_begun_anew_forgets_the_answer_that_still_came(tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node here to run the page's scripts")
    for file in STATIC.glob("*.js"):
        shutil.copy(file, tmp_path)
    (tmp_path / "package.json").write_text('{"type": "module"}')
    driver = Path(__file__).with_name("chat_page.mjs")
    ran = subprocess.run([node, driver, tmp_path / "chat.js"], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
