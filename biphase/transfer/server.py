"""The data plane of a block holder: listens, shakes hands, serves each reader on a thread of its own.

Owns sockets and threads. What is sent is the transports' business (tcp.BlockSender, shm.ShmHost), who may read the
leases'. A connection that breaks the protocol is closed with a logged reason and harms nobody else.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from biphase.cache.memory import BlockMemory, SharedGenerations
from biphase.errors import BiphaseError, ConfigError
from biphase.rpc.trust import OPEN, Trust
from biphase.telemetry.events import event_logger
from biphase.transfer.endpoint import Endpoint, host_id
from biphase.transfer.handshake import Hello, Welcome, answer, send_pattern
from biphase.transfer.layout import KVLayout
from biphase.transfer.leases import HolderPool, LeaseTable
from biphase.transfer.nixl_host import NixlHost
from biphase.transfer.selection import check_transports
from biphase.transfer.shm import ShmHost
from biphase.transfer.sockets import DeadlineSocket, peer_uid
from biphase.transfer.tcp import BlockSender
from biphase.transfer.tls import TlsSocket

log = event_logger(__name__)

_HANDSHAKE_SECONDS = 5.0
_MAX_CONNECTIONS = 1024
# So many may be in their handshake at once; one more pushes out the oldest, so that those who connect and say nothing
# keep nobody else out.
_MAX_HANDSHAKES = 128


@dataclass(frozen=True, slots=True)
class ServerStats:
    num_connections: int
    # Over tcp; a reader that maps the memory does not tell.
    num_blocks_sent: int
    num_bytes_sent: int
    num_refused: int


class BlockServer:
    """Serves reads from one block memory, from construction to `close`.

    Args:
        pool, leases: say which blocks may be read; references are taken while a block is being sent.
        node_id, incarnation: who this is; readers that expect somebody else are refused.
        host, port: where the tcp data plane listens; port 0 takes a free one.
        advertise_host: what readers connect to, where it is not `host` (which may be 0.0.0.0).
        generations: the pool's own table, for same-host readers. Without it shm is not offered.
        transports: which may be offered, best first.
        trust: what readers have to show; tls is for tcp only.

    Raises:
        ConfigError: an unknown transport, one that does not work here, or an address that cannot be listened on.
    """

    def __init__(
        self,
        memory: BlockMemory,
        pool: HolderPool,
        layout: KVLayout,
        node_id: str,
        incarnation: str,
        leases: LeaseTable,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        advertise_host: str | None = None,
        generations: SharedGenerations | None = None,
        transports: Sequence[str] = ("shm", "tcp"),
        trust: Trust = OPEN,
    ) -> None:
        assert memory.block_bytes == layout.block_bytes, "layout and memory differ in block_bytes"
        assert len(pool.generations) == memory.num_blocks, "pool and memory differ in size"
        check_transports(tuple(transports))
        self._trust = trust
        self._lock = threading.Lock()
        self._connections: dict[DeadlineSocket, threading.Thread] = {}
        # Of those, the ones that have not shown yet who they are; oldest first.
        self._unknown: dict[DeadlineSocket, None] = {}
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []
        self._closed = False
        self._num_blocks = self._num_bytes = self._num_refused = 0
        self._sender = BlockSender(memory, pool, leases, self._count)
        self._welcome = Welcome(memory.num_blocks, self._sender.batch_blocks)
        self._shm: ShmHost | None = None
        self._nixl: NixlHost | None = None
        offered: dict[str, str] = {}
        address = ""
        try:
            if "shm" in transports and generations is not None and host_id():
                assert pool.generations is generations.table, "the pool counts generations somewhere else"
                self._shm = ShmHost(memory, generations)
                # The same node and incarnation may serve several namespaces.
                offered["shm"] = f"biphase-{node_id[:40]}-{uuid.uuid4().hex}"
                self._listen(socket.AF_UNIX, "\0" + offered["shm"], self._serve_shm)
            if "nixl" in transports:
                self._nixl = NixlHost(memory, pool, leases, f"{node_id}/{incarnation}")
            if "tcp" in transports or "nixl" in transports:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                bound = self._listen(family, (host, port), self._serve_tcp)
                name = advertise_host or host
                address = f"[{name}]:{bound}" if ":" in name else f"{name}:{bound}"
                offered.update({name: address for name in ("tcp", "nixl") if name in transports})
        except BaseException:
            self._close_hosts()
            for listener, _ in self._listeners:
                listener.close()
            raise
        self._over_tcp = tuple(name for name in ("tcp", "nixl") if name in offered)
        ordered = tuple(name for name in transports if name in offered)
        self.endpoint = Endpoint(node_id, incarnation, address, ordered, layout, offered.get("shm", ""), host_id())
        for _, thread in self._listeners:
            thread.start()

    def stats(self) -> ServerStats:
        with self._lock:
            return ServerStats(len(self._connections), self._num_blocks, self._num_bytes, self._num_refused)

    def close(self) -> None:
        """Stops listening, ends all connections, waits for their threads. Idempotent."""
        with self._lock:
            self._closed = True
            connections = list(self._connections.items())
        for listener, _ in self._listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
        for connection, _ in connections:
            connection.abort()
        for listener, thread in self._listeners:
            thread.join()
            listener.close()
        for _, thread in connections:
            thread.join()
        self._close_hosts()

    def _close_hosts(self) -> None:
        for host in (self._shm, self._nixl):
            if host is not None:
                host.close()

    def _listen(self, family: int, address: object, serve: Callable[[DeadlineSocket, str], None]) -> int:
        """Returns the port, of tcp."""
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            if family != socket.AF_UNIX:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)  # type: ignore[arg-type]
            listener.listen(128)
        except OSError as error:
            listener.close()
            raise ConfigError(f"cannot serve blocks at {address!r}: {error.strerror or error}") from error
        thread = threading.Thread(target=self._accept, args=(listener, serve), name="block-accept", daemon=True)
        self._listeners.append((listener, thread))
        return 0 if family == socket.AF_UNIX else int(listener.getsockname()[1])

    def _accept(self, listener: socket.socket, serve: Callable[[DeadlineSocket, str], None]) -> None:
        while True:
            try:
                raw, address = listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors, most likely: the next moment may be better.
                log.error("accept_failed", reason=error.strerror)
                time.sleep(0.1)
                continue
            name = f"{address[0]}:{address[1]}" if isinstance(address, tuple) else "local"
            try:
                connection = self._wrap(raw, name)
            except OSError:
                raw.close()  # Gone again already.
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection, serve, name), name=f"block-send-{name}", daemon=True
            )
            with self._lock:
                refused = self._closed or len(self._connections) >= _MAX_CONNECTIONS
                if not refused:
                    self._connections[connection] = thread
                    if len(self._unknown) >= _MAX_HANDSHAKES:
                        oldest = next(iter(self._unknown))
                        oldest.abort()
                        del self._unknown[oldest]
                    self._unknown[connection] = None
                    thread.start()
            if refused:
                log.warning("connection_refused", peer=name, num_connections=_MAX_CONNECTIONS)
                connection.close()

    def _wrap(self, raw: socket.socket, name: str) -> DeadlineSocket:
        if self._trust.tls is None or raw.family == socket.AF_UNIX:
            return DeadlineSocket(raw, name)
        return TlsSocket(raw, name, lambda: None, self._trust.tls.server_context, None)

    def _meet(self, connection: DeadlineSocket, transports: Sequence[str]) -> tuple[Hello, float]:
        """The handshake. Returns what the reader said, and until when the rest of it may take."""
        deadline = time.monotonic() + _HANDSHAKE_SECONDS
        connection.shake_hands(deadline)
        hello = answer(connection, self.endpoint, self._welcome, transports, deadline, self._trust.token)
        with self._lock:
            self._unknown.pop(connection, None)
        return hello, deadline

    def _serve(self, connection: DeadlineSocket, serve: Callable[[DeadlineSocket, str], None], name: str) -> None:
        try:
            serve(connection, name)
        except BiphaseError as error:
            if not self._closed:
                with self._lock:
                    self._num_refused += 1
                log.warning("connection_closed", peer=name, code=error.code.value, reason=error.message)
        except Exception:
            log.exception("connection_failed", peer=name)
        finally:
            with self._lock:
                connection.close()
                del self._connections[connection]
                self._unknown.pop(connection, None)

    def _serve_tcp(self, connection: DeadlineSocket, name: str) -> None:
        hello, deadline = self._meet(connection, self._over_tcp)
        log.debug("reader_connected", peer=hello.node_id, transport=hello.transport, address=name)
        if hello.transport == "nixl":
            assert self._nixl is not None
            self._nixl.serve(connection)
        else:
            send_pattern(connection, deadline)
            self._sender.serve(connection)

    def _serve_shm(self, connection: DeadlineSocket, name: str) -> None:
        assert self._shm is not None
        uid = peer_uid(connection.raw)
        if uid != os.getuid():
            log.warning("connection_refused", peer=f"uid {uid}", transport="shm")
            return
        hello, _ = self._meet(connection, ("shm",))
        self._shm.send_descriptors(connection)
        log.debug("reader_connected", peer=hello.node_id, transport="shm")
        # Nothing more is said: the connection stands for "alive" on both sides.
        connection.wait_readable()

    def _count(self, num_blocks: int, num_bytes: int) -> None:
        with self._lock:
            self._num_blocks += num_blocks
            self._num_bytes += num_bytes
