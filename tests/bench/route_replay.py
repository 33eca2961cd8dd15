"""Replays a request trace in virtual time against the gateway's own routing, for each policy and cluster size.

    python -m tests.bench.route_replay --trace conversation_trace.jsonl [--workers 8,16,...] [--policies cost,...]
        [--load 0.7] [--cache-tokens 2000000] [--store-tokens 0] [--no-fetch] [--limit N] [--copies 1]
    python -m tests.bench.route_replay --decisions [--blocks 1000000] [--workers 256]

The trace is Mooncake's form: JSON lines with timestamp (ms, on a grid of 3 s, which is spread here), input_length,
output_length, hash_ids (one for each 512 input tokens; the same id is the same prefix). Half of the workers prefill.
`--load` is the prefill pool's load if nothing were cached: time is compressed or stretched until the trace makes it,
so that each cluster size is equally busy. Compressed far, a conversation's next turn comes before its last one has
ended; `--copies` fills a large cluster with more users instead. `infinite`: hit rate of one cache that never forgets.
`imbalance`: the busiest prefill worker's time over the mean; `grain`: the longest prompt's time over the mean, which is
how far apart even the best balance may end.
`--decisions` measures the processor time of one decision, with so many blocks indexed.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import logging
import random
import time
from collections.abc import Sequence
from pathlib import Path

from biphase.index.events import HASH_BYTES, IndexEvent
from biphase.request import BlockHash, NodeId
from services.gateway.routing.router import Placement, Ticket
from tests.bench.cluster_model import NAMESPACE, ClusterModel, Job, Sizes

BLOCK_TOKENS = 512
_GRID_SECONDS = 3.0


def read_trace(path: Path, limit: int = 0, seed: int = 0) -> list[Job]:
    draw = random.Random(seed)
    jobs: list[Job] = []
    with path.open() as lines:
        for line in lines:
            row = json.loads(line)
            # A prompt's last, partial block is no block of a cache.
            ids = row["hash_ids"][: row["input_length"] // BLOCK_TOKENS]
            hashes = [BlockHash(hashlib.sha256(b"%d" % block).digest()) for block in ids]
            arrival = row["timestamp"] / 1e3 + draw.random() * _GRID_SECONDS
            jobs.append(Job(arrival, row["input_length"], row["output_length"], hashes, f"r{len(jobs)}"))
            if len(jobs) == limit:
                break
    return sorted(jobs, key=lambda job: job.arrival)


def copies_of(jobs: Sequence[Job], count: int, seed: int = 0) -> list[Job]:
    """`count` times the users, side by side; they have nothing in common but the first block, a system prompt."""
    draw = random.Random(seed)
    many = list(jobs)
    for number in range(1, count):
        for job in jobs:
            own = [BlockHash(hashlib.sha256(b"%d" % number + block_hash).digest()) for block_hash in job.hashes[1:]]
            arrival = job.arrival + draw.random() * _GRID_SECONDS
            many.append(
                Job(
                    arrival,
                    job.num_tokens,
                    job.num_output_tokens,
                    [*job.hashes[:1], *own],
                    f"{job.request_id}-{number}",
                )
            )
    return sorted(many, key=lambda job: job.arrival)


def infinite_hit_rate(jobs: Sequence[Job]) -> float:
    """Of input tokens, with one cache that never forgets and is filled at once."""
    seen: set[BlockHash] = set()
    hits = 0
    for job in jobs:
        for block_hash in job.hashes[: (job.num_tokens - 1) // BLOCK_TOKENS]:
            if block_hash not in seen:
                break
            hits += BLOCK_TOKENS
        seen.update(job.hashes)
    return hits / sum(job.num_tokens for job in jobs)


def floor_seconds(jobs: Sequence[Job], sizes: Sizes) -> list[float]:
    """TTFT of each job, shortest first, on an idle worker that has all there is to have: no policy does better."""
    seen: set[BlockHash] = set()
    times = []
    for job in jobs:
        usable = job.hashes[: (job.num_tokens - 1) // BLOCK_TOKENS]
        hits = next((place for place, block_hash in enumerate(usable) if block_hash not in seen), len(usable))
        computed = job.num_tokens - hits * BLOCK_TOKENS
        times.append(computed / sizes.prefill_tokens_per_second + sizes.overhead_seconds)
        seen.update(job.hashes)
    return sorted(times)


def at_load(jobs: Sequence[Job], sizes: Sizes, load: float) -> list[Job]:
    """The same jobs, in the time in which they make this load."""
    num_tokens = sum(job.num_tokens for job in jobs)
    seconds = num_tokens / (sizes.num_prefills * sizes.prefill_tokens_per_second * load)
    factor = seconds / jobs[-1].arrival
    return [
        Job(job.arrival * factor, job.num_tokens, job.num_output_tokens, job.hashes, job.request_id) for job in jobs
    ]


def figures(jobs: Sequence[Job], cluster: ClusterModel) -> dict[str, float]:
    num_tokens = sum(job.num_tokens for job in jobs)
    ttft = sorted(job.ttft_seconds for job in jobs)
    busy = [worker.busy_seconds for worker in cluster.prefills]
    longest = max(job.num_tokens - job.num_cached_tokens - job.num_fetched_tokens for job in jobs)
    return {
        "hit_rate": sum(job.num_cached_tokens + job.num_fetched_tokens for job in jobs) / num_tokens,
        "own_hit_rate": sum(job.num_cached_tokens for job in jobs) / num_tokens,
        "imbalance": max(busy) / (sum(busy) / len(busy)),
        # The longest prompt's share of a worker's time: whoever gets it last is behind by so much.
        "grain": longest / cluster.sizes.prefill_tokens_per_second / (sum(busy) / len(busy)),
        "ttft_mean": sum(ttft) / len(ttft),
        "ttft_p50": ttft[len(ttft) // 2],
        "ttft_p99": ttft[len(ttft) * 99 // 100],
    }


def replay(jobs: Sequence[Job], sizes: Sizes, policy: str) -> dict[str, float]:
    """Runs the jobs to their end; see `figures` for what comes back."""
    cluster = ClusterModel(sizes, policy)
    cluster.run(jobs)
    return figures(jobs, cluster)


def time_decisions(num_blocks: int, num_workers: int, block_size: int = 16) -> None:
    """Processor time of one decision: prompts of 12,000 tokens in conversations that grow, `num_blocks` indexed."""
    draw = random.Random(1)
    sizes = Sizes(num_workers // 2, num_workers // 2, block_size=block_size, max_num_seqs=10**6)
    cluster = ClusterModel(sizes, "cost")
    names = [worker.node.incarnation for worker in (*cluster.prefills, *cluster.decodes)]
    sequences = dict.fromkeys(names, 0)

    def store(name: str, hashes: bytes) -> None:
        sequences[name] += 1
        cluster.view.apply(IndexEvent(NodeId(name), name, sequences[name], stored=hashes))

    length = 12_000 // block_size
    system = [BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(512 // block_size)]
    for name in names:
        store(name, b"".join(system))
    chains = []
    while cluster.view.num_entries < num_blocks:
        chain = [*system, *(BlockHash(draw.randbytes(HASH_BYTES)) for _ in range(length - len(system)))]
        for name in draw.sample(names, 3):
            store(name, b"".join(chain[: draw.randint(length // 2, length)]))
        chains.append(chain)
    gc.collect()
    times = []
    for number in range(3000):
        ticket = Ticket(f"r{number}", range(12_000), "", chains={(NAMESPACE, block_size): draw.choice(chains)})
        start = time.thread_time()
        placement = cluster.router.place(ticket)
        times.append(time.thread_time() - start)
        assert isinstance(placement, Placement)
        placement.prefilled()
        if number % 2:
            placement.release()
    times.sort()
    print(
        f"{cluster.view.num_entries} blocks, {num_workers} workers, {length} blocks a prompt: decision "
        f"p50 {times[1500] * 1e3:.3f} ms, p99 {times[2970] * 1e3:.3f} ms, longest {times[-1] * 1e3:.3f} ms"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Replays a trace against the gateway's routing.")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--workers", default="8,16,32,64,128,256")
    parser.add_argument("--policies", default="cost,least_loaded,round_robin")
    parser.add_argument("--load", type=float, default=0.7)
    parser.add_argument("--cache-tokens", type=int, default=Sizes.prefill_cache_tokens)
    parser.add_argument("--store-tokens", type=int, default=0)
    parser.add_argument("--no-fetch", action="store_true", help="workers read nothing from each other")
    parser.add_argument("--limit", type=int, default=0, help="only so many requests")
    parser.add_argument("--copies", type=int, default=1, help="so many times the users, for large clusters")
    parser.add_argument("--decisions", action="store_true")
    parser.add_argument("--blocks", type=int, default=1_000_000)
    given = parser.parse_args()
    logging.disable(logging.INFO)
    if given.decisions:
        time_decisions(given.blocks, int(given.workers.split(",")[-1]))
        return
    if given.trace is None:
        parser.error("--trace is needed")
    trace = copies_of(read_trace(given.trace, given.limit), given.copies)
    infinite = infinite_hit_rate(trace)
    floor = floor_seconds(trace, Sizes(1, 1))
    print(
        f"{len(trace)} requests, infinite-cache hit rate {infinite:.3f}, load {given.load}; TTFT alone with everything "
        f"cached: mean {sum(floor) / len(floor):.3f}, p99 {floor[len(floor) * 99 // 100]:.3f} s"
    )
    print("workers policy        hit   of infinite  own   imbalance (grain)  TTFT mean   p50     p99 s   run s")
    for num_workers in map(int, given.workers.split(",")):
        sizes = Sizes(
            num_workers // 2,
            num_workers - num_workers // 2,
            prefill_cache_tokens=given.cache_tokens,
            decode_cache_tokens=given.cache_tokens,
            store_tokens=given.store_tokens,
            fetch=not given.no_fetch,
        )
        for policy in given.policies.split(","):
            started = time.perf_counter()
            row = replay(at_load(trace, sizes, given.load), sizes, policy)
            print(
                f"{num_workers:7d} {policy:12s} {row['hit_rate']:.3f}  {row['hit_rate'] / infinite:11.3f} "
                f"{row['own_hit_rate']:.3f} {row['imbalance']:10.3f} ({row['grain']:.3f}) "
                f"{row['ttft_mean']:10.3f} {row['ttft_p50']:7.3f} {row['ttft_p99']:8.3f} "
                f"{time.perf_counter() - started:7.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
