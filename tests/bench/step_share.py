"""What a decode step of the engine spends beside the model, and what prefix caching costs when nothing is ever found.

    python -m tests.bench.step_share [--sequences 32] [--prompt 128] [--output 128] [--rounds 3] [--sampled] [--overlap]

Runs the bundled model in one process: scheduler, cache manager, runner and sampler as a worker has them, sinks that do
nothing. With prefix caching on and off in turn, on prompts that share nothing. Prints a table: milliseconds of a step
with every sequence in it, by part, and output tokens/s of the whole load, prompts included. With --overlap: of steps
that overlap and steps that do not, in turn, instead.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.cache.memory import BlockMemory
from biphase.cache.tensors import kv_block_bytes, kv_tensor
from biphase.engine import Engine, EngineEvent, SchedulerConfig
from biphase.model.loader import load_model
from biphase.model.source import resolve_model
from biphase.request import Request, RequestId, SamplingParams
from biphase.runner import ModelRunner

BLOCK_SIZE = 16
MAX_TOKENS = 512
PARTS = ("schedule", "inputs", "model", "sample", "update", "events")


class Parts:
    """Seconds by part, of the steps that count."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self._now: dict[str, float] = {}

    def timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self._now[name] = self._now.get(name, 0.0) + time.perf_counter() - started

        return run

    def begin(self) -> None:
        self._now = {}

    def end(self, whole: float) -> None:
        now = self._now
        now["inputs"] = now["execute"] - now["model"] - now["sample"]
        now["update"] -= now.get("events", 0.0)
        for name in PARTS:
            self.seconds[name].append(now.get(name, 0.0))
        self.seconds["whole"].append(whole)


class Rig:
    """One model and its memory; a fresh engine for every load."""

    def __init__(self, num_sequences: int, tokens_each: int) -> None:
        model = load_model(resolve_model(""), "bfloat16")
        spec = model.spec
        self.num_sequences = num_sequences
        self.num_blocks = num_sequences * (tokens_each // BLOCK_SIZE + 2)
        shape = (spec.num_layers, spec.num_kv_heads, BLOCK_SIZE, spec.head_dim)
        memory = BlockMemory(self.num_blocks, kv_block_bytes(*shape, model.dtype), populate=True)
        self.runner: Any = ModelRunner(
            model, kv_tensor(memory, *shape, model.dtype), block_size=BLOCK_SIZE, max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=num_sequences, max_model_len=tokens_each + BLOCK_SIZE,
        )  # fmt: skip

    def load(
        self, enable_caching: bool, prompt: int, output: int, temperature: float, seed: int, overlap: bool = False
    ) -> tuple[Parts, float]:
        """Returns the parts of steps with every sequence in them, and output tokens/s of all."""
        draw = random.Random(seed)
        parts = Parts()
        pool = BlockPool(self.num_blocks, enable_caching)
        manager = KVCacheManager(pool, block_size=BLOCK_SIZE, namespace=b"bench")
        runner = self.runner
        plain = runner._forward, runner._sample, runner.execute
        runner._forward, runner._sample = parts.timed("model", plain[0]), parts.timed("sample", plain[1])
        runner.execute = parts.timed("execute", plain[2])
        config = SchedulerConfig(max_num_seqs=self.num_sequences, max_num_batched_tokens=MAX_TOKENS, overlap=overlap)
        engine: Any = Engine(runner, manager, config)
        scheduler = engine._scheduler
        scheduler.schedule = parts.timed("schedule", scheduler.schedule)
        scheduler.update_from_output = parts.timed("update", scheduler.update_from_output)
        sink = parts.timed("events", _ignore)
        try:
            started = time.perf_counter()
            for i in range(self.num_sequences):
                tokens = [draw.randrange(1_000, 30_000) for _ in range(prompt)]
                sampling = SamplingParams(max_tokens=output, temperature=temperature, seed=i, top_p=0.95)
                engine.add_request(Request(RequestId(f"r{seed}-{i}"), tokens, sampling), sink)
            running = True
            while running:
                parts.begin()
                before = time.perf_counter()
                running = engine.step()
                whole = time.perf_counter() - before
                requests = scheduler.places.running.requests
                if running and len(requests) == self.num_sequences and all(r.num_output_tokens > 1 for r in requests):
                    if overlap:
                        parts.seconds["whole"].append(whole)
                    else:
                        parts.end(whole)
            seconds = time.perf_counter() - started
        finally:
            runner._forward, runner._sample, runner.execute = plain
        assert pool.num_used == 0
        return parts, self.num_sequences * output / seconds


def _ignore(event: EngineEvent) -> None:
    return None


def compare_overlap(rig: Rig, given: argparse.Namespace) -> None:
    rates: dict[bool, list[float]] = {True: [], False: []}
    steps: dict[bool, list[float]] = {True: [], False: []}
    for n in range(given.rounds):
        for overlap in (True, False) if n % 2 == 0 else (False, True):
            temperature = 0.8 if given.sampled else 0.0
            parts, rate = rig.load(True, given.prompt, given.output, temperature, n + 1, overlap)
            rates[overlap].append(rate)
            steps[overlap] += parts.seconds["whole"]
    print(f"{given.sequences} sequences, {given.prompt} tokens in, {given.output} out, {given.rounds} rounds\n")
    for overlap in (True, False):
        print(
            f"steps {'overlap' if overlap else 'alone  '}: median {statistics.median(steps[overlap]) * 1e3:.2f} ms, "
            f"{statistics.median(rates[overlap]):.1f} output tokens/s"
        )
    ratios = sorted(on / off for on, off in zip(rates[True], rates[False], strict=True))
    print(f"overlap over alone, tokens/s: median {statistics.median(ratios):.3f}, {ratios[0]:.3f} to {ratios[-1]:.3f}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name, default in (("sequences", 32), ("prompt", 128), ("output", 128), ("rounds", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--sampled", action="store_true", help="temperature 0.8 and top_p 0.95 instead of greedy")
    parser.add_argument("--overlap", action="store_true", help="compare steps that overlap with steps that do not")
    given = parser.parse_args()
    rig = Rig(given.sequences, given.prompt + given.output)
    temperature = 0.8 if given.sampled else 0.0
    rig.load(True, given.prompt, 8, temperature, 0)
    gc.collect()
    gc.freeze()
    if given.overlap:
        compare_overlap(rig, given)
        return 0
    rates: dict[bool, list[float]] = {True: [], False: []}
    shares: dict[bool, dict[str, list[float]]] = {True: defaultdict(list), False: defaultdict(list)}
    for n in range(given.rounds):
        # Each goes first in turn.
        for enabled in (True, False) if n % 2 == 0 else (False, True):
            parts, rate = rig.load(enabled, given.prompt, given.output, temperature, n + 1)
            rates[enabled].append(rate)
            for name, seconds in parts.seconds.items():
                shares[enabled][name] += seconds
    print(f"{given.sequences} sequences, {given.prompt} tokens in, {given.output} out, {given.rounds} rounds\n")
    print("| prefix caching | " + " | ".join(f"{name} ms" for name in (*PARTS, "whole")) + " | beside the model |")
    print("|" + "---|" * (len(PARTS) + 3))
    for enabled in (True, False):
        medians = {name: statistics.median(seconds) * 1e3 for name, seconds in shares[enabled].items()}
        cells = " | ".join(f"{medians[name]:.2f}" for name in (*PARTS, "whole"))
        beside = 1 - medians["model"] / medians["whole"]
        print(f"| {'on' if enabled else 'off'} | {cells} | {beside:.1%} |")
    on, off = (statistics.median(rates[enabled]) for enabled in (True, False))
    print(f"\noutput tokens/s: {on:.1f} with prefix caching, {off:.1f} without: it costs {1 - on / off:+.2%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
