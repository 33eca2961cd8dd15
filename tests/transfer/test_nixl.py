"""The nixl transport, between processes, over tcp and over whatever UCX finds."""

import importlib.util
import signal
import threading
import time
from collections.abc import Iterator

import pytest

from biphase.errors import ConfigError, StaleHandleError, TransferFailedError
from biphase.transfer import frames, nixl, nixl_agent
from biphase.transfer.frames import Kind
from biphase.transfer.handshake import Hello, introduce
from biphase.transfer.sockets import connect_tcp
from tests.chaos.faults import wait_until
from tests.transfer.holders import Destination, Holder, HolderProcess, layout

SECONDS = 10.0
EVERY = [(block, 63 - block) for block in range(64)]

needs_nixl = pytest.mark.skipif(
    not any(importlib.util.find_spec(name.partition(".")[0]) for name in nixl_agent._MODULES),
    reason="NIXL is not installed",
)


@pytest.fixture(params=["all", "tcp"])
def process(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[HolderProcess]:
    monkeypatch.setenv("UCX_TLS", request.param)
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")
    process = HolderProcess(64, 262144, transports="nixl")
    yield process
    process.close()


@pytest.fixture
def far() -> Iterator[Destination]:
    destination = Destination(64, 262144, transports=("nixl",))
    yield destination
    destination.close()


@needs_nixl
def test_blocks_cross_and_stale_ones_do_not(process: HolderProcess, far: Destination) -> None:
    result = far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result()
    assert result.error is None and result.transport == "nixl"
    assert all(far.holds(dest, source) for source, dest in EVERY)
    assert far.reader.peers()[0].gigabytes_per_second > 0
    process.say("reuse 5")
    again = far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result()
    assert isinstance(again.error, StaleHandleError) and again.stale == (5,) and len(again.verified) == 63
    process.say("release")
    none = far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result()
    assert len(none.stale) == 64


@needs_nixl
@pytest.mark.parametrize("part", [1, 10, 63])
def test_a_long_read_goes_in_parts(
    process: HolderProcess, far: Destination, monkeypatch: pytest.MonkeyPatch, part: int
) -> None:
    monkeypatch.setattr(nixl, "_PART_BLOCKS", part)
    # A part of which nothing is left, and one of which some is.
    stale = [4, *range(10, 20)]
    for block in stale:
        process.say(f"reuse {block}")
    result = far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result()
    assert result.stale == tuple(stale) and len(result.verified) == 64 - len(stale)
    assert all(far.holds(EVERY[index][1], EVERY[index][0]) for index in result.verified)


@needs_nixl
def test_a_killed_holder_is_noticed(process: HolderProcess, far: Destination) -> None:
    assert far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result().error is None
    killer = threading.Timer(0.01, process.process.kill)
    killer.start()
    while process.process.poll() is None:
        result = far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result()
        assert all(far.holds(EVERY[index][1], EVERY[index][0]) for index in result.verified)
    killer.join()
    start = time.monotonic()
    result = far.reader.read(process.endpoint, process.lease_id, far.requests(EVERY), SECONDS).result()
    assert isinstance(result.error, TransferFailedError) and time.monotonic() - start < 8


@needs_nixl
@pytest.mark.parametrize("process", ["tcp"], indirect=True)
def test_nothing_lands_after_a_frozen_holder_was_given_up(
    process: HolderProcess, far: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = far.requests(EVERY)
    assert far.reader.read(process.endpoint, process.lease_id, requests, SECONDS).result().error is None
    far.memory.view[:] = bytes([Destination.POISON]) * far.memory.num_bytes
    start = nixl_agent.Agent.start

    def freeze_first(*arguments: object) -> object:
        process.freeze()
        return start(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(nixl_agent.Agent, "start", freeze_first)
    result = far.reader.read(process.endpoint, process.lease_id, requests, 1.0).result(8.0)
    assert isinstance(result.error, TransferFailedError) and "deadline" in result.error.message
    before = bytes(far.memory.view)
    process.signal(signal.SIGCONT)
    time.sleep(0.5)
    assert bytes(far.memory.view) == before


@needs_nixl
def test_an_idle_holder_uses_no_processor_and_a_reader_that_dies_lets_go_of_its_pins() -> None:
    holder = Holder(16, 4096, transports=("nixl",))
    assert holder.endpoint.transports == ("nixl",)
    deadline = time.monotonic() + SECONDS
    sock = connect_tcp(holder.endpoint.tcp_address, "holder", deadline)
    introduce(
        sock, holder.endpoint, Hello("d", "i", "prefill-0", "life-1", layout(4096), layout(4096), "nixl"), deadline
    )
    assert sock.recv_frame(deadline, frames.MAX_HELLO_BYTES)[0] is Kind.AGENT
    sock.send_bytes(frames.pack_header(Kind.DONE, 0), deadline)
    sock.send_bytes(
        frames.pack_read(holder.lease_id, frames.pack_words([0, 1]), frames.pack_words([0, 1]), Kind.PIN), deadline
    )
    assert sock.recv_frame(deadline, frames.MAX_READ_BLOCKS) == (Kind.DATA, bytes([0, 1]))
    holder.leases.release([holder.lease_id])
    assert holder.references() == 16, "pinned blocks outlive their lease"
    sock.close()
    assert wait_until(lambda: holder.references() == 0)
    used = time.process_time()
    time.sleep(0.5)
    # A thread that polls would have used most of the time.
    assert time.process_time() - used < 0.1
    holder.close()


def test_without_nixl_a_holder_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl._api",))
    with pytest.raises(ConfigError, match=r"biphase\[nixl\]"):
        Holder(transports=("nixl", "tcp"))


def test_without_nixl_a_reader_falls_back_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    holder = Holder()
    offered = [*holder.endpoint.transports, "nixl"]
    object.__setattr__(holder.endpoint, "transports", tuple(offered))
    monkeypatch.setattr(nixl_agent, "_MODULES", ("no_such_nixl._api",))
    for allow_fallback in (True, False):
        destination = Destination(transports=("nixl", "tcp"), allow_fallback=allow_fallback)
        result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
        assert result.transport == ("tcp" if allow_fallback else "none")
        assert (result.error is None) == allow_fallback
        destination.close()
    holder.close()


def test_a_holder_without_nixl_refuses_it_by_name() -> None:
    holder = Holder(transports=("tcp",))
    deadline = time.monotonic() + SECONDS
    sock = connect_tcp(holder.endpoint.tcp_address, "holder", deadline)
    with pytest.raises(TransferFailedError, match="does not offer nixl"):
        introduce(
            sock, holder.endpoint, Hello("d", "i", "prefill-0", "life-1", layout(4096), layout(4096), "nixl"), deadline
        )
    sock.close()
    holder.close()
