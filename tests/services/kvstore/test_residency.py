"""Who gets into memory and who goes for it."""

from __future__ import annotations

import random

from biphase.cache.block_pool import BlockPool
from biphase.request import BlockHash
from services.kvstore.residency import COMMON_TENANT, Refusal, Residency
from tests.services.kvstore.conftest import h


def fill(residency: Residency, *names: int | str, tenant: str = COMMON_TENANT) -> list[Refusal]:
    """Offers blocks one by one, as a chain. Returns refusals."""
    refusals = []
    for name in names:
        residency.note([h(name)])
        place = residency.place(h(name), tenant)
        if isinstance(place, Refusal):
            refusals.append(place)
        else:
            residency.settle([(place, h(name))])
        residency.check_integrity()
    return refusals


def held(residency: Residency, *names: int | str) -> list[int | str]:
    return [name for name in names if residency.pool.lookup(h(name)) is not None]


def test_least_recently_used_goes_among_equals() -> None:
    residency = Residency(BlockPool(4))
    fill(residency, 1, 2, 3, 4)
    residency.touch([residency.pool.lookup(h(1)) or 0])
    assert fill(residency, 5, 6) == []
    assert held(residency, 1, 2, 3, 4, 5, 6) == [1, 4, 5, 6]
    assert residency.counts.num_evicted == 2


def test_a_block_seen_once_does_not_push_out_one_seen_often() -> None:
    residency = Residency(BlockPool(4))
    fill(residency, "hot1", "hot2", "hot3", "hot4")
    for _ in range(3):
        residency.note([h(f"hot{n}") for n in range(1, 5)])
    assert set(fill(residency, *range(50))) == {Refusal.FREQUENCY}
    assert len(held(residency, "hot1", "hot2", "hot3", "hot4")) == 4
    # Seen as often in the end, it gets in.
    for _ in range(4):
        fill(residency, "new")
    assert held(residency, "new") == ["new"]


def test_a_scan_goes_through_the_rare_ones_and_leaves_the_rest() -> None:
    residency = Residency(BlockPool(64))
    hot = [f"hot{n}" for n in range(40)]
    fill(residency, *hot)
    residency.note([h(name) for name in hot] * 3)
    # Now and then none of those it looks at is rare enough.
    assert len(fill(residency, *range(400))) < 60
    assert held(residency, *hot) == hot


def test_a_wanted_block_gets_in_whatever_it_costs() -> None:
    residency = Residency(BlockPool(2))
    fill(residency, "hot1", "hot2")
    residency.note([h("hot1"), h("hot2")] * 5)
    assert residency.place(h("cold"), COMMON_TENANT) is Refusal.FREQUENCY
    place = residency.place(h("cold"), COMMON_TENANT, wanted=True)
    assert isinstance(place, int)
    second = residency.place(h("cold2"), COMMON_TENANT, wanted=True)
    assert isinstance(second, int)
    # Both are being filled: nothing is left to evict.
    assert residency.place(h("cold3"), COMMON_TENANT, wanted=True) is Refusal.FULL
    residency.settle([(place, h("cold")), (second, None)])
    residency.check_integrity()
    assert held(residency, "cold", "cold2") == ["cold"]


def test_a_tenant_at_its_quota_pushes_out_its_own() -> None:
    residency = Residency(BlockPool(8), tenant_quota=0.5)
    fill(residency, "c1", "c2")
    fill(residency, *(f"a{n}" for n in range(10)), tenant="a")
    assert residency.num_blocks_of("a") == 4
    assert held(residency, *(f"a{n}" for n in range(10))) == ["a6", "a7", "a8", "a9"]
    assert held(residency, "c1", "c2") == ["c1", "c2"]
    fill(residency, "b1", "b2", tenant="b")
    assert residency.num_tenants == 2
    pool = residency.pool
    leased = [block_id for n in range(6, 10) for block_id, _ in pool.lease_chain([h(f"a{n}")])]
    assert residency.place(h("a11"), "a") is Refusal.QUOTA
    pool.release(leased)
    # Without a salt there is no quota.
    fill(residency, *(f"c{n}" for n in range(3, 20)))
    assert len(held(residency, *(f"c{n}" for n in range(20)))) == 8
    assert residency.num_tenants == 0


def test_clear_forgets_what_nobody_holds() -> None:
    residency = Residency(BlockPool(8))
    fill(residency, "c1", "c2")
    fill(residency, "a1", "a2", tenant="a")
    leased = [block_id for block_id, _ in residency.pool.lease_chain([h("a2")])]
    assert not residency.clear()
    residency.check_integrity()
    assert held(residency, "c1", "c2", "a1", "a2") == ["a2"] and residency.num_blocks_of("a") == 1
    residency.pool.release(leased)
    assert residency.clear()
    residency.check_integrity()
    assert residency.num_tenants == 0 and not residency.pool.num_cached


def test_random_operations() -> None:
    for seed in range(10):
        rng = random.Random(seed)
        residency = Residency(BlockPool(12), tenant_quota=0.4)
        pool = residency.pool
        filling: list[tuple[int, BlockHash]] = []
        leased: list[list[int]] = []
        for _ in range(400):
            move = rng.random()
            name = h(rng.randrange(40))
            tenant = ["", "a", "b"][name[0] % 3]
            residency.note([name])
            if move < 0.5:
                if pool.lookup(name) is None and name not in [held for _, held in filling]:
                    place = residency.place(name, tenant, wanted=rng.random() < 0.3)
                    if not isinstance(place, Refusal):
                        filling.append((place, name))
            elif move < 0.75 and filling:
                place, name = filling.pop(rng.randrange(len(filling)))
                residency.settle([(place, name if rng.random() < 0.8 else None)])
            elif move < 0.85:
                found = pool.lease_chain([name])
                residency.touch([block_id for block_id, _ in found])
                leased.append([block_id for block_id, _ in found])
            elif leased:
                pool.release(leased.pop())
            residency.check_integrity()
        for place, name in filling:
            residency.settle([(place, name)])
        for blocks in leased:
            pool.release(blocks)
        residency.check_integrity()
        assert pool.num_used == 0
