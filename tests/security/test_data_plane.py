"""The data plane from the attacker's side: who may read blocks, what a stranger learns, and what he can hold up."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from biphase.errors import BiphaseError, LayoutMismatchError, StaleHandleError, TransferFailedError, UnauthorizedError
from biphase.rpc.tls import Tls
from biphase.rpc.token import ServiceToken
from biphase.rpc.trust import OPEN, Trust
from biphase.transfer import frames
from biphase.transfer.channels import ReadResult
from biphase.transfer.endpoint import Endpoint
from biphase.transfer.frames import Kind
from biphase.transfer.sockets import DeadlineSocket, connect_tcp, split_address
from tests.chaos.faults import wait_until
from tests.security.authority import Authority
from tests.transfer.holders import Destination, Holder, layout

BLOCK_BYTES = 65536
NUM_BLOCKS = 64
OTHER = ServiceToken("the token of another cluster")


@contextlib.contextmanager
def holding(trust: Trust, transports: tuple[str, ...] = ("shm", "tcp")) -> Iterator[Holder]:
    holder = Holder(NUM_BLOCKS, BLOCK_BYTES, transports=transports, trust=trust)
    try:
        yield holder
    finally:
        holder.close()


def read(holder: Holder, trust: Trust, transport: str, endpoint: Endpoint | None = None, **changed: str) -> ReadResult:
    """All of the holder's blocks, by a reader of its own, which gets all of them right or none."""
    destination = Destination(NUM_BLOCKS, BLOCK_BYTES, (transport,), allow_fallback=False, trust=trust)
    try:
        requests = destination.requests([(block, block) for block in range(NUM_BLOCKS)])
        lease_id = changed.get("lease_id", holder.lease_id)
        result = destination.reader.read(endpoint or holder.endpoint, lease_id, requests, 10.0).result()
        for block in range(NUM_BLOCKS):
            assert destination.holds(block, block) if not result.error else destination.is_untouched(block)
        return result
    finally:
        destination.close()


def assert_refused(holder: Holder, trust: Trust, transport: str, kind: type[BiphaseError], words: str) -> None:
    result = read(holder, trust, transport)
    assert isinstance(result.error, kind) and words in result.error.message, result.error
    assert holder.server.stats().num_blocks_sent == 0
    assert wait_until(lambda: holder.server.stats().num_connections == 0)
    assert holder.references() == NUM_BLOCKS


# ---- the token


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_token_of_the_cluster(token: ServiceToken, transport: str) -> None:
    with holding(Trust(token)) as holder:
        assert_refused(holder, OPEN, transport, UnauthorizedError, "wants the service token")
        assert_refused(
            holder, Trust(OTHER), transport, UnauthorizedError, "does not show that it has the service token"
        )
        assert read(holder, Trust(token), transport).error is None


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("theirs", [None, OTHER])
def test_a_false_holder(token: ServiceToken, transport: str, theirs: ServiceToken | None) -> None:
    """Its bytes are not taken: somebody entered himself in the registry."""
    with holding(Trust(theirs)) as false:
        assert_refused(false, Trust(token), transport, UnauthorizedError, "service token")


def test_a_handshake_that_was_overheard(token: ServiceToken) -> None:
    """Everything that a good reader said is said again, on another connection."""
    with holding(Trust(token), ("tcp",)) as holder:
        said = _recorded(holder, Trust(token))
        with contextlib.closing(_connected(holder)) as sock:
            deadline = time.monotonic() + 5
            hello, proof = said
            sock.send_bytes(hello, deadline)
            kind, challenge = sock.recv_frame(deadline, 64)
            assert kind is Kind.CHALLENGE and len(challenge) == 32
            sock.send_bytes(proof, deadline)
            kind, body = sock.recv_frame(deadline, frames.MAX_HELLO_BYTES)
            assert kind is Kind.REFUSE and frames.unpack_json(body)["code"] == "unauthorized"
            # Nothing of who the holder is or what it has.
            assert set(frames.unpack_json(body)) == {"code", "message"} and b"prefill-0" not in body
        assert read(holder, Trust(token), "tcp").error is None


def test_a_stranger_is_told_nothing_else(token: ServiceToken) -> None:
    """Another node, another life: without the token no answer depends on it."""
    with holding(Trust(token), ("tcp",)) as holder:
        for endpoint in (holder.endpoint, replace(holder.endpoint, incarnation="x", node_id="y")):
            result = read(holder, Trust(OTHER), "tcp", endpoint)
            assert isinstance(result.error, UnauthorizedError)


# ---- members that ask for what is not theirs


@pytest.mark.parametrize("transport", ["tcp"])
def test_forged_and_ended_leases(token: ServiceToken, transport: str) -> None:
    with holding(Trust(token)) as holder:
        for lease_id in ("", "0" * 32, holder.lease_id[:-1] + "g", holder.lease_id.upper() + " "):
            result = read(holder, Trust(token), transport, lease_id=lease_id)
            assert isinstance(result.error, StaleHandleError) and len(result.stale) == NUM_BLOCKS
        holder.leases.release([holder.lease_id])
        assert isinstance(read(holder, Trust(token), transport).error, StaleHandleError)
        assert holder.server.stats().num_blocks_sent == 0


def test_lease_ids_cannot_be_guessed(token: ServiceToken) -> None:
    with holding(Trust(token)) as holder:
        lease_ids = {holder.leases.open("d", "i").lease_id for _ in range(1000)}
        assert len(lease_ids) == 1000 and all(len(lease_id) == 32 for lease_id in lease_ids)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_another_life_and_another_namespace(token: ServiceToken, transport: str) -> None:
    with holding(Trust(token)) as holder:
        earlier = replace(holder.endpoint, incarnation="an earlier life")
        error = read(holder, Trust(token), transport, earlier).error
        assert isinstance(error, StaleHandleError) and "an earlier life" in error.message
        other = replace(layout(BLOCK_BYTES), namespace=b"\x08" * 32)
        destination = Destination(4, BLOCK_BYTES, (transport,), allow_fallback=False, trust=Trust(token), layout=other)
        result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
        assert isinstance(result.error, LayoutMismatchError) and "namespace" in result.error.message
        assert destination.is_untouched(0)
        destination.close()
        assert read(holder, Trust(token), transport).error is None


# ---- those who hold things up


@pytest.mark.parametrize("with_tls", [False, True])
def test_silent_connections_keep_no_reader_out(token: ServiceToken, tls: Tls, with_tls: bool) -> None:
    """Far more than may be in their handshake at once, each held open without a word, or after half of one."""
    trust = Trust(token, tls if with_tls else None)
    with holding(trust, ("tcp",)) as holder:
        before = psutil.Process().memory_info().rss
        silent = []
        for position in range(400):
            silent.append(socket.create_connection(split_address(holder.endpoint.tcp_address), timeout=5))
            if position % 2:
                silent[-1].sendall(frames.pack_header(Kind.HELLO, frames.MAX_HELLO_BYTES))
        assert read(holder, trust, "tcp").error is None
        assert holder.server.stats().num_connections <= 200
        assert psutil.Process().memory_info().rss - before < 128 * 2**20
        for connection in silent:
            connection.close()
        assert wait_until(lambda: holder.server.stats().num_connections == 0)


@pytest.mark.parametrize(
    "said",
    [
        frames.pack_header(Kind.HELLO, 2**32 - 1),
        frames.pack_header(Kind.READ, 8) + bytes(8),
        frames.pack_json(Kind.HELLO, {}) + frames.pack_header(Kind.PROOF, 2**31),
        frames.pack_json(Kind.HELLO, {}) + frames.pack_header(Kind.PROOF, 0),
        frames.pack_json(Kind.HELLO, {}) + frames.pack_header(Kind.READ, 32) + bytes(32),
    ],
)
def test_nonsense_from_a_stranger(token: ServiceToken, said: bytes) -> None:
    with holding(Trust(token), ("tcp",)) as holder:
        with contextlib.closing(_connected(holder)) as sock:
            sock.send_bytes(said, time.monotonic() + 5)
            # A challenge at most, and the end.
            with pytest.raises(TransferFailedError):
                for _ in range(3):
                    kind, _ = sock.recv_frame(time.monotonic() + 5, 4096)
                    assert kind in (Kind.CHALLENGE, Kind.REFUSE)
        assert read(holder, Trust(token), "tcp").error is None


# ---- certificates


def test_blocks_over_tls(token: ServiceToken, tls: Tls, authority: Authority) -> None:
    with holding(Trust(token, tls), ("tcp",)) as holder:
        assert read(holder, Trust(token, authority.issue("reader").tls(authority.ca)), "tcp").error is None


def test_plain_text_against_tls_and_back(token: ServiceToken, tls: Tls, caplog: pytest.LogCaptureFixture) -> None:
    with holding(Trust(token, tls), ("tcp",)) as holder:
        assert_refused(holder, Trust(token), "tcp", TransferFailedError, "tcp")
        assert any("speaks no TLS" in str(getattr(record, "event_fields", "")) for record in caplog.records)
        assert read(holder, Trust(token, tls), "tcp").error is None
    with holding(Trust(token), ("tcp",)) as holder:
        assert_refused(holder, Trust(token, tls), "tcp", TransferFailedError, "tcp")


def test_a_certificate_of_another_authority(
    tls: Tls, authority: Authority, strangers: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = strangers.issue("stranger").tls(authority.ca)
    with holding(Trust(None, tls), ("tcp",)) as holder:
        result = read(holder, Trust(None, stranger), "tcp")
        assert result.error is not None and holder.server.stats().num_blocks_sent == 0
        assert wait_until(
            lambda: "CERTIFICATE" in str([getattr(r, "event_fields", "") for r in caplog.records]).upper()
        )
        assert read(holder, Trust(None, tls), "tcp").error is None


@pytest.mark.parametrize("kind", ["another authority", "another name"])
def test_a_false_holder_with_a_certificate(tls: Tls, authority: Authority, strangers: Authority, kind: str) -> None:
    if kind == "another name":
        false = authority.issue("elsewhere", "DNS:elsewhere").tls(authority.ca)
    else:
        false = strangers.issue("false").tls(strangers.ca)
    with holding(Trust(None, false), ("tcp",)) as holder:
        assert_refused(holder, Trust(None, tls), "tcp", UnauthorizedError, "no TLS with prefill-0")


def test_nothing_of_a_block_is_on_the_wire(token: ServiceToken, tls: Tls) -> None:
    """What an eavesdropper sees of 64 blocks, of which a run of bytes is known."""
    with holding(Trust(token, tls), ("tcp",)) as holder:
        wire = _Wire(holder.endpoint.tcp_address)
        known = bytes(holder.memory.block(3)[:64])
        assert read(holder, Trust(token, tls), "tcp", replace(holder.endpoint, tcp_address=wire.address)).error is None
        wire.close()
        assert len(wire.seen) > NUM_BLOCKS * BLOCK_BYTES and known not in wire.seen


class _Wire:
    """A tap: passes one connection on and keeps what went through."""

    def __init__(self, address: str) -> None:
        self._target = split_address(address)
        self.seen = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._threads = [threading.Thread(target=self._run, daemon=True)]
        self._threads[0].start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        other = threading.Thread(target=self._pass_on, args=(far, near), daemon=True)
        other.start()
        self._pass_on(near, far)
        other.join()
        near.close()
        far.close()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                self.seen += piece
                target.sendall(piece)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._threads[0].join(5)
        self._listener.close()


def _connected(holder: Holder) -> DeadlineSocket:
    return connect_tcp(holder.endpoint.tcp_address, "holder", time.monotonic() + 5)


def _recorded(holder: Holder, trust: Trust) -> tuple[bytes, bytes]:
    """HELLO and PROOF as a good reader said them."""
    wire = _Wire(holder.endpoint.tcp_address)
    endpoint = replace(holder.endpoint, tcp_address=wire.address)
    sent: list[bytes] = []
    original = DeadlineSocket.send_bytes

    def record(self: DeadlineSocket, raw: bytes, deadline: float) -> None:
        if self._peer == endpoint.node_id:
            sent.append(raw)
        original(self, raw, deadline)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeadlineSocket, "send_bytes", record)
        assert read(holder, trust, "tcp", endpoint).error is None
    wire.close()
    return sent[0], sent[1]


def test_a_holder_of_another_version_is_refused_by_name(token: ServiceToken) -> None:
    """Half upgraded: the reader says which versions do not fit, and whoever wanted the blocks computes them."""
    with holding(Trust(token), ("tcp",)) as holder, socket.create_server(("127.0.0.1", 0)) as older:

        def answer() -> None:
            connection, _ = older.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(struct.pack("<4sHHI", b"BPKV", frames.VERSION - 1, Kind.WELCOME, 2) + b"{}")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        endpoint = replace(holder.endpoint, tcp_address=f"127.0.0.1:{older.getsockname()[1]}")
        error = read(holder, Trust(token), "tcp", endpoint).error
        thread.join(5)
        assert isinstance(error, TransferFailedError)
        assert f"version {frames.VERSION - 1} is not supported, this is version {frames.VERSION}" in error.message
