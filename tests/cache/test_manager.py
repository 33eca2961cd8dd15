"""Exact block ids, prefix hits, promises and tenants of the KV cache manager."""

from __future__ import annotations

import pytest

from biphase.cache.block_pool import BlockPool
from biphase.cache.blocks import num_blocks_for
from biphase.cache.hashing import extend_block_hashes, root_hash
from biphase.cache.manager import KVCacheManager
from biphase.request import Request, RequestId, SamplingParams

SIZE = 4


def make(num_blocks: int = 10, enable_caching: bool = True) -> KVCacheManager:
    return KVCacheManager(BlockPool(num_blocks, enable_caching), block_size=SIZE, namespace=b"model")


def request(name: str, tokens: range | list[int], salt: str = "", **sampling: int) -> Request:
    return Request(RequestId(name), list(tokens), SamplingParams(**sampling), cache_salt=salt)  # type: ignore[arg-type]


def admit(manager: KVCacheManager, req: Request, new: int = 1_000, reserved: int = 0) -> bool:
    manager.prepare(req)
    admitted = manager.admit(req, num_new_tokens=new, num_total_tokens=req.num_tokens, num_reserved_blocks=reserved)
    manager.check_integrity()
    return admitted


def compute(manager: KVCacheManager, req: Request, num_tokens: int | None = None) -> None:
    req.num_computed_tokens = req.num_tokens if num_tokens is None else num_tokens
    manager.cache_blocks(req)
    manager.check_integrity()


def test_num_blocks_for() -> None:
    assert [num_blocks_for(n, 4) for n in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


def test_shares_full_blocks_and_never_the_last_token() -> None:
    manager = make()
    a = request("a", range(10))
    assert admit(manager, a)
    assert manager.block_ids(a) == [0, 1, 2]
    compute(manager, a)
    b = request("b", [*range(8), 99])
    assert admit(manager, b)
    assert (manager.block_ids(b), b.num_computed_tokens, b.num_cached_tokens) == ([0, 1, 3], 8, 8)
    # All of c's tokens are cached, but the last one has to run for its logits: its block is computed again.
    c = request("c", range(8))
    assert admit(manager, c)
    assert (manager.block_ids(c), c.num_computed_tokens) == ([0, 4], 4)
    compute(manager, c)
    assert (manager.num_query_tokens, manager.num_hit_tokens) == (27, 12)
    assert manager.num_held_blocks == 5
    for req in (a, b, c):
        manager.free(req)
        manager.check_integrity()
    assert manager.pool.num_used == 0


def test_a_chunk_takes_its_blocks_and_promises_the_rest() -> None:
    manager = make(num_blocks=8)
    a = request("a", range(20))  # 5 blocks
    assert admit(manager, a, new=6)
    assert manager.block_ids(a) == [0, 1]
    b = request("b", range(100, 113))  # 4 blocks: 6 are free, 3 of them promised
    assert not admit(manager, b)
    assert not manager.has_blocks(b)
    c = request("c", range(200, 212))  # 3 blocks
    assert not admit(manager, c, reserved=1)
    assert admit(manager, c)
    assert manager.block_ids(c) == [2, 3, 4]
    assert manager.allocate_slots(a, 20)
    assert manager.block_ids(a) == [0, 1, 5, 6, 7]
    assert not manager.allocate_slots(a, 21)
    manager.check_integrity()
    manager.free(c)
    assert manager.allocate_slots(a, 21)
    manager.check_integrity()


def test_cached_blocks_of_a_hit_are_not_counted_as_free() -> None:
    manager = make(num_blocks=4)
    a = request("a", range(16))
    assert admit(manager, a)
    compute(manager, a)
    manager.free(a)
    assert manager.pool.num_free == 4
    # 3 blocks hit, 2 more needed, 1 would be left.
    b = request("b", [*range(12), *range(50, 58)])
    assert not admit(manager, b)
    assert (manager.pool.num_cached, manager.pool.num_free) == (4, 4)
    assert admit(manager, request("c", [*range(12), 50]))


def test_eviction_takes_the_oldest_requests_last_blocks() -> None:
    manager = make(num_blocks=6)
    a, b = request("a", range(12)), request("b", range(100, 112))
    for req in (a, b):
        assert admit(manager, req)
        compute(manager, req)
    manager.free(a)
    manager.free(b)
    d = request("d", range(200, 216))
    assert admit(manager, d)
    assert manager.block_ids(d) == [2, 1, 0, 5]
    assert manager.num_cached_tokens(request("again", range(12))) == 0
    probe = request("b again", range(100, 112))
    manager.prepare(probe)
    assert (manager.num_cached_tokens(probe), probe.num_uncached_tokens) == (8, 4)


def test_tenants_and_namespaces_share_nothing() -> None:
    manager = make()
    a = request("a", range(9), salt="one")
    assert admit(manager, a)
    compute(manager, a)
    for salt in ("", "two"):
        other = request(salt, range(9), salt=salt)
        manager.prepare(other)
        assert manager.num_cached_tokens(other) == 0
    same = request("same", range(9), salt="one")
    manager.prepare(same)
    assert manager.num_cached_tokens(same) == 8
    elsewhere = KVCacheManager(manager.pool, block_size=SIZE, namespace=b"other model")
    foreign = request("foreign", range(9), salt="one")
    elsewhere.prepare(foreign)
    assert elsewhere.num_cached_tokens(foreign) == 0


def test_generated_tokens_become_findable_under_the_wire_hashes() -> None:
    manager = make()
    a = request("a", range(6))
    assert admit(manager, a)
    compute(manager, a)
    for token in range(6, 14):
        a.output_token_ids.append(token)
        assert manager.allocate_slots(a, a.num_tokens)
        compute(manager, a)
    want: list[bytes] = []
    extend_block_hashes(want, root_hash(b"model", ""), list(range(14)), SIZE)  # type: ignore[arg-type]
    assert a.block_hashes == want
    # The next turn of a chat.
    turn = request("turn", [*range(14), 77, 78])
    assert admit(manager, turn)
    assert turn.num_cached_tokens == 12


def test_prompt_logprobs_compute_everything() -> None:
    manager = make()
    a = request("a", range(9))
    assert admit(manager, a)
    compute(manager, a)
    b = request("b", range(9), prompt_logprobs=1)
    assert admit(manager, b)
    assert b.num_computed_tokens == 0


def test_a_preempted_request_finds_its_own_blocks_and_is_counted_once() -> None:
    manager = make()
    a = request("a", range(9))
    assert admit(manager, a)
    compute(manager, a)
    manager.free(a)
    a.num_computed_tokens, a.num_preemptions = 0, 1
    assert admit(manager, a)
    assert (a.num_computed_tokens, a.num_cached_tokens) == (8, 0)
    assert (manager.num_query_tokens, manager.num_hit_tokens) == (9, 0)


@pytest.mark.parametrize("enable_caching", [True, False])
def test_announced_blocks_carry_generation_and_hash(enable_caching: bool) -> None:
    manager = make(enable_caching=enable_caching)
    a = request("a", range(10))
    a.prefill_only = True
    assert admit(manager, a)
    compute(manager, a)
    blocks = manager.computed_blocks(a, 1, 3)
    assert [(b.index, b.block_id, b.generation) for b in blocks] == [(1, 1, 1), (2, 2, 1)]
    assert [b.block_hash for b in blocks] == [a.block_hashes[1], b""]
    index, block_id, generation, block_hash = blocks[0]
    assert (index, block_id, generation, len(block_hash)) == (1, 1, 1, 32)


def test_without_caching_nothing_is_hashed() -> None:
    manager = make(enable_caching=False)
    a = request("a", range(10))
    assert admit(manager, a)
    compute(manager, a)
    assert a.block_hashes == []
    manager.free(a)
    assert manager.pool.num_cached == 0


def test_blocks_that_only_a_lease_holds_are_draining() -> None:
    manager = make()
    a = request("a", range(10))
    assert admit(manager, a)
    manager.pool.acquire([1, 2])
    manager.free(a)
    manager.check_integrity()
    assert (manager.num_draining_blocks, manager.pool.num_used) == (2, 2)
    manager.pool.release([1, 2])
    assert manager.num_draining_blocks == 0


def test_waste_counts_empty_slots_once() -> None:
    manager = make()
    a = request("a", range(10))
    assert admit(manager, a)
    compute(manager, a)
    assert manager.waste_ratio([a]) == pytest.approx(2 / 12)
    b = request("b", [*range(8), 99])
    assert admit(manager, b)
    compute(manager, b)
    assert manager.waste_ratio([a, b]) == pytest.approx(5 / 16)
    assert manager.waste_ratio([]) == 0.0
