"""The store's BlockHolder service: leases for readers, offers from workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from biphase.errors import InvalidRequestError, OverloadedError, UnavailableError
from biphase.index.events import HASH_BYTES
from biphase.request import BlockHash
from biphase.rpc.errors import unary_method
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2
from biphase.telemetry import tracing
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.layout import KVLayout
from services.kvstore.residency import COMMON_TENANT
from services.kvstore.store import BlockStore

_MAX_TENANT_CHARACTERS = 64


class StoreServicer(blocks_pb2_grpc.BlockHolderServicer):
    """
    Args:
        accepts: whether offers are taken; False while draining.
        max_offers: read at once. A store under pressure refuses: the worker has the block anyway.
    """

    def __init__(self, store: BlockStore, accepts: Callable[[], bool], max_offers: int) -> None:
        self._store = store
        self._accepts = accepts
        self._max_offers = max_offers
        self.num_offers_running = 0
        self.num_offers = 0
        self.num_offers_refused = 0
        self.num_leases = 0

    @unary_method
    async def Lease(self, request: blocks_pb2.LeaseRequest, context: Any) -> blocks_pb2.LeaseResponse:
        self.num_leases += 1
        with tracing.serving("store lease", {"biphase.num_blocks": len(request.block_hashes)}):
            return await self._lease(request)

    async def _lease(self, request: blocks_pb2.LeaseRequest) -> blocks_pb2.LeaseResponse:
        region = self._store.region(KVLayout.from_proto(request.layout))
        if region is None:
            return blocks_pb2.LeaseResponse()
        hashes = [BlockHash(raw) for raw in request.block_hashes]
        if any(len(block_hash) != HASH_BYTES for block_hash in hashes):
            raise InvalidRequestError(f"block_hashes are {HASH_BYTES} bytes each", param="block_hashes")
        lease, found = await region.lease(hashes, request.reader_node_id, request.reader_incarnation)
        if lease is None:
            return blocks_pb2.LeaseResponse()
        return blocks_pb2.LeaseResponse(
            lease_id=lease.lease_id,
            lease_seconds=region.leases.lease_seconds,
            blocks=[
                common_pb2.BlockHandle(
                    index=request.first_index + offset, block_id=block_id, generation=generation, block_hash=block_hash
                )
                for offset, ((block_id, generation), block_hash) in enumerate(zip(found, hashes, strict=False))
            ],
            endpoint=region.endpoint,
        )

    @unary_method
    async def Renew(self, request: blocks_pb2.RenewRequest, context: Any) -> blocks_pb2.RenewResponse:
        unknown: list[str] = list(request.lease_ids)
        for region in self._store.regions:
            if unknown:
                unknown = list(region.leases.renew(unknown))
        return blocks_pb2.RenewResponse(expired=unknown)

    @unary_method
    async def Release(self, request: blocks_pb2.ReleaseRequest, context: Any) -> blocks_pb2.ReleaseResponse:
        for region in self._store.regions:
            region.leases.release(list(request.lease_ids))
        return blocks_pb2.ReleaseResponse()

    @unary_method
    async def Offer(self, request: blocks_pb2.OfferRequest, context: Any) -> blocks_pb2.OfferResponse:
        self.num_offers += 1
        if not self._accepts():
            raise UnavailableError("the store is going down and takes no offers")
        if self.num_offers_running >= self._max_offers:
            self.num_offers_refused += 1
            raise OverloadedError(f"the store reads {self._max_offers} offers at once; offer again later")
        if len(request.tenant) > _MAX_TENANT_CHARACTERS or not request.tenant.isascii():
            raise InvalidRequestError("tenant is a digest of at most 64 characters", param="tenant")
        endpoint = Endpoint.from_proto(request.endpoint)
        self.num_offers_running += 1
        try:
            with tracing.serving("store offer", {"biphase.num_blocks": len(request.blocks)}):
                region = await self._store.region_for_offer(endpoint.layout)
                taken = await region.take(endpoint, request.lease_id, request.blocks, request.tenant or COMMON_TENANT)
        finally:
            self.num_offers_running -= 1
        return blocks_pb2.OfferResponse(
            num_stored=taken.num_stored, num_known=taken.num_known, num_refused=taken.num_refused
        )
