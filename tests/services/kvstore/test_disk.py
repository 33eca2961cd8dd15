"""The disk tier: files that say when they are damaged, bounded size, a memory beyond restarts."""

from __future__ import annotations

import asyncio
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from biphase.index.connection import connect
from biphase.index.embedded import EmbeddedValkey
from biphase.index.follower import IndexFollower
from biphase.index.view import IndexView
from biphase.request import BlockHash
from services.kvstore import disk as disk_module
from services.kvstore.disk import DiskTier
from services.kvstore.diskfile import HEADER_BYTES, BadBlockFileError, read_block, write_block
from tests.services.kvstore.conftest import (
    BLOCK_BYTES,
    StandInWorker,
    StartStore,
    block_files,
    chain,
    content,
    eventually,
    h,
    layout,
)

MakeWorker = Callable[..., StandInWorker]
NAMESPACE = layout().namespace


class Listener:
    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def on_disk(self, block_hash: BlockHash) -> None:
        assert block_hash not in self.held
        self.held.add(block_hash)

    def off_disk(self, block_hash: BlockHash) -> None:
        self.held.remove(block_hash)


class Tier:
    def __init__(self, folder: Path, num_blocks: int = 100) -> None:
        self.listener = Listener()
        self.lock = threading.RLock()
        self.num_borrowed = 0
        # Evicted from memory before their turn.
        self.gone: set[bytes] = set()
        capacity = num_blocks * (HEADER_BYTES + BLOCK_BYTES)
        self.tier = DiskTier(folder, layout(), capacity, self.listener, self.lock, self._source)

    def put(self, *hashes: BlockHash, tenant: str = "") -> None:
        self.tier.want(hashes, tenant)

    def _source(self, block_hash: BlockHash) -> tuple[memoryview, Callable[[], None]] | None:
        if block_hash in self.gone:
            return None
        self.num_borrowed += 1
        return memoryview(content(block_hash)), self._give_back

    def _give_back(self) -> None:
        self.num_borrowed -= 1

    def read(self, block_hash: BlockHash) -> bool:
        into = memoryview(bytearray(BLOCK_BYTES))
        found = self.tier.read(block_hash, into)
        assert not found or bytes(into) == content(block_hash)
        return found

    def settled(self) -> set[bytes]:
        assert self.tier.wait_idle(10)
        with self.lock:
            assert set(self.tier.hashes()) == self.listener.held
            assert self.num_borrowed == 0
        return self.listener.held

    def close(self) -> None:
        self.tier.close(5.0)


def test_file_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "block"
    write_block(path, h(1), NAMESPACE, "a" * 64, memoryview(content(h(1))))
    into = memoryview(bytearray(BLOCK_BYTES))
    assert read_block(path, h(1), NAMESPACE, into).tenant == "a" * 64
    assert bytes(into) == content(h(1))
    assert [p.name for p in tmp_path.iterdir()] == ["block"]


@pytest.mark.parametrize(
    "where", [0, 9, 20, 60, 90, HEADER_BYTES, HEADER_BYTES + BLOCK_BYTES // 2, HEADER_BYTES + BLOCK_BYTES - 1]
)
def test_every_flipped_bit_that_matters_is_noticed(tmp_path: Path, where: int) -> None:
    path = tmp_path / "block"
    write_block(path, h(1), NAMESPACE, "", memoryview(content(h(1))))
    raw = bytearray(path.read_bytes())
    raw[where] ^= 1 << random.Random(where).randrange(8)
    path.write_bytes(raw)
    with pytest.raises(BadBlockFileError):
        read_block(path, h(1), NAMESPACE, memoryview(bytearray(BLOCK_BYTES)))


@pytest.mark.parametrize("size", [0, 10, HEADER_BYTES, HEADER_BYTES + 100, HEADER_BYTES + BLOCK_BYTES - 1])
def test_a_torn_file_is_noticed(tmp_path: Path, size: int) -> None:
    path = tmp_path / "block"
    write_block(path, h(1), NAMESPACE, "", memoryview(content(h(1))))
    os.truncate(path, size)
    with pytest.raises(BadBlockFileError):
        read_block(path, h(1), NAMESPACE, memoryview(bytearray(BLOCK_BYTES)))


def test_a_block_under_another_name_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "block"
    write_block(path, h(1), NAMESPACE, "", memoryview(content(h(1))))
    into = memoryview(bytearray(BLOCK_BYTES))
    for block_hash, namespace in ((h(2), NAMESPACE), (h(1), b"\x02" * 32)):
        with pytest.raises(BadBlockFileError):
            read_block(path, block_hash, namespace, into)
    with pytest.raises(BadBlockFileError):
        read_block(path, h(1), NAMESPACE, into[:-1])


def test_writes_reads_and_survives(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.put(h(1), h(2), tenant="t" * 64)
    assert tier.settled() == {h(1), h(2)}
    assert tier.read(h(1)) and not tier.read(h(3))
    assert tier.tier.tenant_of(h(1)) == "t" * 64
    tier.put(h(1))
    tier.settled()
    assert tier.tier.counts.num_written == 2
    tier.close()
    again = Tier(tmp_path)
    assert again.settled() == {h(1), h(2)}
    assert again.tier.counts.num_recovered == 2
    assert again.tier.tenant_of(h(2)) == "t" * 64
    assert again.read(h(2))
    again.close()


def test_cleared_blocks_leave_index_and_disk(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.put(h(1), h(2))
    assert tier.settled() == {h(1), h(2)}
    tier.tier.clear()
    assert tier.settled() == set() and not tier.read(h(1))
    tier.close()
    again = Tier(tmp_path)
    assert again.settled() == set()
    again.close()


def test_what_is_cleared_while_it_is_verified_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path)
    tier.put(*(h(n) for n in range(6)))
    tier.settled()
    tier.close()
    reading, goes_on = threading.Event(), threading.Event()
    num_read = 0

    def slow(*arguments: Any) -> Any:
        nonlocal num_read
        found = read_block(*arguments)
        num_read += 1
        if num_read == 3:
            reading.set()
            assert goes_on.wait(10)
        return found

    monkeypatch.setattr(disk_module, "read_block", slow)
    again = Tier(tmp_path)
    assert reading.wait(10)
    again.tier.clear()
    # Computed anew, it is no earlier life's.
    again.put(h("new"))
    goes_on.set()
    assert again.settled() == {h("new")}
    assert [path.name for path in tmp_path.glob("??/*")] == [h("new").hex()]
    again.close()


def test_what_is_cleared_while_it_is_written_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = Tier(tmp_path)
    writing, goes_on = threading.Event(), threading.Event()

    def slow(*arguments: Any) -> None:
        write_block(*arguments)
        writing.set()
        assert goes_on.wait(10)

    monkeypatch.setattr(disk_module, "write_block", slow)
    tier.put(h(1))
    assert writing.wait(10)
    tier.tier.clear()
    goes_on.set()
    assert tier.settled() == set()
    assert list(tmp_path.glob("??/*")) == []
    tier.put(h(1))
    assert tier.settled() == {h(1)} and tier.read(h(1))
    tier.close()


def test_size_is_bounded_last_used_stays_across_lives(tmp_path: Path) -> None:
    tier = Tier(tmp_path, num_blocks=4)
    tier.put(*(h(n) for n in range(4)))
    tier.settled()
    for number, path in ((n, tmp_path / h(n).hex()[:2] / h(n).hex()) for n in range(4)):
        os.utime(path, (1000 + number, 1000 + number))
    assert tier.read(h(0))
    tier.put(h(10))
    # Of a chain the last block counts as the oldest.
    assert tier.settled() == {h(0), h(1), h(2), h(10)}
    assert len(list(tmp_path.glob("??/*"))) == 4
    tier.close()
    smaller = Tier(tmp_path, num_blocks=2)
    assert smaller.settled() == {h(0), h(10)}
    assert len(list(tmp_path.glob("??/*"))) == 2
    smaller.close()


def test_damage_is_dropped_and_counted_at_restart_and_at_read(tmp_path: Path) -> None:
    tier = Tier(tmp_path)
    tier.put(*(h(n) for n in range(5)))
    tier.settled()
    paths = {n: tmp_path / h(n).hex()[:2] / h(n).hex() for n in range(5)}

    def flip(number: int) -> None:
        raw = bytearray(paths[number].read_bytes())
        raw[HEADER_BYTES + 1000] ^= 4
        paths[number].write_bytes(raw)

    flip(0)
    assert not tier.read(h(0))
    assert not tier.read(h(0))
    paths[1].unlink()
    assert not tier.read(h(1))
    assert tier.settled() == {h(2), h(3), h(4)}
    assert (tier.tier.counts.num_corrupt, tier.tier.counts.num_failed) == (1, 1)
    tier.close()
    flip(2)
    os.truncate(paths[3], 5000)
    beside = paths[4].with_suffix(".part")
    beside.write_bytes(b"half")
    (tmp_path / "00" / "README").parent.mkdir(exist_ok=True)
    (tmp_path / "00" / "README").write_text("not ours")
    again = Tier(tmp_path)
    assert again.settled() == {h(4)}
    assert again.tier.counts.num_corrupt == 2
    assert not beside.exists() and not paths[2].exists() and not paths[3].exists()
    assert (tmp_path / "00" / "README").exists()
    # What was dropped can come again.
    again.put(h(2))
    assert again.settled() == {h(2), h(4)} and again.read(h(2))
    again.close()


def test_a_disk_that_refuses_is_counted_and_lets_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_module, "_FAILED_WRITE_PAUSE_SECONDS", 0.01)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    tier = Tier(tmp_path)
    monkeypatch.setattr(disk_module, "write_block", full)
    tier.put(h(1), h(2))
    assert tier.settled() == set()
    assert tier.tier.counts.num_failed == 2
    monkeypatch.undo()
    tier.put(h(3))
    assert tier.settled() == {h(3)}
    tier.close()


def test_blocks_gone_before_their_turn_and_blocks_too_many_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk_module, "_MAX_WANTED", 3)
    tier = Tier(tmp_path)
    tier.gone = {h(1)}
    with tier.lock:
        # Under the lock the writer takes nothing. Of too long a chain the beginning is taken.
        tier.put(*(h(n) for n in range(5)))
    assert tier.settled() == {h(0), h(2)}
    assert tier.tier.counts.num_skipped == 3
    tier.close()


def test_random_operations_and_restarts(tmp_path: Path) -> None:
    rng = random.Random(3)
    tier = Tier(tmp_path, num_blocks=12)
    damaged: set[str] = set()
    for _ in range(300):
        block_hash = h(rng.randrange(30))
        move = rng.random()
        if move < 0.5:
            tier.settled()
            tier.put(block_hash)
            if block_hash not in tier.tier:
                damaged.discard(block_hash.hex())
        elif move < 0.8:
            tier.read(block_hash)
        elif move < 0.9:
            held = tier.settled()
            assert len(held) <= 12
            for found in [BlockHash(held_hash) for held_hash in held]:
                assert tier.read(found) is (found.hex() not in damaged)
        elif move < 0.93:
            for path in rng.sample(sorted(tmp_path.glob("??/*")), 1) if tier.settled() else []:
                path.write_bytes(path.read_bytes()[: rng.randrange(HEADER_BYTES + BLOCK_BYTES)])
                damaged.add(path.name)
        elif move < 0.96:
            tier.close()
            tier = Tier(tmp_path, num_blocks=12)
    tier.settled()
    tier.close()


# ---- as part of a store


async def test_evicted_from_memory_found_on_disk(
    start_store: StartStore, make_worker: MakeWorker, tmp_path: Path
) -> None:
    store = await start_store("--capacity", "1MiB", "--disk-path", str(tmp_path))
    worker = make_worker()
    first, second = chain("a", 16), chain("b", 16)
    for count, hashes in ((16, first), (32, second)):
        assert await worker.offer(store, hashes) == (16, 0, 0)
        disk = store.process.store.regions[0].disk
        await eventually(lambda: len(disk) == count)  # noqa: B023
    await eventually(lambda: disk.wait_idle(0.01))
    reader = make_worker("reader")
    # Eight blocks at most come back for one lease: half of the memory.
    assert await reader.fetch(store, first) == 8
    # The rest follows by itself.
    region = store.process.store.regions[0]
    await eventually(lambda: region.counts.num_read_ahead == 8)
    counters = await store.counters()
    assert counters["num_promoted"] == counters["disk_read"] == 16
    assert await reader.fetch(store, first) == 16
    assert (await store.counters())["num_promoted"] == 16


async def test_index_names_what_is_in_memory_or_on_disk(
    start_store: StartStore, make_worker: MakeWorker, store_valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    client = connect(store_valkey.url)
    view = IndexView()
    following = asyncio.create_task(IndexFollower(client, "default", layout().namespace, view, check_seconds=0.2).run())
    flags = (
        "--capacity", "1MiB", "--disk-path", str(tmp_path), "--redis-url", store_valkey.url, "--node-id", "s",
        "--disk-capacity", str(30 * (HEADER_BYTES + BLOCK_BYTES)),
    )  # fmt: skip
    store = await start_store(*flags)
    worker = make_worker()
    for name in "abcd":
        await worker.offer(store, chain(name, 10))
        region = store.process.store.regions[0]
        await eventually(lambda: region.disk.wait_idle(0.01))  # noqa: B023
    universe = [block_hash for name in "abcd" for block_hash in chain(name, 10)]
    await eventually(lambda: {h for h in universe if view.holders_of(h)} == set(region.holdings.hashes()))
    assert len(region.holdings.hashes()) == 30
    await store.stop()
    await eventually(lambda: view.holders() == {})
    (damaged, *_) = block_files(tmp_path)
    damaged.write_bytes(damaged.read_bytes()[:-1])
    again = await start_store(*flags)
    await eventually(lambda: view.num_blocks(view_name(view)) == 29)
    assert (await again.counters())["disk_corrupt"] == 1
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    await client.aclose()


def view_name(view: IndexView) -> str:
    return next(iter(view.holders()), "")


async def test_a_namespace_that_only_stands_on_disk_makes_room(
    start_store: StartStore, make_worker: MakeWorker, tmp_path: Path
) -> None:
    store = await start_store("--disk-path", str(tmp_path))
    await make_worker().offer(store, chain("a", 3))
    await store.stop()
    again = await start_store("--disk-path", str(tmp_path))
    assert len(again.process.store.regions) == 1
    other = make_worker("other", layout(b"\x02" * 32))
    assert await other.offer(again, chain("a", 3)) == (3, 0, 0)
    assert [folder.name for folder in tmp_path.iterdir() if folder.is_dir()] == ["02" * 32]
    # In use now, it stays.
    with pytest.raises(Exception, match="max-namespaces"):
        await make_worker("third", layout(b"\x03" * 32)).offer(again, chain("a", 3))
