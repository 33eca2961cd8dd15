"""What only the shared memory transport has: descriptors, uids, and copies that nobody at the holder sees."""

import ctypes
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from biphase.errors import StaleHandleError, TransferFailedError
from biphase.transfer import shm
from biphase.transfer.shm import Mapping
from tests.chaos.faults import wait_until
from tests.transfer.holders import Destination, Holder, content

SECONDS = 10.0


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.close()


@pytest.fixture
def destination() -> Iterator[Destination]:
    destination = Destination(transports=("shm",))
    yield destination
    destination.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def num_mappings() -> int:
    return sum("memfd:biphase" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_block_reused_during_its_copy_is_stale(
    holder: Holder, destination: Destination, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shm._copy

    def copy_and_reuse(*arguments: object) -> None:
        copy(*arguments)  # type: ignore[arg-type]
        if arguments[1] == 1:
            holder.reuse(4)

    monkeypatch.setattr(shm, "_copy", copy_and_reuse)
    pairs = [(3, 0), (4, 1), (5, 2)]
    result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests(pairs), SECONDS).result()
    assert isinstance(result.error, StaleHandleError)
    assert (result.verified, result.stale) == ((0, 2), (1,))


def test_a_holder_that_reuses_blocks_all_the_time_never_gives_a_wrong_one() -> None:
    holder, destination = Holder(4, 65536), Destination(4, 65536, transports=("shm",))
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for block in range(4):
                holder.reuse(block)

    thread = threading.Thread(target=churn)
    thread.start()
    num_verified = num_stale = 0
    until = time.monotonic() + 1.5
    while time.monotonic() < until:
        generations = list(holder.generations.table)
        requests = [
            replace(request, generation=generations[request.block_id])
            for request in destination.requests([(block, block) for block in range(4)])
        ]
        result = destination.reader.read(holder.endpoint, holder.lease_id, requests, SECONDS).result()
        for block in result.verified:
            got = bytes(destination.memory.block(block))
            # A block is filled after its generation moved: torn only if the writer was still at it, as no holder
            # would be with a block it has announced. What must not come is another generation's content.
            newer = content(block, generations[block] + 1, 65536)
            assert got[:4] != newer[:4]
        num_verified += len(result.verified)
        num_stale += len(result.stale)
    stop.set()
    thread.join()
    assert num_stale, "the writer was never in the way"
    destination.close()
    holder.close()


def test_connecting_and_leaving_leaves_no_descriptor_and_no_mapping(holder: Holder) -> None:
    Destination(transports=("shm",)).close()
    gc.collect()
    before = num_descriptors(), num_mappings()
    for _ in range(3):
        destination = Destination(transports=("shm",))
        destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
        assert num_mappings() > before[1]
        destination.close()
        assert wait_until(lambda: holder.server.stats().num_connections == 0)
        del destination
    gc.collect()
    assert (num_descriptors(), num_mappings()) == before


def test_nothing_of_it_can_be_seen_in_the_file_system(holder: Holder, destination: Destination) -> None:
    destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
    assert not [name for name in os.listdir("/dev/shm") if "biphase" in name]


@pytest.mark.skipif(os.getuid() != 0, reason="needs to become another user")
def test_another_user_is_turned_away(holder: Holder, caplog: pytest.LogCaptureFixture) -> None:
    code = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(5); s.connect('\\0' + sys.argv[1])\n"
        "sys.exit(0 if s.recv(1) == b'' else 1)"
    )
    subprocess.run([sys.executable, "-c", code, holder.endpoint.shm_address], check=True)
    assert any(getattr(record, "event_fields", {}).get("peer") == "uid 65534" for record in caplog.records)


@pytest.mark.skipif(os.getuid() != 0, reason="needs another user")
def test_another_users_socket_is_not_trusted(destination: Destination, holder: Holder) -> None:
    code = (
        "import os, socket, sys; os.setuid(65534)\n"
        "s = socket.socket(socket.AF_UNIX); s.bind('\\0biphase-squatter'); s.listen(); print('ready', flush=True)\n"
        "c, _ = s.accept(); c.recv(1)"
    )
    squatter = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert squatter.stdout is not None and squatter.stdout.readline() == b"ready\n"
    fake = replace(holder.endpoint, shm_address="biphase-squatter")
    result = destination.reader.read(fake, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
    assert isinstance(result.error, TransferFailedError) and "uid 65534" in result.error.message
    squatter.wait(5)
    squatter.stdout.close()


def test_memory_that_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(TransferFailedError, match="not what it claims"):
        Mapping(fd, 4096)
    os.close(fd)


def test_memory_smaller_than_claimed_is_not_mapped(holder: Holder) -> None:
    fd = holder.memory.open_read_only()
    with pytest.raises(TransferFailedError, match="not what it claims"):
        Mapping(fd, holder.memory.num_bytes + 1)
    mapping = Mapping(fd, holder.memory.num_bytes)
    assert mapping.view.readonly and bytes(mapping.view[:4096]) == content(0, 0, 4096)
    assert ctypes.string_at(mapping.address, 16) == content(0, 0, 4096)[:16]
    mapping.close()
    os.close(fd)
    assert mmap.PAGESIZE >= 4096
