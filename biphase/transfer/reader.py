"""Reading blocks from other nodes: one thread and one connection per holder, reads in the order they were asked for.

Owns the threads, the queues and the deadlines. A read always ends: with its blocks, or with an error not later than
its deadline (plus a tick), and when its future resolves no byte lands in its destinations any more. The transports do
the moving.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from biphase.cache.memory import BlockMemory
from biphase.errors import InvalidRequestError, TransferFailedError
from biphase.rpc.trust import OPEN, Trust
from biphase.rpc.v1 import common_pb2
from biphase.transfer.channels import ReaderContext, ReadRequest, ReadResult
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.layout import KVLayout
from biphase.transfer.peer import Job, Peer, PeerStats, failed
from biphase.transfer.selection import check_transports

__all__ = ["BlockReader", "PeerStats", "ReadRequest", "ReadResult"]


class BlockReader:
    """Reads into one block memory.

    Args:
        memory: where blocks go.
        layout: of that memory; a holder whose blocks cannot be cut to it refuses.
        node_id, incarnation: who reads, for the holder's logs.
        transports: which may be used, best first.
        allow_fallback: False: a read fails rather than go over another transport than the first.
        trust: what is shown to holders, and asked of them.
        by_speed: compare those that work, and take the fastest.
        idle_seconds: a connection not used for so long is closed, its thread ends.

    Raises:
        ConfigError: an unknown transport.
    """

    def __init__(
        self,
        memory: BlockMemory,
        layout: KVLayout,
        node_id: str,
        incarnation: str,
        *,
        transports: Sequence[str] = ("shm", "tcp"),
        allow_fallback: bool = True,
        by_speed: bool = False,
        trust: Trust = OPEN,
        idle_seconds: float = 120.0,
    ) -> None:
        assert memory.block_bytes == layout.block_bytes, "layout and memory differ in block_bytes"
        check_transports(tuple(transports))
        self._context = ReaderContext(
            memory, layout, layout, node_id, incarnation, tuple(transports), allow_fallback, by_speed, trust
        )
        self._idle_seconds = idle_seconds
        self._lock = threading.Lock()
        self._peers: dict[Endpoint, Peer] = {}
        # Dropped, and on their way out.
        self._ending: set[Peer] = set()
        self._closed = False
        # Told of each read that has ended, in the thread that ended it.
        self.observe: Callable[[ReadResult], None] = lambda result: None

    def read(
        self,
        endpoint: Endpoint | common_pb2.TransferEndpoint,
        lease_id: str,
        blocks: Sequence[ReadRequest],
        deadline_seconds: float,
    ) -> Future[ReadResult]:
        """Starts a read. The future gives a ReadResult, never an exception; cancelling it works until it runs.

        Args:
            lease_id: lease at the holder that covers the blocks.
            blocks: destinations must stay reserved until the future is done. With segments (reslice.py) where the
                holder's layout is another.
            deadline_seconds: from now, waiting behind other reads included.
        """
        try:
            holder = endpoint if isinstance(endpoint, Endpoint) else Endpoint.from_proto(endpoint)
        except InvalidRequestError as error:
            refused: Future[ReadResult] = Future()
            refused.set_result(failed(error))
            return refused
        job = Job(lease_id, blocks, time.monotonic() + deadline_seconds, Future())
        if not blocks:
            job.future.set_result(ReadResult((), (), (), 0, 0.0, "none", None))
            return job.future
        while True:
            with self._lock:
                closed = self._closed
                peer = self._peers.get(holder)
                if peer is None and not closed:
                    peer = self._peers[holder] = Peer(holder, self._context, self._idle_seconds, self._forget)
            if closed or peer is None:
                job.future.set_result(failed(TransferFailedError("the reader is closed")))
                return job.future
            if peer.submit(job):
                job.future.add_done_callback(self._ended)
                return job.future
            # Its thread was just ending for lack of work: the next round makes a new one.
            self._forget(peer)

    def _ended(self, future: Future[ReadResult]) -> None:
        if not future.cancelled():
            self.observe(future.result())

    def drop(self, endpoint: Endpoint) -> None:
        """Gives up a holder that is known not to answer any more: reads from it fail now, not at their deadlines.

        A later read connects anew.
        """
        with self._lock:
            peer = self._peers.pop(endpoint, None)
            if peer is not None:
                self._ending.add(peer)
        if peer is not None:
            peer.close()

    def peers(self) -> list[PeerStats]:
        """One entry per holder with a thread."""
        with self._lock:
            peers = list(self._peers.values())
        return [peer.stats() for peer in peers]

    def close(self) -> None:
        """Ends reads in progress with TransferFailedError and all threads. Idempotent."""
        with self._lock:
            self._closed = True
            peers = [*self._peers.values(), *self._ending]
        for peer in peers:
            peer.close()
        for peer in peers:
            peer.join()

    def _forget(self, peer: Peer) -> None:
        with self._lock:
            self._ending.discard(peer)
            if self._peers.get(peer.endpoint) is peer:
                del self._peers[peer.endpoint]
