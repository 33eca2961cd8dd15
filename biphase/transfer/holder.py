"""The control half of the transfer primitive, as every block holder answers it: Lease, Renew, Release.

Owns turning a chain of hashes into pinned, named blocks. The bytes go over the data plane (`server`). A holder that
takes offers (the kvstore) overrides `Offer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from biphase.errors import LayoutMismatchError, UnavailableError
from biphase.request import BlockHash
from biphase.rpc.errors import unary_method
from biphase.rpc.v1 import blocks_pb2, blocks_pb2_grpc, common_pb2
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import LeaseTable


class LeasableBlocks(Protocol):
    """What a holder needs of its block pool."""

    def lease_chain(self, hashes: Sequence[BlockHash]) -> list[tuple[int, int]]:
        """(block_id, generation) of the longest held prefix of `hashes`, each with one reference taken."""
        ...


class BlockHolderServicer(blocks_pb2_grpc.BlockHolderServicer):
    """Serves leases on one pool of one layout."""

    def __init__(
        self,
        pool: LeasableBlocks,
        leases: LeaseTable,
        layout: KVLayout,
        endpoint: common_pb2.TransferEndpoint,
    ) -> None:
        self._pool = pool
        self._leases = leases
        self._layout = layout
        self._endpoint = endpoint

    @unary_method
    async def Lease(self, request: blocks_pb2.LeaseRequest, context: Any) -> blocks_pb2.LeaseResponse:
        difference = self._layout.difference(KVLayout.from_proto(request.layout))
        if difference is not None:
            raise LayoutMismatchError(f"blocks of {self._endpoint.node_id} are of another kind: {difference}")
        hashes = [BlockHash(raw) for raw in request.block_hashes]
        held = self._pool.lease_chain(hashes)
        if not held:
            return blocks_pb2.LeaseResponse()
        lease = self._leases.open(
            request.reader_node_id, request.reader_incarnation, [block_id for block_id, _ in held], adopt=True
        )
        return blocks_pb2.LeaseResponse(
            lease_id=lease.lease_id,
            lease_seconds=self._leases.lease_seconds,
            blocks=[
                common_pb2.BlockHandle(
                    index=request.first_index + offset, block_id=block_id, generation=generation, block_hash=block_hash
                )
                for offset, ((block_id, generation), block_hash) in enumerate(zip(held, hashes, strict=False))
            ],
            endpoint=self._endpoint,
        )

    @unary_method
    async def Renew(self, request: blocks_pb2.RenewRequest, context: Any) -> blocks_pb2.RenewResponse:
        return blocks_pb2.RenewResponse(expired=self._leases.renew(list(request.lease_ids)))

    @unary_method
    async def Release(self, request: blocks_pb2.ReleaseRequest, context: Any) -> blocks_pb2.ReleaseResponse:
        self._leases.release(list(request.lease_ids))
        return blocks_pb2.ReleaseResponse()

    @unary_method
    async def Offer(self, request: blocks_pb2.OfferRequest, context: Any) -> blocks_pb2.OfferResponse:
        raise UnavailableError(f"{self._endpoint.node_id} is no block store and takes no offers")
