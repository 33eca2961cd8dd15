"""Exact block ids, eviction order, generations and references of the block pool."""

from __future__ import annotations

import random
import threading

import pytest

from biphase.cache.block_pool import BlockPool
from biphase.request import BlockHash


def content(n: int) -> BlockHash:
    return BlockHash(n.to_bytes(32, "big"))


def take(pool: BlockPool, n: int) -> list[int]:
    block_ids = pool.allocate(n)
    assert block_ids is not None
    pool.check_integrity()
    return block_ids


def give(pool: BlockPool, block_ids: list[int]) -> None:
    pool.release(block_ids)
    pool.check_integrity()


def test_gives_blocks_in_order_and_refuses_whole() -> None:
    pool = BlockPool(5)
    assert take(pool, 3) == [0, 1, 2]
    assert pool.allocate(3) is None
    assert (pool.num_free, pool.num_used) == (2, 3)
    assert take(pool, 2) == [3, 4]
    assert take(pool, 0) == []
    assert pool.allocate(1) is None


def test_reuses_the_warmest_blank_blocks_in_the_same_order() -> None:
    pool = BlockPool(6)
    first, second = take(pool, 3), take(pool, 2)
    give(pool, first)
    give(pool, second)
    assert take(pool, 4) == [3, 4, 0, 1]


def test_evicts_last_blocks_before_first_ones_and_old_requests_before_new_ones() -> None:
    pool = BlockPool(6)
    old, new = take(pool, 3), take(pool, 3)
    pool.commit_chain(old, [content(n) for n in (10, 11, 12)])
    pool.commit_chain(new, [content(n) for n in (20, 21, 22)])
    gone: list[BlockHash] = []
    pool.add_listener(removed=gone.extend)
    give(pool, old)
    give(pool, new)
    assert (pool.num_free, pool.num_cached) == (6, 6)
    assert [take(pool, 1)[0] for _ in range(6)] == [2, 1, 0, 5, 4, 3]
    assert gone == [content(n) for n in (12, 11, 10, 22, 21, 20)]


def test_blank_blocks_go_before_cached_ones() -> None:
    pool = BlockPool(4)
    a, b = take(pool, 2), take(pool, 2)
    pool.commit(a[0], content(1))
    give(pool, a)
    give(pool, b)
    assert take(pool, 3) == [2, 3, 1]
    assert pool.lookup(content(1)) == 0
    assert take(pool, 1) == [0]
    assert pool.lookup(content(1)) is None


def test_use_refreshes_a_cached_block() -> None:
    pool = BlockPool(3)
    blocks = take(pool, 3)
    pool.commit_chain(blocks, [content(n) for n in range(3)])
    give(pool, blocks)  # eviction order now 2, 1, 0
    assert pool.lease_chain([content(2)]) == [(2, 1)]
    pool.check_integrity()
    assert pool.num_cached == 2
    give(pool, [2])  # now 1, 0, 2
    assert take(pool, 3) == [1, 0, 2]


def test_lease_chain_takes_the_longest_held_prefix() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    pool.commit(blocks[0], content(0))
    pool.commit(blocks[2], content(2))
    assert pool.lease_chain([content(0), content(1), content(2)]) == [(0, 1)]
    assert [pool.ref_count(b) for b in blocks] == [2, 1, 1]
    assert pool.lease_chain([content(9)]) == []


def test_a_block_with_any_reference_is_not_reused() -> None:
    pool = BlockPool(2)
    blocks = take(pool, 2)
    pool.acquire([blocks[0]])  # posted I/O
    give(pool, blocks)  # its request was aborted
    assert take(pool, 1) == [1]
    assert pool.allocate(1) is None
    give(pool, [0])
    assert take(pool, 1) == [0]


def test_generation_changes_with_content_only() -> None:
    pool = BlockPool(1)
    assert pool.generations[0] == 0
    take(pool, 1)
    assert pool.generations[0] == 1
    pool.commit(0, content(1))
    give(pool, [0])
    pool.lease_chain([content(1)])
    give(pool, [0])
    assert pool.generations[0] == 1
    take(pool, 1)
    assert pool.generations[0] == 2


def test_of_free_copies_one_is_kept() -> None:
    pool = BlockPool(4)
    a, b = take(pool, 1), take(pool, 1)
    stored: list[tuple[BlockHash, int]] = []
    removed: list[BlockHash] = []
    pool.add_listener(stored=stored.extend, removed=removed.extend)
    pool.commit(a[0], content(1))
    pool.commit(b[0], content(1))
    assert stored == [(content(1), 0)]
    assert pool.num_hashes == 1
    give(pool, a)  # b holds it still
    assert (pool.num_cached, pool.lookup(content(1))) == (0, 1)
    give(pool, b)
    assert (pool.num_cached, pool.lookup(content(1))) == (1, 1)
    assert removed == []
    # A request computes it once more: the copy in use stays, the free one goes.
    c = take(pool, 1)
    pool.commit(c[0], content(1))
    pool.check_integrity()
    assert (pool.num_cached, pool.lookup(content(1))) == (0, c[0])
    assert removed == [] and len(stored) == 1


def test_commit_again_is_quiet() -> None:
    pool = BlockPool(2)
    stored: list[tuple[BlockHash, int]] = []
    pool.add_listener(stored=stored.extend)
    blocks = take(pool, 2)
    pool.commit_chain(blocks, [content(0), content(1)])
    pool.commit_chain(blocks, [content(0), content(1)])
    assert stored == [(content(0), 0), (content(1), 1)]


def test_retracts_before_reuse() -> None:
    pool = BlockPool(1)
    take(pool, 1)
    pool.commit(0, content(1))
    give(pool, [0])
    seen: list[tuple[int, int | None]] = []
    pool.add_listener(removed=lambda hashes: seen.append((pool.num_free, pool.lookup(hashes[0]))))
    take(pool, 1)
    assert seen == [(0, None)]


def test_freed_listener_hears_of_free_blocks_only() -> None:
    pool = BlockPool(2)
    calls: list[int] = []
    pool.add_listener(freed=lambda: calls.append(pool.num_free))
    blocks = take(pool, 2)
    pool.acquire(blocks[:1])
    give(pool, blocks[:1])
    assert calls == []
    give(pool, blocks)
    assert calls == [2]


def test_without_caching_nothing_is_findable() -> None:
    pool = BlockPool(2, enable_caching=False)
    blocks = take(pool, 2)
    pool.commit_chain(blocks, [content(0), content(1)])
    assert pool.lookup(content(0)) is None
    give(pool, blocks)
    assert (pool.num_cached, pool.num_free) == (0, 2)


def test_drop_cached_forgets_free_blocks() -> None:
    pool = BlockPool(3)
    removed: list[BlockHash] = []
    pool.add_listener(removed=removed.extend)
    blocks = take(pool, 3)
    pool.commit_chain(blocks, [content(n) for n in range(3)])
    give(pool, blocks[1:])
    assert pool.drop_cached() == 2
    pool.check_integrity()
    assert removed == [content(2), content(1)]
    assert pool.committed_hashes() == [content(0)]


def test_forget_takes_one_content_whatever_its_age() -> None:
    pool = BlockPool(4)
    removed: list[BlockHash] = []
    pool.add_listener(removed=removed.extend)
    blocks = take(pool, 4)
    pool.commit_chain(blocks, [content(n) for n in range(4)])
    give(pool, blocks)
    # The end of a chain goes first.
    assert pool.oldest_cached(3) == [(blocks[3], content(3)), (blocks[2], content(2)), (blocks[1], content(1))]
    pool.forget(blocks[1])
    assert removed == [content(1)]
    assert pool.lookup(content(1)) is None and pool.lookup(content(2)) == blocks[2]
    pool.check_integrity()
    assert take(pool, 1) == [blocks[1]]
    assert removed == [content(1)]


def test_misuse_is_caught() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="blank"):
        pool.acquire([0])
    with pytest.raises(AssertionError, match="released more often"):
        pool.release([0])
    with pytest.raises(AssertionError, match="committed by nobody"):
        pool.commit(0, content(0))


@pytest.mark.parametrize("enable_caching", [True, False])
def test_random_operations(enable_caching: bool) -> None:
    """10,000 operations against a plain model of what must hold: references, contents, listeners' view of the index."""
    rng = random.Random(20_24)
    pool = BlockPool(24, enable_caching)
    published: set[BlockHash] = set()
    pool.add_listener(
        stored=lambda items: published.update(h for h, _ in items),
        removed=lambda hashes: published.difference_update(hashes),
    )
    held: list[list[int]] = []
    truth: dict[int, BlockHash] = {}  # content a block has had since it was last allocated
    for _ in range(10_000):
        roll = rng.random()
        if roll < 0.35:
            want = rng.randint(1, 6)
            got = pool.allocate(want)
            assert (got is None) == (want > 24 - len({b for ids in held for b in ids}))
            if got is not None:
                assert not set(got) & {b for ids in held for b in ids}
                for block_id in got:
                    truth.pop(block_id, None)
                held.append(got)
        elif roll < 0.65 and held:
            pool.release(held.pop(rng.randrange(len(held))))
        elif roll < 0.85 and held:
            for block_id in rng.choice(held):
                if block_id not in truth:
                    truth[block_id] = content(rng.randint(0, 30))
                    pool.commit(block_id, truth[block_id])
        elif roll < 0.99:
            leased = pool.lease_chain([content(rng.randint(0, 30)) for _ in range(3)])
            assert enable_caching or not leased
            if leased:
                assert all(pool.generations[b] == generation for b, generation in leased)
                held.append([b for b, _ in leased])
        else:
            pool.drop_cached()
        for block_id in range(24):
            assert pool.ref_count(block_id) == sum(ids.count(block_id) for ids in held)
        assert published == set(pool.committed_hashes())
        for block_hash in published:
            found = pool.lookup(block_hash)
            assert found is not None and truth[found] == block_hash
        pool.check_integrity()


def test_threads_share_the_pool() -> None:
    pool = BlockPool(32)
    failures: list[BaseException] = []

    def churn(seed: int) -> None:
        rng = random.Random(seed)
        try:
            for _ in range(2_000):
                blocks = pool.allocate(rng.randint(1, 5))
                if blocks is None:
                    continue
                generations = [pool.generations[b] for b in blocks]
                pool.commit_chain(blocks, [content(rng.randint(0, 40)) for _ in blocks])
                leased = [b for b, _ in pool.lease_chain([content(rng.randint(0, 40))])]
                assert generations == [pool.generations[b] for b in blocks]
                pool.release(leased)
                pool.release(blocks)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=churn, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert pool.num_used == 0
    pool.check_integrity()


def test_what_is_made_oldest_goes_first_the_last_named_before_all() -> None:
    pool = BlockPool(6)
    blocks = take(pool, 6)
    pool.commit_chain(blocks, [content(n) for n in range(6)])
    give(pool, blocks)  # eviction order now 5, 4, 3, 2, 1, 0
    pool.acquire([2])
    pool.make_oldest([0, 1, 2])
    pool.check_integrity()
    assert [block_id for block_id, _ in pool.oldest_cached(6)] == [1, 0, 5, 4, 3]
    give(pool, [2])
    assert take(pool, 6) == [1, 0, 5, 4, 3, 2]


def test_acquires_what_is_held_of_any_contents() -> None:
    pool = BlockPool(4)
    blocks = take(pool, 3)
    pool.commit_chain(blocks, [content(n) for n in range(3)])
    give(pool, blocks)
    found = pool.acquire_held([content(2), content(7), content(0)])
    assert found == [(content(2), 2, 1), (content(0), 0, 1)]
    assert pool.num_used == 2
    pool.check_integrity()
    give(pool, [2, 0])
