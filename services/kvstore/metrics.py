"""The store's numbers under the names of its /metrics, read off when somebody asks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain

from biphase.telemetry.metrics import Reading
from biphase.transfer.readings import block_readings, lease_readings
from services.kvstore.servicer import StoreServicer
from services.kvstore.store import BlockStore

_DISK = ("written", "read", "evicted", "skipped", "corrupt", "failed", "recovered")


def readings(store: BlockStore, servicer: StoreServicer) -> Iterator[Reading]:
    """The present values of what is not counted as it happens. From any thread."""
    regions = store.regions
    count = store.counters()
    pools = [region.pool for region in regions]
    used, cached = sum(pool.num_used for pool in pools), sum(pool.num_cached for pool in pools)
    leases = [region.leases.counts() for region in regions]
    publishers = [region.holdings.publisher for region in regions]
    return chain(
        block_readings(sum(pool.num_blocks for pool in pools), used, cached),
        lease_readings(leases, sum(counts.num_draining_blocks for counts in leases)),
        _index([asdict(publisher.stats) for publisher in publishers if publisher is not None]),
        [("biphase:index_unpublished", sum(p.num_unpublished for p in publishers if p is not None), {})],
        _store(count, servicer),
    )


def _index(stats: list[dict[str, int]]) -> Iterator[Reading]:
    yield "biphase:index_published", sum(one["num_events"] for one in stats), {}
    yield "biphase:index_publish_failures", sum(one["num_failures"] for one in stats), {}


def _store(count: dict[str, int], servicer: StoreServicer) -> Iterator[Reading]:
    yield "biphase:sent_bytes", count.get("num_bytes_sent", 0), {}
    yield "biphase:sent_blocks", count.get("num_blocks_sent", 0), {}
    yield "biphase:store_namespaces", count["num_namespaces"], {}
    yield "biphase:store_tenants", count.get("num_tenants", 0), {}
    yield "biphase:store_disk_blocks", count.get("disk_blocks", 0), {}
    yield "biphase:store_offers", servicer.num_offers, {"outcome": "received"}
    yield "biphase:store_offers", servicer.num_offers_refused, {"outcome": "refused"}
    for outcome in ("stored", "known", "unverified", "refused_full", "refused_frequency", "refused_quota", "evicted"):
        yield "biphase:store_blocks", count.get(f"num_{outcome}", 0), {"outcome": outcome}
    yield "biphase:store_lookups", count.get("num_lease_hashes", 0), {"outcome": "asked"}
    yield "biphase:store_lookups", count.get("num_lease_hits", 0), {"outcome": "hit"}
    for what in _DISK:
        yield "biphase:store_disk", count.get(f"disk_{what}", 0), {"what": what}
    for what in ("promoted", "read_ahead"):
        yield "biphase:store_disk", count.get(f"num_{what}", 0), {"what": what}
