"""Numbers of any block holder, worker or store, under the names of its /metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from biphase.telemetry.metrics import Reading
from biphase.transfer.leases import LeaseCounts


def block_readings(total: int, used: int, cached: int) -> Iterator[Reading]:
    """Blocks of any holder, by state."""
    for state, count in (("total", total), ("used", used), ("cached", cached)):
        yield "biphase:kv_blocks", count, {"state": state}


def lease_readings(tables: Sequence[LeaseCounts], num_draining_blocks: int) -> Iterator[Reading]:
    """Leases of any holder, over all its tables."""
    yield "biphase:leases", sum(counts.num_leases for counts in tables), {}
    yield "biphase:leased_blocks", sum(counts.num_leased_blocks for counts in tables), {}
    yield "biphase:draining_blocks", num_draining_blocks, {}
    ended = {
        "released": sum(counts.num_released for counts in tables),
        "reader_gone": sum(counts.num_reader_gone for counts in tables),
        "expired": sum(counts.num_expired for counts in tables),
    }
    for how, count in ended.items():
        yield "biphase:leases_ended", count, {"how": how}
