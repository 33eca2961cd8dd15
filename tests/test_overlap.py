"""Overlapping steps on a real model: under random operations, token for token what steps one after the other give."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.engine import Engine, EngineEvent, Finished, Reserved, SchedulerConfig, Tokens
from biphase.grammar import spec
from biphase.grammar.library import GrammarLibrary
from biphase.model.forward import ForwardBatch
from biphase.model.loader import LoadedModel, load_model
from biphase.model.source import resolve_model
from biphase.request import FinishReason, Request, RequestId, SamplingParams
from biphase.rows import Span
from biphase.runner import ModelRunner, PendingStep
from biphase.scheduler.output import RunnerOutput, SchedulerOutput
from tests.stepping import Stepper, poisoned_cache
from tests.tiny_models import expected_tokens, save_tiny
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE, tiny_tokenizer

BLOCK_SIZE = 4
NUM_BLOCKS = 40
MAX_MODEL_LEN = 100
LIMITS: dict[str, int] = {"max_num_seqs": 6, "max_num_batched_tokens": 24, "max_model_len": MAX_MODEL_LEN}
GRAMMARS = (spec.regex("[ab ]{2,9}"), spec.regex('\\{"name": [0-9]{1,6}\\}'))


class LateRunner(ModelRunner):
    """Computes every other step as late as can be, when a result is asked for. Counts those that overlap."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.num_steps = self.num_in_flight = self.num_overlapping = 0
        self._due = threading.Semaphore(0)
        self._late: list[PendingStep] = []

    def begin(self, step: SchedulerOutput) -> PendingStep:
        self.num_overlapping += self.num_in_flight
        self.num_in_flight += 1
        self.num_steps += 1
        pending = super().begin(step)
        if self.num_steps % 2:
            self._late.append(pending)
        else:
            self._due.release()
        return pending

    def _compute(self, batch: ForwardBatch, sampling: Sequence[Span], pending: PendingStep, in_halves: bool) -> None:
        if in_halves:
            self._due.acquire(timeout=10)  # A test that failed ends nevertheless.
        super()._compute(batch, sampling, pending, in_halves)

    def finish(self, pending: PendingStep) -> RunnerOutput:
        self.num_in_flight -= 1
        if any(late is pending for late in self._late):
            self._late.clear()
            self._due.release()
        return super().finish(pending)


class Rig:
    """An engine over the model, with its own KV memory."""

    def __init__(
        self,
        model: LoadedModel,
        grammars: GrammarLibrary | None,
        *,
        num_blocks: int,
        overlap: bool,
        native: bool,
        **config: Any,
    ) -> None:
        self.pool = BlockPool(num_blocks, enable_caching=overlap)
        self.manager = KVCacheManager(self.pool, block_size=BLOCK_SIZE, namespace=b"test")
        self.kv_cache = poisoned_cache(model.spec, num_blocks, BLOCK_SIZE, model.dtype)
        options: dict[str, Any] = {**LIMITS, "num_threads": 1, "native": native, "grammars": grammars}
        self.runner = LateRunner(model, self.kv_cache, block_size=BLOCK_SIZE, **options)
        settings = SchedulerConfig(**LIMITS, overlap=overlap, **config)
        self.engine = Engine(self.runner, self.manager, settings)


@dataclass
class Client:
    """One request's owner."""

    request: Request
    world: World
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: list[Any] = field(default_factory=list)
    reserved: Reserved | None = None
    answered: bool = False
    finished: Finished | None = None

    def __call__(self, event: EngineEvent) -> None:
        assert self.finished is None
        if isinstance(event, Tokens):
            self.tokens += event.token_ids
            self.logprobs += event.logprobs
            self.prompt_logprobs += event.prompt_logprobs
        elif isinstance(event, Reserved):
            self.reserved = event
            self.world.rig.pool.acquire(event.block_ids)
        elif isinstance(event, Finished):
            self.finished = event


class World:
    def __init__(self, model: LoadedModel, grammars: GrammarLibrary, seed: int, native: bool, policy: str) -> None:
        self.rng = random.Random(seed)
        self.rig = Rig(model, grammars, num_blocks=NUM_BLOCKS, overlap=True, native=native, policy=policy)
        self.plain = Rig(model, grammars, num_blocks=NUM_BLOCKS, overlap=False, native=native)
        self.prefill = Stepper(model, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, native=native)
        self.clients: list[Client] = []
        self.serial = 0
        self.stems = [self.random_tokens(30) for _ in range(2)]
        self.ends = dict.fromkeys(FinishReason, 0)

    def random_tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(4, 360) for _ in range(count)]

    def random_sampling(self) -> SamplingParams:
        rng = self.rng
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.randrange(1000),
            max_tokens=rng.choice([1, 2, 10, 25, 40]),
            eos_token_ids=frozenset({2, *self.random_tokens(3)}),
            stop_token_ids=frozenset(self.random_tokens(8)),
            ignore_eos=rng.random() < 0.3,
        )
        roll = rng.random()
        changes: dict[str, Any] = {}
        if roll < 0.05:
            changes = {"structured_output": rng.choice(GRAMMARS), "eos_token_ids": frozenset({2}), "ignore_eos": False}
        elif roll < 0.09:
            changes = {"frequency_penalty": 0.7, "repetition_penalty": 1.2}
        elif roll < 0.13:
            changes = {"bad_words": (tuple(self.random_tokens(1)), tuple(self.random_tokens(2)))}
        elif roll < 0.2:
            changes = {"min_tokens": rng.randint(1, params.max_tokens)}
        elif roll < 0.3:
            changes = {"logprobs": 2}
        elif roll < 0.34:
            changes = {"prompt_logprobs": 1}
        elif roll < 0.4:
            changes = {"logit_bias": ((5, 2.5), (9, -3.0))}
        elif roll < 0.6:
            changes = {"temperature": 0.8, "top_p": 0.9, "top_k": rng.choice([0, 12]), "min_p": rng.choice([0.0, 0.05])}
        return replace(params, **changes)

    def add(self) -> None:
        rng = self.rng
        if len(self.clients) > 12:
            return
        self.serial += 1
        prompt = rng.choice(self.stems)[: rng.randint(0, 30)] + self.random_tokens(rng.randint(1, 20))
        sampling = self.random_sampling()
        request = Request(
            RequestId(f"r{self.serial}"),
            prompt,
            sampling,
            prefill_only=rng.random() < 0.1,
            # Of a prompt whose logprobs are wanted nothing comes from elsewhere.
            awaits_kv=rng.random() < 0.2 and sampling.prompt_logprobs is None,
        )
        client = Client(request, self)
        self.rig.engine.add_request(request, client)
        self.clients.append(client)

    def answer(self) -> None:
        """A transfer ends: with the KV that another runner computed and its first token, or with less."""
        ready = [client for client in self.clients if client.reserved is not None and not client.answered]
        if not ready:
            return
        client = self.rng.choice(ready)
        reserved, request = client.reserved, client.request
        assert reserved is not None
        client.answered = True
        num_valid, first = 0, None
        roll = self.rng.random()
        if roll < 0.7:
            # The other runner has no grammars.
            free = request.sampling.structured_output is None
            other = Request(
                request.request_id, request.prompt_token_ids, request.sampling if free else SamplingParams()
            )
            while other.num_computed_tokens < other.num_prompt_tokens:
                out = self.prefill.step([other])
            blocks = self.prefill.blocks.pop(request.request_id)
            for index in range(reserved.num_cached_tokens // BLOCK_SIZE, len(blocks)):
                # As bytes: NaN in unused slots stay what they are.
                self.rig.kv_cache[reserved.block_ids[index]] = self.prefill.kv_cache[blocks[index]]
            self.prefill.free_blocks += blocks
            num_valid = request.num_tokens
            if roll < 0.4 and free and not request.prefill_only:
                first = out.sampled[request.request_id]
            elif roll > 0.6:
                num_valid = self.rng.randint(0, num_valid)
        self.rig.engine.kv_ready(
            request.request_id,
            num_valid_tokens=max(num_valid, reserved.num_cached_tokens),
            num_external_tokens=num_valid,
            first_token=first,
        )
        self.rig.pool.release(reserved.block_ids)

    def abort(self) -> None:
        if self.clients:
            self.rig.engine.abort(self.rng.choice(self.clients).request.request_id)

    def settle(self) -> None:
        """Those that ended got what they would have got alone."""
        for client in [client for client in self.clients if client.finished is not None]:
            self.clients.remove(client)
            finished, request = client.finished, client.request
            assert finished is not None
            self.ends[finished.reason] += 1
            if client.reserved is not None and not client.answered:
                self.rig.pool.release(client.reserved.block_ids)
            alone = self.alone(request)
            if finished.reason is FinishReason.ABORT:
                assert client.tokens == alone.tokens[: len(client.tokens)]
                continue
            if request.prefill_only:
                assert client.tokens == alone.tokens[:1]
                continue
            assert alone.finished is not None
            assert (client.tokens, finished.reason) == (alone.tokens, alone.finished.reason)
            assert finished.stop_token_id == alone.finished.stop_token_id
            assert len(client.logprobs) == len(alone.logprobs)
            for mine, theirs in zip(client.logprobs + client.prompt_logprobs,
                                    alone.logprobs + alone.prompt_logprobs, strict=True):  # fmt: skip
                assert mine.token_ids == theirs.token_ids
                assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)

    def alone(self, request: Request) -> Client:
        client = Client(Request(request.request_id, request.prompt_token_ids, request.sampling), self)
        self.plain.engine.add_request(client.request, client)
        while client.finished is None:
            assert self.plain.engine.step()
        return client

    def run(self, num_operations: int) -> None:
        rng, engine = self.rng, self.rig.engine
        for _ in range(num_operations):
            roll = rng.random()
            if roll < 0.15:
                self.add()
            elif roll < 0.22:
                self.answer()
            elif roll < 0.23:
                self.abort()
            else:
                engine.step()
            engine._scheduler.check_integrity()
            self.settle()
        while self.clients:
            self.answer()
            engine.step()
            engine._scheduler.check_integrity()
            self.settle()
        while engine.step():
            pass
        assert self.rig.pool.num_used == 0


@pytest.fixture(scope="module")
def overlap_model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_tiny("llama", folder, vocab_size=MODEL_VOCAB_SIZE, num_hidden_layers=2)
    return load_model(resolve_model(str(folder)), "float32")


@pytest.fixture(scope="module")
def overlap_grammars(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarLibrary]:
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    library = GrammarLibrary(lambda: tokenizer, MODEL_VOCAB_SIZE)
    yield library
    library.close()


@pytest.mark.parametrize(
    ("native", "policy", "num_operations"),
    [
        (True, "fcfs", 3000),
        (True, "shortest_first", 3000),
        (False, "fcfs", 500),
        pytest.param(True, "priority", 15_000, marks=pytest.mark.slow),
    ],
)
def test_random_operations(
    overlap_model: LoadedModel, overlap_grammars: GrammarLibrary, native: bool, policy: str, num_operations: int
) -> None:
    world = World(overlap_model, overlap_grammars, num_operations, native, policy)
    world.run(num_operations)
    stats = world.rig.engine.stats()
    assert world.rig.runner.num_overlapping > num_operations / 10
    assert world.ends[FinishReason.ERROR] == 0
    assert min(world.ends[r] for r in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT)) > 1
    assert stats.num_preemptions > num_operations / 1000
    assert stats.prefix_cache_hits_tokens > num_operations / 10


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma3"])
@pytest.mark.parametrize("native", [False, True])
def test_greedy_tokens_equal_transformers(name: str, native: bool, tmp_path: Path) -> None:
    folder = save_tiny(name, tmp_path)
    model = load_model(resolve_model(str(folder)), "float32")
    rng = random.Random(7)
    prompts = [[rng.randrange(3, 211) for _ in range(length)] for length in (1, 5, 33, 60, 17)]
    rig = Rig(model, None, num_blocks=NUM_BLOCKS, overlap=True, native=native)
    world: Any = None
    clients = [
        Client(Request(RequestId(f"r{n}"), prompt, SamplingParams(max_tokens=24)), world)
        for n, prompt in enumerate(prompts)
    ]
    for client in clients:
        rig.engine.add_request(client.request, client)
    while rig.engine.step():
        rig.engine._scheduler.check_integrity()
    assert [client.tokens for client in clients] == expected_tokens(folder, prompts, 24)
    assert rig.runner.num_overlapping > 20
    assert rig.pool.num_used == 0
