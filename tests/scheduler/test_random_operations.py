"""10,000 random operations on engine, scheduler, manager and pool together: nothing lost, and never a wrong token."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.engine import BlocksComputed, Engine, EngineEvent, Finished, Reserved, SchedulerConfig, Tokens
from biphase.errors import BiphaseError, InvalidRequestError, OverloadedError
from biphase.request import FinishReason, Request, RequestId, SamplingParams, StructuredOutput
from biphase.scheduler.output import SampledToken
from tests.fake_runner import FakeOverlappingRunner, FakeRunner, expected_tokens, kv_of

BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_MODEL_LEN = 120


@dataclass
class Client:
    """One request's owner: keeps what it hears and checks it."""

    world: World
    request: Request
    tokens: list[int] = field(default_factory=list)
    reserved: Reserved | None = None
    answered: bool = False
    finished: Finished | None = None
    leased: list[int] = field(default_factory=list)
    io: list[int] = field(default_factory=list)
    next_index: int = 0

    def __call__(self, event: EngineEvent) -> None:
        assert self.finished is None, "an event after the end"
        world, request = self.world, self.request
        if isinstance(event, Tokens):
            self.tokens.extend(event.token_ids)
        elif isinstance(event, Reserved):
            assert self.reserved is None
            self.reserved = event
            self.io = list(event.block_ids[event.num_cached_tokens // BLOCK_SIZE :])
            world.pool.acquire(self.io)
        elif isinstance(event, BlocksComputed):
            ids = [block.block_id for block in event.blocks]
            assert [block.index for block in event.blocks] == list(
                range(self.next_index, self.next_index + len(event.blocks))
            )
            self.next_index += len(event.blocks)
            world.pool.acquire(ids)
            self.leased += ids
            values = kv_of(request.all_token_ids)
            for block in event.blocks:
                assert world.pool.generations[block.block_id] == block.generation
                want = values[block.index * BLOCK_SIZE : (block.index + 1) * BLOCK_SIZE]
                slots = world.runner.memory[block.block_id * BLOCK_SIZE :][: len(want)]
                assert slots == want, "announced before it was computed"
                assert (len(want) == BLOCK_SIZE) == bool(block.block_hash)
        else:
            self.finished = event
            world.check_end(self)


class World:
    def __init__(self, seed: int, policy: str, enable_caching: bool, overlap: bool) -> None:
        self.rng = random.Random(seed)
        self.pool = BlockPool(NUM_BLOCKS, enable_caching)
        self.manager = KVCacheManager(self.pool, block_size=BLOCK_SIZE, namespace=b"test")
        self.overlapping = FakeOverlappingRunner(self.pool, BLOCK_SIZE, 32, seed=seed)
        self.runner = self.overlapping if overlap else FakeRunner(self.pool, BLOCK_SIZE, 32)
        self.now = 0.0
        config = SchedulerConfig(
            max_num_seqs=6,
            max_num_batched_tokens=32,
            max_model_len=MAX_MODEL_LEN,
            max_waiting=12,
            policy=policy,
            ageing_seconds=20.0,
            overlap=overlap,
        )
        self.engine = Engine(self.runner, self.manager, config, clock=lambda: self.now)
        self.clients: dict[str, Client] = {}
        self.leases: list[list[int]] = []
        self.stems = [self.random_tokens(40) for _ in range(3)]
        self.num_ended = dict.fromkeys(FinishReason, 0)
        self.serial = 0

    def random_tokens(self, n: int) -> list[int]:
        return [self.rng.randrange(97) for _ in range(n)]

    def add(self) -> None:
        rng = self.rng
        prompt = rng.choice(self.stems)[: rng.randint(0, 40)] + self.random_tokens(rng.randint(1, 12))
        sampling = SamplingParams(
            max_tokens=rng.choice([1, 2, 8, 30, 70]),
            min_tokens=rng.choice([0, 0, 5]),
            eos_token_ids=frozenset({1, 2}),
            stop_token_ids=frozenset({3}) if rng.random() < 0.3 else frozenset(),
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=1 if rng.random() < 0.05 else None,
        )
        if not (sampling.min_tokens or sampling.ignore_eos) and rng.random() < 0.1:
            sampling = replace(sampling, structured_output=StructuredOutput("regex", "."))
        self.serial += 1
        request = Request(
            RequestId(f"r{self.serial}"),
            prompt,
            sampling,
            priority=rng.choice([0, 0, 1]),
            arrival_time=self.now,
            cache_salt=rng.choice(["", "", "tenant"]),
        )
        kind = rng.choice(["normal", "normal", "moved", "awaits", "awaits", "prefill", "prefill_external"])
        if kind == "moved":
            whole = expected_tokens(prompt, sampling, MAX_MODEL_LEN)
            request.output_token_ids = whole[: rng.randrange(len(whole))]
            request.num_preset_output_tokens = request.num_output_tokens
        request.prefill_only = kind.startswith("prefill")
        request.awaits_kv = kind in ("awaits", "prefill_external")
        client = Client(self, request)
        if request.prefill_only:
            request.num_held_blocks = client.next_index = rng.randint(0, len(prompt) // BLOCK_SIZE)
        try:
            self.engine.add_request(request, client)
        except BiphaseError as error:
            assert isinstance(error, OverloadedError) or len(prompt) + sampling.max_tokens > 100
        else:
            self.clients[request.request_id] = client

    def answer(self) -> None:
        """A transfer ends: complete with the first token, in part, or with nothing."""
        ready = [c for c in self.clients.values() if c.reserved and not c.answered]
        if not ready:
            return
        client = self.rng.choice(ready)
        assert client.reserved is not None
        client.answered = True
        request, held = client.request, client.reserved.num_cached_tokens
        how = self.rng.random()
        num_valid = request.num_tokens if how < 0.6 else self.rng.randint(held, request.num_tokens)
        if how > 0.9:
            num_valid = 0
        self.runner.receive(client.reserved.block_ids, request.all_token_ids, held, max(held, num_valid))
        first = None
        if how < 0.5 and not request.prefill_only:
            first = SampledToken(expected_tokens(request.all_token_ids, SamplingParams(max_tokens=1))[0])
        self.engine.kv_ready(
            request.request_id,
            num_valid_tokens=num_valid,
            num_external_tokens=max(0, num_valid - held),
            first_token=first,
        )
        self.pool.release(client.io)
        client.io = []

    def fail(self) -> None:
        """From now on there is no token for one of the requests."""
        if self.clients:
            request_id = self.rng.choice(list(self.clients.values())).request.request_id
            self.overlapping.failing[request_id] = InvalidRequestError("no token")

    def abort(self) -> None:
        if self.clients:
            client = self.rng.choice(list(self.clients.values()))
            self.engine.abort(client.request.request_id)
            if self.rng.random() < 0.5:
                self.engine.abort(client.request.request_id)

    def lease(self) -> None:
        """Another node finds a chain here, and lets it go later."""
        if self.leases and self.rng.random() < 0.9:
            self.pool.release(self.leases.pop(self.rng.randrange(len(self.leases))))
        elif self.clients:
            hashes = self.rng.choice(list(self.clients.values())).request.block_hashes
            self.leases.append([block_id for block_id, _ in self.pool.lease_chain(hashes[:4])])

    def check_end(self, client: Client) -> None:
        request, finished = client.request, client.finished
        assert finished is not None
        assert finished.reason is not FinishReason.ERROR or request.request_id in self.overlapping.failing
        self.num_ended[finished.reason] += 1
        del self.clients[request.request_id]
        whole = expected_tokens(request.prompt_token_ids, request.sampling, MAX_MODEL_LEN)
        whole = whole[request.num_preset_output_tokens :]
        if finished.reason in (FinishReason.ABORT, FinishReason.ERROR):
            assert client.tokens == whole[: len(client.tokens)]
        elif request.prefill_only:
            assert client.tokens == whole[:1]
            assert client.next_index == -(-request.num_prompt_tokens // BLOCK_SIZE)
        else:
            assert client.tokens == whole
        if client.io:  # aborted while a transfer wrote: it may go on writing until it lets go
            self.leases.append(client.io)
        if client.leased:
            self.leases.append(client.leased)

    def check(self) -> None:
        self.engine._scheduler.check_integrity()


@pytest.mark.parametrize("policy", ["fcfs", "priority", "shortest_first"])
@pytest.mark.parametrize("enable_caching", [True, False])
@pytest.mark.parametrize("overlap", [False, True], ids=["alone", "overlapping"])
def test_random_operations(policy: str, enable_caching: bool, overlap: bool) -> None:
    world = World(hash_free_seed(policy, enable_caching), policy, enable_caching, overlap)
    rng = world.rng
    for _ in range(10_000):
        world.now += 1.0
        roll = rng.random()
        if roll < 0.14:
            world.add()
        elif roll < 0.26:
            world.answer()
        elif roll < 0.28:
            world.abort()
        elif roll < 0.42:
            world.lease()
        elif roll < 0.422:
            world.pool.drop_cached()
        elif roll < 0.424 and overlap:
            world.fail()
        elif roll < 0.46 and overlap:
            world.overlapping.work()
        else:
            world.engine.step()
        world.check()
    # Everything that is left comes to its end.
    for _ in range(3_000):
        world.now += 1.0
        world.answer()
        if world.leases:
            world.pool.release(world.leases.pop())
        world.engine.step()
        world.check()
        if not world.clients and not world.leases:
            break
    assert not world.clients
    world.engine.step()  # One may be in flight of whose requests none is left.
    assert world.pool.num_used == 0
    assert world.engine.stats().num_preemptions > 20
    assert min(world.num_ended[r] for r in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 20
    if overlap:
        assert world.overlapping.num_fed > 1000
        assert world.num_ended[FinishReason.ERROR] > 3
    stats = world.engine.stats()
    assert (stats.prefix_cache_hits_tokens > 1000) == enable_caching
    assert stats.num_finished == {r.value: n for r, n in world.num_ended.items() if n}


def hash_free_seed(policy: str, enable_caching: bool) -> int:
    return sum(policy.encode()) * 2 + enable_caching
