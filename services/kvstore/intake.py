"""How blocks come into a region from the workers that offer them.

Owns the reading of an offer: what of it is new and gets a place, the read, and what is kept of what arrived. Owns no
choice of who has to go (residency.py) and no RPC.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from biphase.index.events import HASH_BYTES
from biphase.request import BlockHash
from biphase.telemetry.events import event_logger
from biphase.transfer.channels import Handle, ReadRequest
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.reader import BlockReader
from services.kvstore.disk import DiskTier
from services.kvstore.residency import Refusal, Residency

log = event_logger(__name__)


@dataclass(frozen=True, slots=True)
class Taken:
    """What became of an offer, in blocks."""

    num_stored: int = 0
    num_known: int = 0
    num_refused: int = 0


@dataclass(slots=True)
class IntakeCounts:
    num_stored: int = 0
    num_known: int = 0
    # Placed, but not read or not verified.
    num_unverified: int = 0
    num_bytes_taken: int = 0


class Arrivals:
    """Blocks on their way in, from a worker or from disk. For one event loop."""

    def __init__(self) -> None:
        self._futures: dict[BlockHash, asyncio.Future[None]] = {}

    def __len__(self) -> int:
        return len(self._futures)

    def get(self, block_hash: BlockHash) -> asyncio.Future[None] | None:
        """Done when the block is held, or is not to come."""
        return self._futures.get(block_hash)

    def expect(self, block_hash: BlockHash) -> None:
        assert block_hash not in self._futures, "a block is on its way twice"
        self._futures[block_hash] = asyncio.get_running_loop().create_future()

    def settle(self, hashes: Iterable[BlockHash]) -> None:
        for block_hash in hashes:
            self._futures.pop(block_hash).set_result(None)

    async def wait(self) -> None:
        """Returns when nothing is on its way any more."""
        while self._futures:
            await asyncio.wait(list(self._futures.values()))


class Intake:
    """One per region, on its event loop."""

    def __init__(
        self,
        residency: Residency,
        reader: BlockReader,
        disk: DiskTier | None,
        arrivals: Arrivals,
        timeout_seconds: float,
    ) -> None:
        self._residency = residency
        self._pool = residency.pool
        self._reader = reader
        self._disk = disk
        self._arrivals = arrivals
        self._timeout_seconds = timeout_seconds
        self.counts = IntakeCounts()

    async def take(self, endpoint: Endpoint, lease_id: str, handles: Sequence[Handle], tenant: str) -> Taken:
        """Reads from a worker what is worth having of what it offers. Ends even when the offering call does not."""
        requests: list[ReadRequest] = []
        places: list[tuple[int, BlockHash]] = []
        num_known = 0
        with self._pool.lock:
            for handle in handles:
                block_hash = BlockHash(handle.block_hash)
                if len(block_hash) != HASH_BYTES:
                    continue
                self._residency.note([block_hash])
                block_id = self._pool.lookup(block_hash)
                if block_id is not None or self._arrivals.get(block_hash) is not None:
                    num_known += 1
                    if block_id is not None:
                        self._residency.touch([block_id])
                    continue
                place = self._residency.place(block_hash, tenant)
                if isinstance(place, Refusal):
                    continue
                requests.append(ReadRequest(len(places), handle.block_id, handle.generation, place))
                places.append((place, block_hash))
                self._arrivals.expect(block_hash)
        num_stored = 0
        if places:
            # Shielded: the blocks stay reserved until no byte can land in them any more.
            read = self._read(endpoint, lease_id, requests, places, tenant)
            num_stored = await asyncio.shield(asyncio.ensure_future(read))
        self.counts.num_known += num_known
        return Taken(num_stored, num_known, len(handles) - num_known - num_stored)

    async def _read(
        self,
        endpoint: Endpoint,
        lease_id: str,
        requests: Sequence[ReadRequest],
        places: Sequence[tuple[int, BlockHash]],
        tenant: str,
    ) -> int:
        result = await asyncio.wrap_future(self._reader.read(endpoint, lease_id, requests, self._timeout_seconds))
        verified = set(result.verified)
        with self._pool.lock:
            self._residency.settle(
                [(place, h if index in verified else None) for index, (place, h) in enumerate(places)]
            )
            if self._disk is not None:
                self._disk.want([places[index][1] for index in sorted(verified)], tenant)
        self._arrivals.settle(block_hash for _, block_hash in places)
        self.counts.num_stored += len(verified)
        self.counts.num_unverified += len(places) - len(verified)
        self.counts.num_bytes_taken += result.num_bytes
        log.debug(
            "offer_read",
            worker=endpoint.node_id,
            num_blocks=len(verified),
            seconds=result.seconds,
            transport=result.transport,
            error="" if result.error is None else result.error.message,
        )
        return len(verified)
