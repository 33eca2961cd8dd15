"""What the router tells apart: what a node holds now, what it will hold in a moment, and how far it has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from biphase.errors import UnavailableError
from biphase.request import BlockHash
from biphase.rpc.v1 import common_pb2, node_pb2
from services.gateway.node import Node
from services.gateway.routing.policies import policy_named
from services.gateway.routing.router import PREFILL_BUSY, Detour, Placement, Router, Ticket
from services.gateway.routing.speculation import SpeculativeHolders
from services.gateway.routing.waiting import WaitingLine

BLOCK = 16


def node(role: str, name: str) -> Node:
    layout = common_pb2.KVLayout(namespace=b"n" * 32, block_size_tokens=BLOCK)
    info = node_pb2.NodeInfo(
        node_id=name, role=role, incarnation=name, layout=layout, max_num_batched_tokens=512, max_num_seqs=64
    )
    return Node(name, info, node_pb2.NodeStatus(state="ready", prefill_tokens_per_second=1000.0))


class Pools:
    def __init__(self, *nodes: Node) -> None:
        self.nodes = nodes

    def usable(self, role: str, *, namespace: bytes | None = None) -> list[Node]:
        return [node for node in self.nodes if node.role == role]


class Index:
    """What is told, and nothing else."""

    def __init__(self) -> None:
        self.held: dict[str, set[BlockHash]] = {}

    def num_leading_blocks(self, hashes: Sequence[BlockHash]) -> Mapping[str, int]:
        found = {}
        for name, blocks in self.held.items():
            length = next((place for place, h in enumerate(hashes) if h not in blocks), len(hashes))
            if length:
                found[name] = length
        return found


class World:
    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.index = Index()
        self.nodes = {name: node("decode" if name[0] == "d" else "prefill", name) for name in names}
        self.router = Router(
            Pools(*self.nodes.values()),
            policy_named("cost"),
            speculation=SpeculativeHolders(lifetime_seconds=1e9, clock=lambda: self.now),
            index=self.index,
            max_busy_local_tokens=256,
            clock=lambda: self.now,
        )

    def ticket(self, name: str, shared: int, own: int) -> Ticket:
        tail = [int.from_bytes(name.encode(), "big") % 10**6] * own
        return Ticket(name, [*range(shared), *tail], "", arrival=self.now)

    def place(self, name: str, shared: int, own: int) -> Placement:
        placement = self.router.place(self.ticket(name, shared, own))
        assert isinstance(placement, Placement)
        return placement

    def learns(self, name: str, ticket: Ticket) -> None:
        self.index.held.setdefault(name, set()).update(ticket.hashes(b"n" * 32, BLOCK))


def test_a_prefix_that_is_being_computed_is_waited_for_and_not_computed_by_decode() -> None:
    world = World("d0", "p0")
    first = world.place("first", 1024, 128)
    assert first.decision.reason == "cheapest"
    # 128 tokens of its own: short enough for decode, if only decode could have the others.
    assert world.router.place(world.ticket("second", 1024, 128)) is None
    # Now it can, as the prefix is there to be read.
    world.learns("p0", world.ticket("first", 1024, 128))
    assert world.place("second", 1024, 128).decision.reason == PREFILL_BUSY


def test_it_is_waited_for_even_where_another_worker_is_free() -> None:
    world = World("d0", "p0", "p1")
    holder = world.place("first", 1024, 128).prefills[0]
    answer = world.router.place(world.ticket("second", 1024, 128))
    assert isinstance(answer, Detour) and answer.node is holder
    assert answer.num_uncached_tokens == 128


def test_the_worker_that_computes_a_prefix_is_the_one_for_the_next_prompt_that_has_it() -> None:
    world = World("d0", "p0", "p1")
    first = world.place("first", 800, 10)
    assert first.prefills[0] is world.nodes["p0"] or first.prefills[0] is world.nodes["p1"]
    assert world.place("second", 800, 10).prefills[0] is first.prefills[0]
    # Somebody else's prompt goes to the other one.
    assert world.place("third", 0, 600).prefills[0] is not first.prefills[0]


def test_work_in_flight_counts_for_less_as_time_goes_by() -> None:
    world = World("d0", "p0", "p1")
    long, short = world.place("long", 0, 1000), world.place("short", 1, 400)
    assert long.prefills[0] is not short.prefills[0]
    # Of 1000 tokens a second, nine tenths of each are reckoned as done.
    world.now = 0.9
    assert world.place("next", 2, 300).prefills[0] is short.prefills[0]
    long.prefilled()
    assert world.place("another", 3, 300).prefills[0] is long.prefills[0]


def test_what_can_be_read_is_reckoned_by_the_time_that_takes() -> None:
    world = World("d0", "p0")
    shared = world.ticket("x", 800, 0)
    world.learns("store", shared)
    placement = world.place("reads", 800, 80)
    # 800 tokens to read are 40 to compute.
    assert world.nodes["p0"].num_prefill_tokens_in_flight == 120
    placement.release()
    assert world.nodes["p0"].num_prefill_tokens_in_flight == 0


def test_what_a_worker_was_given_fades() -> None:
    world = World("d0", "p0")
    world.place("first", 0, 1000).release()
    given = world.nodes["p0"].view.num_tokens_given
    assert given == pytest.approx(1000)
    for second in range(60):
        world.now = float(second)
        world.place("one token", 0, 1).release()
    assert world.nodes["p0"].view.num_tokens_given < 0.65 * given


def test_who_waits_for_a_prefix_in_flight_holds_up_no_short_prompt() -> None:
    world = World("d0", "p0")
    line = WaitingLine(world.router, max_waiting=10)
    placed: dict[str, Placement] = {}

    def enter(name: str, shared: int, own: int) -> None:
        def answered(answer: Placement | UnavailableError) -> None:
            assert isinstance(answer, Placement)
            placed[name] = answer

        line.enter(world.ticket(name, shared, own), answered)

    enter("first", 1024, 128)
    enter("second", 1024, 128)
    enter("short", 0, 50)
    assert set(placed) == {"first", "short"} and placed["short"].decision.reason == PREFILL_BUSY
    placed["first"].prefilled()
    assert placed["second"].prefills[0] is world.nodes["p0"]
