"""What a step costs beside the model: run as a script, prints microseconds.

python -m tests.bench.engine_overhead [num_seqs] [prompt_tokens] [output_tokens]
"""

from __future__ import annotations

import statistics
import sys
import time

from biphase.cache.block_pool import BlockPool
from biphase.cache.manager import KVCacheManager
from biphase.engine import Engine, SchedulerConfig
from biphase.request import Request, RequestId, SamplingParams
from biphase.scheduler.output import RunnerOutput, SampledToken, SchedulerOutput


class InstantRunner:
    """Samples the same token for everyone, and counts its own time."""

    seconds = 0.0

    def execute(self, output: SchedulerOutput) -> RunnerOutput:
        started = time.perf_counter()
        result = RunnerOutput({s.request.request_id: SampledToken(7) for s in output.scheduled if s.samples})
        self.seconds = time.perf_counter() - started
        return result

    def begin(self, output: SchedulerOutput) -> SchedulerOutput:
        return output

    def finish(self, pending: SchedulerOutput) -> RunnerOutput:
        return self.execute(pending)

    def num_awaited_outputs(self, sampling: SamplingParams) -> int:
        return 0


def measure(
    num_seqs: int, prompt_tokens: int, output_tokens: int, enable_caching: bool, overlap: bool = False
) -> list[float]:
    """Seconds of each decode step with all sequences in it, the runner's own time taken off."""
    num_blocks = num_seqs * ((prompt_tokens + output_tokens) // 16 + 2)
    pool = BlockPool(num_blocks, enable_caching)
    manager = KVCacheManager(pool, block_size=16, namespace=b"bench")
    runner = InstantRunner()
    config = SchedulerConfig(max_num_seqs=num_seqs, max_num_batched_tokens=2048, max_model_len=1 << 20, overlap=overlap)
    engine = Engine(runner, manager, config)
    sampling = SamplingParams(max_tokens=output_tokens, eos_token_ids=frozenset({0}))
    for i in range(num_seqs):
        prompt = [(i * 31 + j) % 50_000 for j in range(prompt_tokens)]
        engine.add_request(Request(RequestId(f"request-{i}"), prompt, sampling), lambda event: None)
    seconds = []
    while engine.stats().num_running < num_seqs or engine.stats().num_queued_prefill_tokens:
        engine.step()
    while True:
        started = time.perf_counter()
        ran = engine.step()
        seconds.append(time.perf_counter() - started - runner.seconds)
        if not ran or engine.stats().num_running < num_seqs:
            return seconds[:-1]


def main() -> None:
    num_seqs, prompt_tokens, output_tokens = (
        int(arg) for arg in (*sys.argv[1:], *("64", "512", "256")[len(sys.argv) - 1 :])
    )
    for enable_caching, overlap in ((True, False), (False, False), (True, True)):
        steps = sorted(measure(num_seqs, prompt_tokens, output_tokens, enable_caching, overlap))
        print(
            f"{num_seqs} decodes, prefix caching {'on ' if enable_caching else 'off'}, "
            f"overlap {'on ' if overlap else 'off'}: "
            f"median {statistics.median(steps) * 1e6:.0f} us, mean {statistics.mean(steps) * 1e6:.0f} us, "
            f"p99 {steps[int(len(steps) * 0.99)] * 1e6:.0f} us a step, {len(steps)} steps"
        )


if __name__ == "__main__":
    main()
