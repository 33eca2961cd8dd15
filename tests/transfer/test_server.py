"""The holder's side against peers that misbehave: closed with a reason, never a crash, never a leak."""

import contextlib
import logging
import os
import random
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from biphase.errors import ConfigError, TransferFailedError
from biphase.transfer import frames, server, tcp
from biphase.transfer.frames import Kind
from biphase.transfer.handshake import Hello, introduce, measure_pattern
from biphase.transfer.server import BlockServer
from biphase.transfer.sockets import DeadlineSocket, connect_abstract, connect_tcp, split_address
from tests.chaos.faults import wait_until
from tests.transfer.fakes import FakePool
from tests.transfer.holders import Destination, Holder, layout

MIB = 1024 * 1024


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder(num_blocks=64, block_bytes=65536)
    yield holder
    holder.close()


@pytest.fixture
def raw(holder: Holder) -> Iterator[socket.socket]:
    """A connection on which nothing has been said."""
    with socket.create_connection(split_address(holder.endpoint.tcp_address), timeout=5) as raw:
        yield raw


@pytest.fixture
def reader(holder: Holder) -> Iterator[DeadlineSocket]:
    """A connection that has shaken hands."""
    deadline = time.monotonic() + 5
    sock = connect_tcp(holder.endpoint.tcp_address, "holder", deadline)
    hello = Hello("decode-0", "life-1", "prefill-0", "life-1", layout(65536), layout(65536), "tcp")
    introduce(sock, holder.endpoint, hello, deadline)
    measure_pattern(sock, deadline)
    yield sock
    sock.close()


def assert_nothing_answered(raw: socket.socket) -> None:
    # A reset where the holder closed with bytes of ours unread.
    with contextlib.suppress(ConnectionResetError):
        assert raw.recv(1) == b""


def assert_closed(holder: Holder, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """The connection is gone, somebody said why, and the next reader is served."""
    assert wait_until(lambda: holder.server.stats().num_connections == 0)
    said = [record.event_fields for record in caplog.records if record.getMessage() == "connection_closed"]
    assert len(said) == 1 and reason in said[0]["reason"], said
    assert holder.server.stats().num_refused == 1
    destination = Destination(64, 65536, transports=("tcp",))
    pairs = destination.requests([(0, 0)])
    assert destination.reader.read(holder.endpoint, holder.lease_id, pairs, 5.0).result().error is None
    destination.close()
    assert wait_until(lambda: holder.references() == 64)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "not a block transfer connection"),
        (struct.pack("<4sHHI", b"BPKV", 9, 1, 4) + b"xxxx", "version 9"),
        (struct.pack("<4sHHI", b"BPKV", frames.VERSION, 77, 4) + b"xxxx", "unknown frame kind 77"),
        (frames.pack_header(Kind.HELLO, 2**32 - 1), "over the limit"),
        (frames.pack_header(Kind.READ, 4) + b"xxxx", "in place of HELLO"),
        (frames.pack_header(Kind.HELLO, 4) + b"xxxx", "not JSON"),
        (frames.pack_header(Kind.HELLO, 4) + b"\xff\xfe\x00\x01", "not JSON"),
        (frames.pack_header(Kind.HELLO, 12000) + b"[" * 12000, "not JSON"),
        (frames.pack_header(Kind.HELLO, 2) + b"[]", "not a JSON object"),
        (frames.pack_json(Kind.HELLO, {}), "layout is missing"),
        (frames.pack_json(Kind.HELLO, {"layout": {"num_layers": "x"}}), "layout field"),
        (frames.pack_json(Kind.HELLO, {"layout": layout(64).to_json()}), "holder_layout is missing"),
        (
            frames.pack_json(
                Kind.HELLO, {**dict.fromkeys(("layout", "holder_layout"), layout(64).to_json()), "node_id": 3}
            ),
            "node_id",
        ),
    ],
)
def test_nonsense_in_place_of_a_handshake(
    holder: Holder, raw: socket.socket, caplog: pytest.LogCaptureFixture, said: bytes, reason: str
) -> None:
    raw.sendall(said)
    assert_nothing_answered(raw)
    assert_closed(holder, caplog, reason)


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_in_place_of_a_handshake(
    holder: Holder, raw: socket.socket, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    raw.sendall(os.urandom(12 + seed * 50))
    assert_nothing_answered(raw)
    assert_closed(holder, caplog, "not a block transfer connection")


def test_a_peer_that_says_nothing_is_not_waited_for(
    holder: Holder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_HANDSHAKE_SECONDS", 0.2)
    with socket.create_connection(split_address(holder.endpoint.tcp_address), timeout=5) as silent:
        silent.sendall(b"BP")
        assert silent.recv(1) == b""
    assert_closed(holder, caplog, "deadline")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (frames.pack_header(Kind.READ, frames.MAX_READ_BYTES + 1), "over the limit"),
        (frames.pack_header(Kind.READ, 3) + b"abc", "without a head"),
        (frames.pack_header(Kind.READ, 6) + struct.pack("<HI", 0, 0), "claims 0 blocks"),
        (frames.pack_header(Kind.READ, 6) + struct.pack("<HI", 0, 2**32 - 1), "claims 4294967295 blocks"),
        (frames.pack_header(Kind.READ, 6) + struct.pack("<HI", 65535, 1), "claims 1 blocks"),
        (frames.pack_header(Kind.READ, 24) + struct.pack("<HI2sQQ", 2, 1, b"\xff\xff", 0, 0), "not text"),
        (frames.pack_json(Kind.HELLO, {}), "in place of READ"),
        (random.Random(1).randbytes(64), "not a block transfer connection"),
    ],
)
def test_nonsense_in_place_of_a_read(
    holder: Holder, reader: DeadlineSocket, caplog: pytest.LogCaptureFixture, said: bytes, reason: str
) -> None:
    reader.send_bytes(said, time.monotonic() + 5)
    assert_closed(holder, caplog, reason)


def test_a_reader_that_leaves_between_reads_is_no_error(holder: Holder, reader: DeadlineSocket) -> None:
    reader.close()
    assert wait_until(lambda: holder.server.stats().num_connections == 0)
    assert holder.server.stats().num_refused == 0


def test_a_reader_that_stops_taking_is_cut_off_and_its_pins_come_back(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "BATCH_SECONDS", 1.0)
    holder = Holder(num_blocks=64, block_bytes=MIB)
    deadline = time.monotonic() + 5
    sock = connect_tcp(holder.endpoint.tcp_address, "holder", deadline)
    introduce(sock, holder.endpoint, Hello("d", "i", "prefill-0", "life-1", layout(MIB), layout(MIB), "tcp"), deadline)
    measure_pattern(sock, deadline)
    sock.send_bytes(
        frames.pack_read(holder.lease_id, frames.pack_words(range(64)), bytes(64 * frames.WORD_BYTES)), deadline
    )
    time.sleep(0.4)  # Now every buffer on the way is full.
    holder.leases.release([holder.lease_id])
    assert holder.references() == 64, "blocks are held while they are being sent"
    assert holder.leases.counts().num_draining_blocks == 64
    assert wait_until(lambda: holder.server.stats().num_connections == 0)
    assert holder.references() == 0
    assert "deadline" in caplog.records[-1].event_fields["reason"]
    sock.close()
    holder.close()


def test_more_readers_than_the_limit_are_turned_away(holder: Holder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 3)
    address = split_address(holder.endpoint.tcp_address)
    held = [socket.create_connection(address, timeout=5) for _ in range(3)]
    assert wait_until(lambda: holder.server.stats().num_connections == 3)
    with socket.create_connection(address, timeout=5) as extra:
        assert extra.recv(1) == b""
    for sock in held:
        sock.close()


def test_close_ends_every_connection_and_thread_and_frees_the_port(holder: Holder, reader: DeadlineSocket) -> None:
    start = time.monotonic()
    holder.server.close()
    holder.server.close()
    assert time.monotonic() - start < 2 and holder.server.stats().num_connections == 0
    with pytest.raises(TransferFailedError, match="closed the connection"):
        reader.recv(1, time.monotonic() + 5)
    port = split_address(holder.endpoint.tcp_address)[1]
    again = Holder(port=port)
    assert split_address(again.endpoint.tcp_address)[1] == port
    again.close()


def test_a_taken_port_is_a_config_error(holder: Holder) -> None:
    port = split_address(holder.endpoint.tcp_address)[1]
    with pytest.raises(ConfigError, match=str(port)):
        Holder(incarnation="life-2", port=port)


def test_shm_is_offered_only_with_shared_generations(holder: Holder) -> None:
    pool = FakePool(64)
    plain = BlockServer(holder.memory, pool, layout(65536), "p", "i", holder.leases)
    assert plain.endpoint.transports == ("tcp",) and plain.endpoint.shm_address == ""
    assert holder.endpoint.transports == ("shm", "tcp")
    plain.close()


def test_an_advertised_host_stands_in_the_endpoint(holder: Holder) -> None:
    other = BlockServer(
        holder.memory, FakePool(64), layout(65536), "p", "i", holder.leases, host="0.0.0.0", advertise_host="10.0.0.7"
    )
    assert other.endpoint.tcp_address.startswith("10.0.0.7:")
    other.close()


def test_ipv6(holder: Holder) -> None:
    try:
        six = BlockServer(holder.memory, holder.pool, layout(65536), "prefill-0", "six", holder.leases, host="::1")
    except ConfigError:
        pytest.skip("no IPv6 here")
    assert six.endpoint.tcp_address.startswith("[::1]:")
    destination = Destination(64, 65536, transports=("tcp",))
    result = destination.reader.read(six.endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
    assert result.error is None
    destination.close()
    six.close()


def test_the_handshake_over_shared_memory_is_as_strict(holder: Holder, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + 5
    sock = connect_abstract(holder.endpoint.shm_address, "holder", deadline)
    sock.send_bytes(os.urandom(64), deadline)
    with pytest.raises(TransferFailedError):
        sock.recv(1, deadline)
    sock.close()
    assert_closed(holder, caplog, "not a block transfer connection")


def test_refusals_are_logged_with_their_code(holder: Holder, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    destination = Destination(64, 65536, transports=("tcp",))
    stale = replace(holder.endpoint, incarnation="life-0")
    destination.reader.read(stale, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
    assert wait_until(lambda: any(record.getMessage() == "connection_closed" for record in caplog.records))
    codes = [r.event_fields["code"] for r in caplog.records if r.getMessage() == "connection_closed"]
    assert codes == ["stale_handle"]
    destination.close()
