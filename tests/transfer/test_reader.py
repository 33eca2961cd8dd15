"""Reads that go well, and reads of blocks that are no longer there, over every transport."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import wait
from dataclasses import replace

import pytest

from biphase.errors import ConfigError, LayoutMismatchError, StaleHandleError, TransferFailedError
from biphase.rpc.v1 import common_pb2
from biphase.transfer.channels import ReadRequest
from tests.chaos.faults import wait_until
from tests.transfer.holders import Destination, Holder, layout

SECONDS = 10.0


@pytest.fixture
def holder() -> Iterator[Holder]:
    holder = Holder()
    yield holder
    holder.close()


@pytest.fixture(params=["tcp", "shm"])
def destination(request: pytest.FixtureRequest) -> Iterator[Destination]:
    destination = Destination(transports=(request.param,), allow_fallback=False)
    yield destination
    destination.close()


def test_scattered_blocks_land_where_they_belong(holder: Holder, destination: Destination) -> None:
    pairs = [(3, 0), (15, 9), (0, 2), (1, 15)]
    result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests(pairs), SECONDS).result()
    assert result.error is None and result.verified == (0, 1, 2, 3)
    assert (result.num_bytes, result.transport) == (4 * 4096, destination.reader.peers()[0].transport)
    assert all(destination.holds(dest, source) for source, dest in pairs)
    assert all(destination.is_untouched(dest) for dest in range(16) if dest not in (0, 2, 9, 15))
    assert wait_until(lambda: holder.references() == 16), "only the lease's references are left"


@pytest.mark.parametrize(("num_blocks", "block_bytes"), [(1, 256), (300, 256), (129, 8192), (5, 2 * 1024 * 1024)])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_batches_of_every_shape(num_blocks: int, block_bytes: int, transport: str) -> None:
    holder = Holder(num_blocks, block_bytes)
    destination = Destination(num_blocks, block_bytes, transports=(transport,))
    pairs = [(num_blocks - 1 - dest, dest) for dest in range(num_blocks)]
    result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests(pairs), SECONDS).result()
    assert result.error is None and len(result.verified) == num_blocks
    assert all(destination.holds(dest, source) for source, dest in pairs)
    destination.close()
    holder.close()


def test_an_empty_read_is_done_at_once(holder: Holder, destination: Destination) -> None:
    result = destination.reader.read(holder.endpoint, holder.lease_id, [], SECONDS).result(0)
    assert result.error is None and result.verified == ()


def test_endpoints_and_handles_work_as_they_come_off_the_wire(holder: Holder, destination: Destination) -> None:
    handle = common_pb2.BlockHandle(index=5, block_id=3, generation=0, block_hash=b"x")
    result = destination.reader.read(
        holder.endpoint.to_proto(), holder.lease_id, [ReadRequest.from_handle(handle, 1)], SECONDS
    ).result()
    assert result.verified == (5,) and destination.holds(1, 3)
    nobody = destination.reader.read(common_pb2.TransferEndpoint(), "", [ReadRequest(0, 0, 0, 0)], 1.0).result(1)
    assert nobody.error is not None


def test_a_stale_generation_is_a_miss_and_the_rest_is_kept(holder: Holder, destination: Destination) -> None:
    holder.reuse(1)
    pairs = [(0, 0), (1, 1), (2, 2)]
    result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests(pairs), SECONDS).result()
    assert isinstance(result.error, StaleHandleError)
    assert (result.verified, result.stale, result.corrupt) == ((0, 2), (1,), ())
    assert destination.is_untouched(1), "no byte of the other content came"


def test_a_block_that_does_not_exist_is_a_miss(holder: Holder, destination: Destination) -> None:
    result = destination.reader.read(
        holder.endpoint, holder.lease_id, destination.requests([(16, 0), (4_000_000_000, 1), (2, 2)]), SECONDS
    ).result()
    assert (result.verified, result.stale) == ((2,), (0, 1))


def test_without_a_lease_nothing_is_sent_over_tcp(holder: Holder) -> None:
    destination = Destination(transports=("tcp",))
    other = holder.leases.open("decode-0", "life-1", [0])
    result = destination.reader.read(
        holder.endpoint, other.lease_id, destination.requests([(0, 0), (1, 1)]), SECONDS
    ).result()
    assert (result.verified, result.stale) == ((0,), (1,))
    unknown = destination.reader.read(holder.endpoint, "unknown", destination.requests([(0, 2)]), SECONDS).result()
    assert isinstance(unknown.error, StaleHandleError) and destination.is_untouched(2)
    destination.close()


def test_two_readers_at_once(holder: Holder) -> None:
    destinations = [Destination(transports=(transport,)) for transport in ("tcp", "tcp", "shm")]
    pairs = [(block, 15 - block) for block in range(16)]
    futures = [
        destination.reader.read(holder.endpoint, holder.lease_id, destination.requests(pairs), SECONDS)
        for _ in range(20)
        for destination in destinations
    ]
    assert not wait(futures, SECONDS).not_done
    assert all(future.result().error is None for future in futures)
    for destination in destinations:
        assert all(destination.holds(dest, source) for source, dest in pairs)
        assert destination.reader.peers()[0].num_blocks == 20 * 16
        destination.close()
    assert wait_until(lambda: holder.references() == 16)


def test_one_connection_serves_all_reads(holder: Holder, destination: Destination) -> None:
    for _ in range(3):
        destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
    assert holder.server.stats().num_connections == 1
    (peer,) = destination.reader.peers()
    assert peer.gigabytes_per_second > 0 and peer.num_failed_reads == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("namespace", b"\x08" * 32),
        ("kv_dtype", "float32"),
        ("block_size_tokens", 32),
        ("num_layers", 2),
        ("num_kv_heads", 2),
        ("head_dim", 1),
    ],
)
def test_another_layout_is_refused_by_name(holder: Holder, destination: Destination, field: str, value: object) -> None:
    other = replace(layout(4096), **{field: value})
    destination.reader._context = replace(destination.reader._context, layout=other)
    result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
    assert isinstance(result.error, LayoutMismatchError) and field in result.error.message
    assert destination.is_untouched(0)


def test_another_incarnation_is_refused(holder: Holder, destination: Destination) -> None:
    stale = replace(holder.endpoint, incarnation="life-0")
    result = destination.reader.read(stale, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
    assert isinstance(result.error, StaleHandleError) and "life-1" in result.error.message


def test_a_closed_reader_ends_what_waits_and_takes_no_more(holder: Holder, destination: Destination) -> None:
    futures = [
        destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS)
        for _ in range(50)
    ]
    destination.reader.close()
    results = [future.result(1) for future in futures]
    assert all(result.error is None or isinstance(result.error, TransferFailedError) for result in results)
    late = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS)
    assert isinstance(late.result(1).error, TransferFailedError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read-")]


def test_a_cancelled_read_that_waits_never_runs(holder: Holder, destination: Destination) -> None:
    busy = [
        destination.reader.read(
            holder.endpoint, holder.lease_id, destination.requests([(block, block) for block in range(15)]), SECONDS
        )
        for _ in range(30)
    ]
    last = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(15, 15)]), SECONDS)
    cancelled = last.cancel()
    wait(busy, SECONDS)
    assert cancelled == destination.is_untouched(15)


def test_an_idle_connection_is_closed_and_opened_again(holder: Holder) -> None:
    destination = Destination(idle_seconds=0.1)
    for _ in range(3):
        result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS)
        assert result.result().error is None
        assert wait_until(lambda: not destination.reader.peers())
        assert wait_until(lambda: holder.server.stats().num_connections == 0)
    destination.close()


def test_a_holder_that_leaves_is_let_go_of(holder: Holder, destination: Destination) -> None:
    destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
    holder.server.close()
    assert wait_until(lambda: destination.reader.peers()[0].transport == "none")
    result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
    assert isinstance(result.error, TransferFailedError)


def test_idle_threads_use_no_processor(holder: Holder, destination: Destination) -> None:
    destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
    start = time.process_time()
    time.sleep(1.0)
    assert time.process_time() - start < 0.02


class TestChoice:
    """Which transport is taken."""

    def test_shm_where_both_are_on_one_host(self, holder: Holder) -> None:
        destination = Destination()
        result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS)
        assert result.result().transport == "shm"
        destination.close()

    def test_tcp_for_another_host(self, holder: Holder) -> None:
        destination = Destination()
        far = replace(holder.endpoint, host_id="another")
        result = destination.reader.read(far, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
        assert result.transport == "tcp" and result.error is None
        destination.close()

    def test_a_transport_that_should_work_and_does_not_is_a_loud_downgrade(
        self, holder: Holder, caplog: pytest.LogCaptureFixture
    ) -> None:
        destination = Destination()
        broken = replace(holder.endpoint, shm_address="biphase-nobody")
        result = destination.reader.read(broken, holder.lease_id, destination.requests([(0, 0)]), SECONDS).result()
        assert result.transport == "tcp" and result.error is None
        warnings = [record for record in caplog.records if record.levelname == "WARNING"]
        assert [record.getMessage() for record in warnings] == ["transport_failed"]
        destination.close()

    def test_the_fastest_is_taken_whatever_the_order(self, holder: Holder, caplog: pytest.LogCaptureFixture) -> None:
        """Both are measured, and what was measured is said."""
        destination = Destination(transports=("tcp", "shm"), by_speed=True)
        caplog.set_level("INFO")
        result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), SECONDS)
        assert result.result().error is None
        (chosen,) = destination.reader.peers()
        assert result.result().transport == chosen.transport
        (said,) = [record.event_fields for record in caplog.records if record.getMessage() == "transport_chosen"]
        other = ({"tcp", "shm"} - {chosen.transport}).pop()
        assert said["passed_over"].startswith(f"{other}: ") and said["passed_over"].endswith(" GB/s")
        assert wait_until(lambda: holder.server.stats().num_connections == 1), "the slower one is closed again"
        destination.close()

    def test_or_an_error_where_falling_back_is_not_allowed(self, holder: Holder) -> None:
        destination = Destination(allow_fallback=False)
        for endpoint in (
            replace(holder.endpoint, host_id="another"),
            replace(holder.endpoint, shm_address="biphase-nobody"),
            replace(holder.endpoint, transports=("tcp",)),
        ):
            result = destination.reader.read(endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0).result()
            assert isinstance(result.error, TransferFailedError) and "shm: " in result.error.message
            assert result.transport == "none"
        destination.close()

    def test_a_holder_that_offers_nothing_we_may_use(self) -> None:
        holder = Holder(transports=("tcp",))
        destination = Destination(transports=("shm",))
        result = destination.reader.read(holder.endpoint, holder.lease_id, destination.requests([(0, 0)]), 5.0)
        assert "not offered" in str(result.result().error)
        destination.close()
        holder.close()

    @pytest.mark.parametrize("transports", [(), ("carrier-pigeon",)])
    def test_unknown_transports_are_a_config_error(self, transports: tuple[str, ...]) -> None:
        with pytest.raises(ConfigError):
            Destination(transports=transports)
