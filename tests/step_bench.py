"""A scheduler with the fake model, stepped by hand: what the scheduler's tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.request import FinishReason, Request, RequestId, SamplingParams
from biphase.scheduler.config import SchedulerConfig
from biphase.scheduler.events import BlocksComputed, EngineEvent, Finished, Tokens
from biphase.scheduler.output import SchedulerOutput
from biphase.scheduler.scheduler import Scheduler
from tests.fake_runner import FakeRunner

SIZE = 4


class Bench:
    """A scheduler with a fake model, stepped by hand."""

    def __init__(self, num_blocks: int = 32, enable_caching: bool = True, **config: Any) -> None:
        self.pool = BlockPool(num_blocks, enable_caching)
        self.manager = KVCacheManager(self.pool, block_size=SIZE, namespace=b"test")
        self.runner = FakeRunner(self.pool, SIZE)
        self.events: list[tuple[str, EngineEvent]] = []
        self.now = 0.0
        settings = {"max_num_batched_tokens": 16, "max_num_seqs": 8, "watermark": 0.0, **config}
        self.scheduler = Scheduler(
            self.manager,
            SchedulerConfig(**settings),
            lambda request, event: self.events.append((request.request_id, event)),
            lambda: self.now,
        )

    def add(self, name: str, num_tokens: int, max_tokens: int = 8, **fields: Any) -> Request:
        start = sum(name.encode()) * 1000
        sampling = fields.pop("sampling", SamplingParams(max_tokens=max_tokens))
        prompt = fields.pop("prompt", list(range(start, start + num_tokens)))
        request = Request(RequestId(name), prompt, sampling, arrival_time=self.now, **fields)
        self.now += 0.001
        self.manager.prepare(request)
        self.scheduler.add(request)
        return request

    def schedule(self) -> SchedulerOutput:
        output = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return output

    def step(self) -> dict[str, int]:
        """Runs a step. Returns request id -> tokens, in the step's order."""
        output = self.schedule()
        if not output.scheduled:
            return {}
        self.scheduler.update_from_output(output, self.runner.execute(output))
        self.scheduler.check_integrity()
        self.now += 0.1
        return {s.request.request_id: s.num_scheduled_tokens for s in output.scheduled}

    def tokens(self, name: str) -> list[int]:
        return [t for who, e in self.events if who == name and isinstance(e, Tokens) for t in e.token_ids]

    def finished(self) -> dict[str, FinishReason]:
        return {who: e.reason for who, e in self.events if isinstance(e, Finished)}

    def announced(self, name: str) -> list[list[int]]:
        events = [e for who, e in self.events if who == name and isinstance(e, BlocksComputed)]
        return [[block.index for block in e.blocks] for e in events]

    def run_until(self, happened: Callable[[], bool], max_steps: int = 100) -> None:
        for _ in range(max_steps):
            if happened():
                return
            self.step()
        raise AssertionError("it does not happen")

    def run(self, max_steps: int = 500) -> int:
        for n in range(max_steps):
            if not self.step() and not self.scheduler.places.requests:
                return n
        raise AssertionError("it does not end")
