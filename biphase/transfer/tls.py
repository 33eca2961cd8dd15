"""A DeadlineSocket that speaks TLS: the data plane between hosts whose network is not trusted.

Owns the way from records on the wire to bytes in blocks. TLS works on memory here, and the socket below keeps its
deadlines and ticks. It costs two copies and the cipher; shared memory never comes this way, NIXL's transfers neither.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Sequence

from biphase.errors import TransferFailedError, UnauthorizedError
from biphase.rpc.tls import Tls
from biphase.transfer.sockets import DeadlineSocket, connect_tcp
from biphase.transfer.spans import Spans

# So much ciphertext is taken from, or given to, the kernel in one call.
_CHUNK_BYTES = 256 * 1024
_HANDSHAKE_BYTES = 16 * 1024


class TlsSocket(DeadlineSocket):
    """Call `shake_hands` before anything else.

    Args:
        context: for this side of the connection.
        server_name: what the other side's certificate must be for; None: this is the server's side.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        on_tick: Callable[[], None],
        context: ssl.SSLContext,
        server_name: str | None,
    ) -> None:
        super().__init__(sock, peer, on_tick)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(
            self._incoming, self._outgoing, server_side=server_name is None, server_hostname=server_name
        )
        self._ciphertext = memoryview(bytearray(_HANDSHAKE_BYTES))

    def shake_hands(self, deadline: float) -> None:
        """
        Raises:
            UnauthorizedError: the other side's certificate is not good, or it thinks so of ours.
            TransferFailedError: it went away, was too slow, or speaks no TLS.
        """
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self._flush(deadline)
                self._fill(deadline)
            except ssl.SSLError as error:
                with contextlib.suppress(TransferFailedError):
                    self._flush(deadline)  # The alert that tells the other side.
                raise self._broken(error) from error
        self._flush(deadline)
        self._ciphertext = memoryview(bytearray(_CHUNK_BYTES))

    def recv_into(self, buffers: list[memoryview], num_bytes: int, deadline: float) -> None:
        for buffer in buffers:
            while len(buffer):
                try:
                    received = int(self._tls.read(len(buffer), buffer))
                except ssl.SSLWantReadError:
                    self._fill(deadline)
                    continue
                except ssl.SSLError as error:
                    raise self._broken(error) from error
                if not received:
                    raise TransferFailedError(f"{self._peer} closed the connection")
                buffer = buffer[received:]

    def send(self, buffers: Sequence[bytes | memoryview], num_bytes: int, deadline: float) -> None:
        for buffer in buffers:
            rest = memoryview(buffer)
            while len(rest):
                try:
                    # One record of at most 16 KiB.
                    rest = rest[self._tls.write(rest) :]
                except ssl.SSLError as error:
                    raise self._broken(error) from error
                if self._outgoing.pending >= _CHUNK_BYTES:
                    self._flush(deadline)
        self._flush(deadline)

    def recv_spans(self, spans: Spans, num_bytes: int, deadline: float) -> None:
        self.recv_into(spans.views(), num_bytes, deadline)

    def send_spans(self, spans: Spans, num_bytes: int, deadline: float) -> None:
        self.send(spans.views(), num_bytes, deadline)

    def wait_readable(self) -> None:
        if not self._tls.pending() and not self._incoming.pending:
            super().wait_readable()

    def _fill(self, deadline: float) -> None:
        """Takes what has come, and waits for it where nothing has."""
        while True:
            self._arm(socket.SO_RCVTIMEO, deadline)
            try:
                received = self._socket.recv_into(self._ciphertext)
            except BlockingIOError:
                self._tick(deadline)
                continue
            except OSError as error:
                raise self._lost(error) from error
            if not received:
                raise TransferFailedError(f"{self._peer} closed the connection")
            self._incoming.write(self._ciphertext[:received])
            # Also when bytes keep trickling in.
            self._tick(deadline)
            return

    def _flush(self, deadline: float) -> None:
        if self._outgoing.pending:
            ciphertext = self._outgoing.read()
            super().send([ciphertext], len(ciphertext), deadline)

    def _broken(self, error: ssl.SSLError) -> TransferFailedError | UnauthorizedError:
        reason = getattr(error, "verify_message", "") or error.reason or str(error)
        if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
            return TransferFailedError(f"{self._peer} speaks no TLS, which is asked for here")
        if isinstance(error, ssl.SSLCertVerificationError) or "ALERT" in reason or "CERTIFICATE" in reason:
            return UnauthorizedError(f"no TLS with {self._peer}: {reason}")
        return TransferFailedError(f"no TLS with {self._peer}: {reason}")


def connect(address: str, peer: str, deadline: float, on_tick: Callable[[], None], tls: Tls | None) -> DeadlineSocket:
    """Connects to "host:port", with TLS where there is any.

    Raises:
        TransferFailedError: no connection in time, or the other side speaks no TLS.
        UnauthorizedError: its certificate is not good, or it thinks so of ours.
    """
    if tls is None:
        return connect_tcp(address, peer, deadline, on_tick)
    name = tls.name or address.rpartition(":")[0].strip("[]")

    def make(raw: socket.socket, peer: str, on_tick: Callable[[], None]) -> DeadlineSocket:
        return TlsSocket(raw, peer, on_tick, tls.client_context, name)

    sock = connect_tcp(address, peer, deadline, on_tick, make)
    try:
        sock.shake_hands(deadline)
    except BaseException:
        sock.close()
        raise
    return sock
