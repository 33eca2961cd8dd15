from __future__ import annotations

import asyncio

import pytest

from biphase.errors import OverloadedError, UnavailableError
from biphase.rpc.client import ChannelPool
from biphase.rpc.v1 import common_pb2, node_pb2
from services.gateway.admission import AdmissionQueue
from services.gateway.node import Node
from services.gateway.nodes import NodeDirectory
from services.gateway.routing.policies import policy_named
from services.gateway.routing.router import Router, Ticket
from services.gateway.routing.speculation import SpeculativeHolders
from services.gateway.routing.waiting import AGEING_TOKENS_PER_SECOND, WaitingLine


class _Nodes(NodeDirectory):
    """A directory with one decode worker that is always ready."""

    def __init__(self, places: int) -> None:
        super().__init__(ChannelPool())
        layout = common_pb2.KVLayout(namespace=b"n" * 32, block_size_tokens=16)
        info = node_pb2.NodeInfo(node_id="d", role="decode", incarnation="i", layout=layout, max_num_seqs=places)
        self.decode = Node("x:1", info, node_pb2.NodeStatus(state="ready"))
        self._nodes["x:1"] = self.decode


@pytest.fixture
def one_place() -> tuple[_Nodes, AdmissionQueue]:
    nodes = _Nodes(1)
    router = Router(nodes, policy_named("cost"), speculation=SpeculativeHolders(lifetime_seconds=10))
    return nodes, AdmissionQueue(WaitingLine(router, max_waiting=3, prefill_rate=lambda: 100.0))


def _ticket(name: str, length: int, **fields: object) -> Ticket:
    return Ticket(name, list(range(length)), "", **fields)  # type: ignore[arg-type]


async def test_order(one_place: tuple[_Nodes, AdmissionQueue]) -> None:
    _, queue = one_place
    order: list[str] = []

    async def take(ticket: Ticket) -> None:
        placement = await queue.admit(ticket)
        order.append(ticket.request_id)
        await asyncio.sleep(0)
        placement.release()

    held = await queue.admit(_ticket("first", 10))
    aged = _ticket("long but old", 3000)
    aged.arrival -= 3000 / AGEING_TOKENS_PER_SECOND
    tickets = [_ticket("long", 2000), aged, _ticket("short", 100)]
    tasks = [asyncio.create_task(take(ticket)) for ticket in tickets]
    await asyncio.sleep(0)
    # The queue is full, but a stream that lost its worker still gets in, and goes first.
    tasks.append(asyncio.create_task(take(_ticket("moved", 4000, moved=True))))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as refused:
        await queue.admit(_ticket("one too many", 1))
    assert 40 < refused.value.retry_after_seconds <= 60
    held.release()
    await asyncio.gather(*tasks)
    assert order == ["moved", "long but old", "short", "long"] and queue.num_waiting == 0


async def test_priority_goes_before_length(one_place: tuple[_Nodes, AdmissionQueue]) -> None:
    _, queue = one_place
    held = await queue.admit(_ticket("first", 10))
    low = asyncio.create_task(queue.admit(_ticket("low", 1, priority=5)))
    high = asyncio.create_task(queue.admit(_ticket("high", 9999, priority=-1)))
    await asyncio.sleep(0)
    held.release()
    await asyncio.sleep(0)
    assert high.done() and not low.done()
    (await high).release()
    (await low).release()


async def test_cancelled_tickets_leave_no_trace(one_place: tuple[_Nodes, AdmissionQueue]) -> None:
    nodes, queue = one_place
    held = await queue.admit(_ticket("first", 10))
    tasks = [asyncio.create_task(queue.admit(_ticket(str(place), 10))) for place in range(3)]
    await asyncio.sleep(0)
    # One goes in the very moment that its place comes.
    held.release()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert (queue.num_waiting, nodes.decode.num_in_flight) == (0, 0)
    (await queue.admit(_ticket("next", 10))).release()


async def test_waiting_ends_when_the_last_worker_goes(one_place: tuple[_Nodes, AdmissionQueue]) -> None:
    nodes, queue = one_place
    await queue.admit(_ticket("first", 10))
    waiting = asyncio.create_task(queue.admit(_ticket("second", 10)))
    await asyncio.sleep(0)
    nodes.decode.failed_probes = 99
    queue.wake()
    with pytest.raises(UnavailableError):
        await waiting
    with pytest.raises(UnavailableError):
        await queue.admit(_ticket("third", 10))


async def test_release_twice_is_harmless(one_place: tuple[_Nodes, AdmissionQueue]) -> None:
    nodes, queue = one_place
    placement = await queue.admit(_ticket("first", 10))
    placement.release()
    placement.release()
    assert nodes.decode.num_in_flight == 0


def _prefill(name: str) -> Node:
    layout = common_pb2.KVLayout(namespace=b"n" * 32, block_size_tokens=16)
    info = node_pb2.NodeInfo(node_id=name, role="prefill", incarnation=name, layout=layout, max_num_batched_tokens=512)
    return Node(name, info, node_pb2.NodeStatus(state="ready", prefill_tokens_per_second=1000.0))


async def test_who_waits_for_the_holder_of_its_prefix_holds_up_nobody() -> None:
    nodes = _Nodes(100)
    nodes._nodes |= {"p0": _prefill("p0"), "p1": _prefill("p1")}
    router = Router(nodes, policy_named("cost"), speculation=SpeculativeHolders(lifetime_seconds=10))
    queue = AdmissionQueue(WaitingLine(router, max_waiting=3))
    first = await queue.admit(_ticket("first", 8000))
    holder = first.prefills[0]
    first.prefilled()
    # The holder is busy for a moment; computing the 8,000 tokens again would take longer than that.
    holder.give_prefill(2000)
    again = asyncio.create_task(queue.admit(_ticket("again", 8000)))
    await asyncio.sleep(0)
    assert not again.done() and queue.num_waiting == 1 and holder.num_prefill_tokens_waiting < 16
    other = Ticket("other", list(range(50_000, 50_500)), "")
    assert (await queue.admit(other)).prefills[0] is not holder
    holder.take_prefill_back(2000)
    router.on_freed(holder)
    placement = await again
    assert placement.prefills[0] is holder and placement.decision.reason == "cached"
    assert queue.num_waiting == 0 and holder.num_prefill_tokens_waiting == 0
    # Whoever gives up while it stands aside leaves no trace.
    holder.give_prefill(2000)
    gives_up = asyncio.create_task(queue.admit(_ticket("gives up", 8000)))
    await asyncio.sleep(0)
    gives_up.cancel()
    await asyncio.gather(gives_up, return_exceptions=True)
    assert queue.num_waiting == 0 and holder.num_prefill_tokens_waiting == 0
    router.on_freed(holder)
