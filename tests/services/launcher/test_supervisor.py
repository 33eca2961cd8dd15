"""The supervisor over real, tiny processes."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest

from biphase.errors import ConfigError, UnavailableError
from services.launcher.child import ChildSpec
from services.launcher.output import ChildOutput
from services.launcher.supervisor import RestartPolicy, Supervisor
from tests.services.launcher.fake_children import (
    CRASHES,
    DRAINS,
    IGNORES_SIGTERM,
    RECOVERS,
    REFUSES,
    SERVES,
    Lines,
    fake,
    is_running,
)

QUICK = RestartPolicy(first_wait_seconds=0.02, max_wait_seconds=0.1, start_timeout_seconds=20)


@asynccontextmanager
async def supervising(
    *specs: ChildSpec, policy: RestartPolicy = QUICK, lines: Lines | None = None
) -> AsyncIterator[Supervisor]:
    """A supervisor whose children are gone at the end, whatever the test did."""
    supervisor = Supervisor(specs, cast(ChildOutput, lines or Lines()), policy)
    try:
        yield supervisor
    finally:
        await supervisor.kill()


async def until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


async def test_start_returns_the_ready_lines() -> None:
    async with supervising(fake("a", "ready(address='here:1'); signal.pause()"), fake("b", SERVES)) as supervisor:
        lines = await supervisor.start()
        assert lines["a"]["address"] == "here:1"
        assert lines["a"]["pid"] == supervisor.pids()["a"]
        assert lines.keys() == {"a", "b"}


async def test_stages_start_one_after_the_other(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    first = fake("first", f"time.sleep(0.3); append({trace!r}, 'first'); ready(); signal.pause()", start_stage=0)
    second = fake("second", f"append({trace!r}, 'second'); ready(); signal.pause()", start_stage=1)
    async with supervising(second, first) as supervisor:
        await supervisor.start()
        assert Path(trace).read_text().split() == ["first", "second"]


async def test_a_killed_child_comes_back_as_another_process() -> None:
    async with supervising(fake("a", SERVES), fake("b", SERVES)) as supervisor:
        before = (await supervisor.start())["a"]["pid"]
        others = supervisor.pids()["b"]
        os.kill(before, signal.SIGKILL)
        await until(lambda: supervisor.pids().get("a") not in (None, before))
        assert supervisor.num_restarts() == 1
        assert supervisor.pids()["b"] == others


async def test_a_restart_is_logged_once_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    async with supervising(fake("a", SERVES)) as supervisor:
        pid = (await supervisor.start())["a"]["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: supervisor.pids().get("a") not in (None, pid))
    restarts = [record for record in caplog.records if record.message == "child_restarting"]
    assert len(restarts) == 1
    fields = restarts[0].event_fields  # type: ignore[attr-defined]
    assert fields["child"] == "a"
    assert fields["ended"] == "killed by SIGKILL"


async def test_a_crash_during_the_start_is_tried_again(tmp_path: Path) -> None:
    async with supervising(fake("a", RECOVERS.format(trace=str(tmp_path / "trace")))) as supervisor:
        assert "a" in await supervisor.start()
        assert supervisor.num_restarts() == 1


async def test_a_crash_loop_during_the_start_gives_up_with_the_reason() -> None:
    async with supervising(fake("a", CRASHES), fake("b", SERVES)) as supervisor:
        with pytest.raises(UnavailableError, match=r"a did not start 3 times \(exit code 1\): Traceback: something"):
            await supervisor.start()


async def test_refused_settings_end_the_start_at_once_with_the_childs_sentence() -> None:
    lines = Lines()
    async with supervising(fake("a", REFUSES), lines=lines) as supervisor:
        with pytest.raises(ConfigError, match=r"^The model is in pieces\.$"):
            await supervisor.start()
        assert supervisor.num_restarts() == 0
        # Whoever gets the error says it; it is not printed a second time.
        assert lines.of("a") == []


async def test_several_refusals_raise_one_error() -> None:
    async with supervising(*(fake(name, REFUSES) for name in "abc")) as supervisor:
        with pytest.raises(ConfigError):
            await supervisor.start()


async def test_a_program_that_cannot_be_run_is_named() -> None:
    spec = ChildSpec("a", ("/nonexistent/program",), {})
    async with supervising(spec) as supervisor:
        with pytest.raises(UnavailableError, match="/nonexistent/program"):
            await supervisor.start()


async def test_a_child_that_never_gets_ready_is_ended() -> None:
    policy = RestartPolicy(first_wait_seconds=0.02, start_timeout_seconds=0.3, max_start_failures=2)
    async with supervising(fake("a", "time.sleep(60)"), policy=policy) as supervisor:
        with pytest.raises(UnavailableError, match="a did not start 2 times"):
            await supervisor.start()


async def test_after_the_start_a_crash_loop_goes_on_ever_slower(tmp_path: Path) -> None:
    flag = str(tmp_path / "trace")
    script = f"""
if os.path.exists({flag!r}): sys.exit(1)
append({flag!r}, 'once'); ready(); time.sleep(0.1); sys.exit(1)
"""
    async with supervising(fake("a", script)) as supervisor:
        await supervisor.start()
        await until(lambda: supervisor.num_restarts() >= 5)


def test_waits_double_up_to_the_limit() -> None:
    policy = RestartPolicy(first_wait_seconds=0.5, max_wait_seconds=30)
    assert [policy.wait_seconds(n) for n in (1, 2, 3, 7, 8, 2000)] == [0.5, 1, 2, 30, 30, 30]


async def test_stop_ends_the_stages_in_order(tmp_path: Path) -> None:
    trace = str(tmp_path / "trace")
    specs = [fake(n, DRAINS.format(trace=trace, name=n), stop_stage=k) for k, n in enumerate(("front", "mid", "back"))]
    async with supervising(*reversed(specs)) as supervisor:
        await supervisor.start()
        pids = supervisor.pids().values()
        assert await supervisor.stop(10) is True
        assert Path(trace).read_text().split() == ["front", "mid", "back"]
        assert not any(is_running(pid) for pid in pids)


async def test_stop_kills_what_does_not_end() -> None:
    async with supervising(fake("a", IGNORES_SIGTERM)) as supervisor:
        pid = (await supervisor.start())["a"]["pid"]
        assert await supervisor.stop(0.3) is False
        assert not is_running(pid)


async def test_stop_ends_a_stopped_child_too(tmp_path: Path) -> None:
    async with supervising(fake("a", DRAINS.format(trace=str(tmp_path / "trace"), name="a"))) as supervisor:
        os.kill((await supervisor.start())["a"]["pid"], signal.SIGSTOP)
        assert await supervisor.stop(10) is True


async def test_stop_while_children_start() -> None:
    async with supervising(fake("a", "time.sleep(60)")) as supervisor:
        start = asyncio.create_task(supervisor.start())
        await until(lambda: "a" in supervisor.pids())
        pid = supervisor.pids()["a"]
        assert await supervisor.stop(10) is True
        assert not is_running(pid)
        start.cancel()


async def test_stop_while_a_child_waits_to_restart() -> None:
    policy = RestartPolicy(first_wait_seconds=60)
    async with supervising(fake("a", SERVES), policy=policy) as supervisor:
        pid = (await supervisor.start())["a"]["pid"]
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not supervisor.pids())
        assert await supervisor.stop(10) is True


async def test_output_is_passed_on_line_by_line() -> None:
    lines = Lines()
    async with supervising(fake("a", "say('EVENT one'); ready(); say('free text'); signal.pause()"), lines=lines) as s:
        await s.start()
        await until(lambda: lines.of("a") == ["EVENT one", "free text"])


async def test_children_have_process_groups_of_their_own() -> None:
    async with supervising(fake("a", SERVES)) as supervisor:
        pid = (await supervisor.start())["a"]["pid"]
        assert os.getpgid(pid) == pid
