"""`biphase status --watch`: what it draws, and how it behaves in a terminal, in a pipe and while nobody answers."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pty
import threading
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from biphase.errors import ConfigError, UnavailableError
from services.launcher import status
from services.launcher.timebar import bar, render
from services.launcher.watch import screen, watch


def node(number: int, role: str = "decode", **more: Any) -> dict[str, Any]:
    return {"id": f"{role}-{number}", "role": role, "state": "ready", "running": 2, "waiting": 1,
            "blocks": {"total": 1000, "used": 250}, "prefix_cache_queries_tokens": 10,
            "prefix_cache_hits_tokens": 5} | more  # fmt: skip


def row(number: int, **more: Any) -> dict[str, Any]:
    timeline = [
        {"phase": "queue", "start": 0.0, "end": 0.25},
        {"phase": "chunk", "start": 0.25, "end": 0.5, "node": "prefill-0"},
        {"phase": "read", "start": 0.4, "end": 0.5},
        {"phase": "decode", "start": 0.5, "end": 1.0},
    ]
    return {"request_id": f"r-{number}", "finish_reason": "stop", "num_prompt_tokens": 1200, "num_output_tokens": 30,
            "seconds": 1.0, "ttft_seconds": 0.5, "arrival_time": 1000.0, "prefill_node": "prefill-0",
            "decode_node": "decode-0", "num_cached_tokens": 16, "timeline": timeline} | more  # fmt: skip


STATUS: dict[str, Any] = {
    "time": 1010.0,
    "gateway": {"id": "gateway-0", "role": "gateway", "state": "ready", "running": 3, "waiting": 0},
    "model": {"names": ["smol"]},
    "totals": {"num_finished": 10, "num_failed": 1, "num_output_tokens": 300, "num_prompt_tokens": 100,
               "num_cached_tokens": 25},
    "nodes": [node(0, "prefill"), node(0), node(1, state="draining")],
    "active": [row(9, finish_reason=None)],
    "requests": [row(3), row(2, finish_reason="error", error_code="unavailable"), row(1, num_moves=1)],
}  # fmt: skip


def drawn(status: dict[str, Any], width: int = 140, height: int = 40, problem: str = "") -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    before = copy.deepcopy(status) | {"time": status["time"] - 2}
    before["totals"]["num_output_tokens"] -= 50
    console.print(screen(status, before, problem, width, height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined,no-any-return]


def test_it_shows_nodes_figures_and_requests() -> None:
    lines = drawn(STATUS)
    assert lines[0].split()[:3] == ["biphase", "smol", "ready"]
    assert "25.0 tok/s" in lines[0] and "25% cached" in lines[0] and "1 failed" in lines[0]
    by_id = {line.split()[0]: line for line in lines if line.startswith(("decode-", "prefill-"))}
    assert "draining" in by_id["decode-1"] and "25%" in by_id["prefill-0"] and "50%" in by_id["decode-0"]
    marks = [line[0] for line in lines if "1,200→30" in line]
    assert marks == ["*", "+", "x", "r"]
    assert any("unavailable" in line for line in lines) and any("500 ms" in line for line in lines)
    assert drawn(STATUS, problem="nobody is there")[1].startswith("! nobody is there")


@pytest.mark.parametrize(("width", "height"), [(40, 15), (60, 20), (80, 24), (100, 30), (200, 60)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    many = STATUS | {
        "nodes": [node(k, role) for role in ("decode", "prefill") for k in range(32)] + [node(0, "kvstore")],
        "requests": [row(k) for k in range(200)],
    }
    lines = drawn(many, width, height)
    assert len(lines) <= height and max(map(len, lines)) <= width
    # However little room there is, each pool is seen.
    assert {line.split("-")[0] for line in lines if "-" in line} >= {"decode", "prefill", "kvstore"}


def test_nothing_there_yet() -> None:
    lines = drawn({"time": 1.0, "gateway": {"state": "waiting_for_workers"}, "totals": {"num_output_tokens": 50},
                   "nodes": [], "requests": []})  # fmt: skip
    assert "waiting for workers" in lines[0] and "No request yet." in "\n".join(lines)


def test_a_bar_has_a_column_for_each_part_of_the_scale() -> None:
    text = render(row(1), scale=2.0, width=40)
    assert text.plain == "█" * 20 + " " * 20
    styles = [str(text.get_style_at_offset(Console(), column)) for column in (0, 7, 15)]
    assert styles == ["bright_black", "blue", "green"]
    assert render(row(1), scale=0.5, width=10).plain == "█" * 9 + "»"
    assert render(row(1, timeline=[]), scale=1.0, width=4).plain == "────"
    assert bar(0.5, 8).plain == "████····" and bar(2.0, 3).plain == "███" and bar(-1.0, 3).plain == "···"


def _ends_after(looks: int) -> Callable[[float], None]:
    """A sleep in which Ctrl-C comes, after so many looks."""
    left = [looks]

    def sleep(seconds: float) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt

    return sleep


def test_in_a_pipe_it_is_plain_tables_until_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([STATUS, UnavailableError("nobody is there"), STATUS])

    def fetch() -> dict[str, Any]:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    out = io.StringIO()
    assert watch(fetch, status.show, out, interval=1.0, sleep=_ends_after(3)) == 0
    assert out.getvalue().count("decode-1") == 2 and "\x1b" not in out.getvalue()
    assert capsys.readouterr().err == "biphase status: nobody is there\n"


def test_a_reader_that_has_enough_ends_it() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as out:
        assert watch(lambda: STATUS, status.show, out, interval=1.0, sleep=lambda seconds: None) == 0


def test_a_terminal_is_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    master, slave = pty.openpty()
    written: list[bytes] = []

    def read() -> None:
        # The terminal's end is an error on its other side.
        with contextlib.suppress(OSError):
            while part := os.read(master, 1 << 16):
                written.append(part)

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(slave, "w") as out:
        assert watch(lambda: STATUS, status.show, out, interval=1.0, sleep=_ends_after(2)) == 0
    reader.join()
    os.close(master)
    shown = b"".join(written).decode()
    # The other screen and back, the cursor away and back; the figures drawn in between.
    assert shown.index("\x1b[?1049h") < shown.index("decode-1") < shown.index("\x1b[?1049l")
    assert shown.rindex("\x1b[?25l") < shown.rindex("\x1b[?25h")


def test_the_first_failure_is_an_error() -> None:
    def fetch() -> dict[str, Any]:
        raise UnavailableError("nobody is there")

    with pytest.raises(UnavailableError):
        watch(fetch, status.show, io.StringIO(), interval=1.0)
    with pytest.raises(ConfigError, match="do not go together"):
        status.main(["--watch", "--json"])
    with pytest.raises(ConfigError, match="interval"):
        status.main(["--watch", "--interval", "0"])
