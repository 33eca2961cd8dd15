"""Reads that go wrong, over real sockets and with real processes: never a wrong block, never a hang."""

import random
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from biphase.errors import BiphaseError, CorruptBlockError, StaleHandleError, TransferFailedError
from biphase.transfer.channels import ReadResult
from biphase.transfer.handshake import NUM_PATTERNS, PATTERN_BYTES
from tests.chaos.faults import Fault, FaultKind, FaultProxy, wait_until
from tests.transfer.holders import Destination, Holder, HolderProcess

SECONDS = 10.0
# What a read may take beyond its deadline on a busy machine: a few ticks.
SLACK_SECONDS = 1.0


class Broken:
    """A holder behind a proxy, a reader in front of it, and a connection that has worked once."""

    def __init__(self, num_blocks: int = 16, block_bytes: int = 4096) -> None:
        self.holder = Holder(num_blocks, block_bytes)
        assert self.holder.server.endpoint.tcp_address
        self.proxy = FaultProxy(self.holder.endpoint.tcp_address)
        self.endpoint = replace(self.holder.endpoint, tcp_address=self.proxy.address)
        self.destination = Destination(num_blocks, block_bytes, transports=("tcp",))
        assert self.read([(0, 0)]).error is None

    def read(self, pairs: list[tuple[int, int]], seconds: float = SECONDS) -> ReadResult:
        future = self.destination.reader.read(
            self.endpoint, self.holder.lease_id, self.destination.requests(pairs), seconds
        )
        start = time.monotonic()
        result = future.result(seconds + SLACK_SECONDS)
        assert time.monotonic() - start < seconds + SLACK_SECONDS
        return result

    def assert_verified_blocks_are_right(self, result: ReadResult, pairs: list[tuple[int, int]]) -> None:
        for index in result.verified:
            source, dest = pairs[index]
            assert self.destination.holds(dest, source), f"block {index} was verified and is wrong"

    def close(self) -> None:
        self.destination.close()
        self.proxy.close()
        self.holder.close()


@pytest.fixture
def broken() -> Iterator[Broken]:
    broken = Broken()
    yield broken
    broken.close()


ALL = [(block, 15 - block) for block in range(16)]


def test_a_truncated_payload_fails_and_keeps_nothing_unverified(broken: Broken) -> None:
    fresh = Destination(transports=("tcp",))
    broken.proxy.arm(Fault(FaultKind.TRUNCATE, after_bytes=NUM_PATTERNS * PATTERN_BYTES + 3 * 4096))
    result = fresh.reader.read(broken.endpoint, broken.holder.lease_id, fresh.requests(ALL), SECONDS).result()
    assert isinstance(result.error, TransferFailedError) and "closed the connection" in result.error.message
    assert result.verified == ()
    assert not fresh.is_untouched(15), "it was in the middle of the blocks"
    fresh.close()


def test_a_connection_that_worked_before_is_worth_a_second_one(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.TRUNCATE, after_bytes=3 * 4096))
    assert broken.read(ALL).error is None and broken.proxy.num_connections == 2


def test_a_truncation_keeps_what_was_read_before() -> None:
    broken = Broken(num_blocks=64, block_bytes=65536)
    pairs = [(block, block) for block in range(64)]
    broken.proxy.arm(Fault(FaultKind.TRUNCATE, after_bytes=40 * 65536))
    result = broken.read(pairs)
    assert isinstance(result.error, TransferFailedError)
    assert result.verified == tuple(range(16)) and result.num_bytes == 16 * 65536
    broken.assert_verified_blocks_are_right(result, pairs)
    again = broken.read(pairs[16:])
    assert again.error is None and len(again.verified) == 48, "the next read connects anew"
    broken.close()


def test_a_flipped_bit_is_found_by_the_checksum(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.CORRUPT, after_bytes=2 * 4096 + 500))
    result = broken.read(ALL)
    assert isinstance(result.error, CorruptBlockError)
    assert result.corrupt == (2,) and len(result.verified) == 15
    broken.assert_verified_blocks_are_right(result, ALL)


def test_blocks_that_change_places_on_the_way_are_found(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.REORDER, after_bytes=12 + 16, num_bytes=4096))
    result = broken.read(ALL)
    assert isinstance(result.error, CorruptBlockError) and result.corrupt == (0, 1)


def test_a_reset_connection_fails_at_once(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.RESET, after_bytes=3 * 4096 + 28))
    broken.proxy.refuse()
    start = time.monotonic()
    result = broken.read(ALL)
    assert isinstance(result.error, TransferFailedError) and time.monotonic() - start < 2
    assert wait_until(lambda: broken.holder.references() == 16), "the holder let go of what it was sending"


def test_a_connection_that_died_while_idle_costs_a_reconnect(broken: Broken) -> None:
    broken.proxy.cut()
    assert broken.read(ALL).error is None and broken.proxy.num_connections == 2


def test_nobody_listening_fails_at_once(broken: Broken) -> None:
    broken.proxy.refuse()
    broken.proxy.cut()
    start = time.monotonic()
    assert isinstance(broken.read(ALL).error, TransferFailedError) and time.monotonic() - start < 2


def test_a_dead_link_fails_at_the_deadline_and_nothing_lands_afterwards(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.DROP, after_bytes=5 * 4096))
    start = time.monotonic()
    result = broken.read(ALL, 0.5)
    assert time.monotonic() - start > 0.4
    assert isinstance(result.error, TransferFailedError) and "deadline" in result.error.message
    before = bytes(broken.destination.memory.view)
    broken.proxy.cut()
    time.sleep(0.1)
    assert bytes(broken.destination.memory.view) == before


def test_a_delay_within_the_deadline_is_only_slow(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.DELAY, after_bytes=100, seconds=0.3))
    result = broken.read(ALL)
    assert result.error is None and result.seconds >= 0.3


def test_a_trickle_ends_at_the_deadline(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.SLOW, num_bytes=4096))
    result = broken.read(ALL, 0.6)
    assert isinstance(result.error, TransferFailedError) and "deadline" in result.error.message


def test_reads_behind_a_stuck_one_end_at_their_own_deadlines(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.DROP))
    requests = broken.destination.requests(ALL)
    start = time.monotonic()
    futures = [
        broken.destination.reader.read(broken.endpoint, broken.holder.lease_id, requests, seconds)
        for seconds in (1.5, 0.3, 0.6)
    ]
    ended = []
    for future in (futures[1], futures[2], futures[0]):
        assert isinstance(future.result(5).error, TransferFailedError)
        ended.append(time.monotonic() - start)
    assert ended[0] < 0.9 and ended[1] < 1.2 and ended[2] < 2.5


def test_closing_ends_a_stuck_read(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.DROP))
    future = broken.destination.reader.read(
        broken.endpoint, broken.holder.lease_id, broken.destination.requests(ALL), 60.0
    )
    time.sleep(0.2)
    start = time.monotonic()
    broken.destination.reader.close()
    assert isinstance(future.result(0).error, TransferFailedError) and time.monotonic() - start < 1


def test_a_holder_that_is_given_up_fails_its_reads_at_once(broken: Broken) -> None:
    broken.proxy.arm(Fault(FaultKind.DROP))
    requests = broken.destination.requests(ALL)
    futures = [
        broken.destination.reader.read(broken.endpoint, broken.holder.lease_id, requests, 60.0) for _ in range(3)
    ]
    time.sleep(0.2)
    start = time.monotonic()
    broken.destination.reader.drop(broken.endpoint)
    assert all(isinstance(future.result(1).error, TransferFailedError) for future in futures)
    assert time.monotonic() - start < 1
    assert broken.read(ALL).error is None, "it is connected to anew when it is needed again"


def test_a_generation_that_moves_while_its_block_is_sent_is_stale(
    broken: Broken, monkeypatch: pytest.MonkeyPatch
) -> None:
    # After the check, and before what follows the last payload.
    monkeypatch.setattr(broken.holder.server._sender, "_on_sent", lambda blocks, size: broken.holder.pool.reuse(3))
    result = broken.read(ALL)
    assert isinstance(result.error, StaleHandleError) and result.stale == (3,) and len(result.verified) == 15


def test_a_lease_that_ends_in_mid_read_stops_it_there_and_what_was_sent_is_right(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = Broken(num_blocks=512, block_bytes=65536)
    pairs = [(block, block) for block in range(512)]
    sender = broken.holder.server._sender
    summing, is_sending, may_go_on = sender._sum, threading.Event(), threading.Event()

    def waits(*addresses: int) -> None:
        is_sending.set()
        assert may_go_on.wait(SECONDS)
        summing(*addresses)

    monkeypatch.setattr(sender, "_sum", waits)
    future = broken.destination.reader.read(
        broken.endpoint, broken.holder.lease_id, broken.destination.requests(pairs), SECONDS
    )
    assert is_sending.wait(SECONDS)
    broken.holder.leases.release([broken.holder.lease_id])
    assert broken.holder.references() == 512, "a batch is on its way: nothing can be reused yet"
    may_go_on.set()
    result = future.result(SECONDS)
    assert isinstance(result.error, StaleHandleError)
    assert 0 < len(result.verified) < 512 and len(result.verified) + len(result.stale) == 512
    broken.assert_verified_blocks_are_right(result, pairs)
    assert all(broken.destination.is_untouched(pairs[index][1]) for index in result.stale)
    assert wait_until(lambda: broken.holder.references() == 0)
    broken.close()


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_never_give_a_wrong_block_or_a_late_answer(seed: int) -> None:
    rng = random.Random(seed)
    broken = Broken(num_blocks=32, block_bytes=16384)
    for _ in range(25):
        pairs = list(zip(rng.sample(range(32), 24), rng.sample(range(32), 24), strict=True))
        fault = Fault.draw(rng, 24 * 16384)
        broken.proxy.arm(fault)
        result = broken.read(pairs, 0.4)
        broken.proxy.take()
        assert (result.error is None) == (len(result.verified) == 24), fault
        assert set(result.verified).isdisjoint(result.stale) and set(result.verified).isdisjoint(result.corrupt)
        broken.assert_verified_blocks_are_right(result, pairs)
        before = bytes(broken.destination.memory.view)
        time.sleep(0.01)
        assert bytes(broken.destination.memory.view) == before, fault
    assert wait_until(lambda: broken.holder.references() == 32)
    broken.holder.leases.check_integrity()
    broken.close()


# ---- a holder in a process of its own


@pytest.fixture
def process() -> Iterator[HolderProcess]:
    process = HolderProcess(num_blocks=64, block_bytes=262144)
    yield process
    process.close()


@pytest.fixture(params=["tcp", "shm"])
def far(request: pytest.FixtureRequest) -> Iterator[Destination]:
    destination = Destination(64, 262144, transports=(request.param,))
    yield destination
    destination.close()


EVERY = [(block, 63 - block) for block in range(64)]


def read(
    process: HolderProcess, far: Destination, seconds: float = SECONDS, pairs: list[tuple[int, int]] = EVERY
) -> ReadResult:
    future = far.reader.read(process.endpoint, process.lease_id, far.requests(pairs), seconds)
    return future.result(seconds + SLACK_SECONDS)


def transport(far: Destination) -> str:
    return far.reader._context.transports[0]


def test_blocks_cross_between_processes(process: HolderProcess, far: Destination) -> None:
    result = read(process, far)
    assert result.error is None and result.transport == transport(far)
    assert all(far.holds(dest, source) for source, dest in EVERY)
    process.say("reuse 5")
    again = read(process, far)
    assert again.stale == (5,) and len(again.verified) == 63


def test_a_holder_frozen_before_the_handshake(process: HolderProcess, far: Destination) -> None:
    process.freeze()
    start = time.monotonic()
    result = read(process, far, 0.5)
    assert isinstance(result.error, TransferFailedError) and time.monotonic() - start > 0.4
    process.signal(signal.SIGCONT)
    time.sleep(0.2)
    assert all(far.is_untouched(dest) for dest in range(64)), "nothing lands after the future is done"
    assert read(process, far).error is None, "and the next read goes well"


def test_a_holder_frozen_after_the_handshake(process: HolderProcess, far: Destination) -> None:
    assert read(process, far, pairs=[(0, 0)]).error is None
    process.freeze()
    result = read(process, far, 0.5)
    if transport(far) == "shm":
        # Reading needs nothing of the holder.
        assert result.error is None and all(far.holds(dest, source) for source, dest in EVERY)
    else:
        assert isinstance(result.error, TransferFailedError) and "deadline" in result.error.message
    before = bytes(far.memory.view)
    process.signal(signal.SIGCONT)
    time.sleep(0.2)
    assert bytes(far.memory.view) == before


def test_a_killed_holder_is_noticed_at_once(process: HolderProcess, far: Destination) -> None:
    assert read(process, far, pairs=[(0, 0)]).error is None
    process.signal(signal.SIGKILL)
    assert wait_until(lambda: far.reader.peers()[0].transport == "none"), "its memory is not kept mapped"
    start = time.monotonic()
    assert isinstance(read(process, far).error, TransferFailedError) and time.monotonic() - start < 1


@pytest.mark.parametrize("delay_seconds", [0.0, 0.002, 0.01])
def test_a_holder_killed_in_mid_read(process: HolderProcess, far: Destination, delay_seconds: float) -> None:
    assert read(process, far, pairs=[(0, 0)]).error is None
    killer = threading.Timer(delay_seconds, process.process.kill)
    killer.start()
    results = [read(process, far, 2.0) for _ in range(3)]
    killer.join()
    for result in results:
        assert all(far.holds(EVERY[index][1], EVERY[index][0]) for index in result.verified)
        assert result.error is None or isinstance(result.error, TransferFailedError)


def test_a_holder_restarted_on_the_same_port_is_somebody_else(far: Destination) -> None:
    first = HolderProcess(64, 262144)
    assert read(first, far, pairs=[(0, 0)]).error is None
    first.close()
    port = int(first.endpoint.tcp_address.rpartition(":")[2])
    second = HolderProcess(64, 262144, incarnation="life-2", port=port)
    try:
        errors: list[BiphaseError | None] = [read(first, far, 2.0).error for _ in range(2)]
        if transport(far) == "tcp":
            assert all(isinstance(error, StaleHandleError) and "life-2" in error.message for error in errors)
        else:
            assert all(isinstance(error, TransferFailedError) for error in errors), "its socket had another name"
        assert all(far.is_untouched(dest) for dest in range(1, 64))
        assert read(second, far).error is None
    finally:
        second.close()
