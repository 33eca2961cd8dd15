"""What a prefix costs the second time, by where it is: `python -m tests.bench.prefix_reuse`.

Starts two prefill and two decode workers and a block store with a disk tier. Prompts of 1,024 common tokens and 32 of
their own; time to the first token of the streamed answer. `cold`: nothing known. `same`: once more. `store`: after
kill -9 of all workers, so that only the store has it. `disk`: after kill -9 of store and workers. Prints one JSON
object, each time as its median over several prefixes, as ratio to cold, and the tokens that were cached.
"""

from __future__ import annotations

import http.client
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_store import kill, stored, wait_for

_SHARED, _OWN = 1024, 32
_NUM_PREFIXES = 3
_WORKERS = ("prefill", "decode")


def ttft(stack: Stack, prompt: list[int]) -> tuple[float, int]:
    """Seconds until the first token, and cached tokens."""
    body = {"prompt": prompt, "max_tokens": 2, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    seconds, cached = 0.0, 0
    with connection.getresponse() as response:
        for line in response:
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                seconds = seconds or time.perf_counter() - start
                if chunk.get("usage"):
                    cached = (chunk["usage"].get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    connection.close()
    return seconds, cached


def main() -> None:
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(1000, 30000) for _ in range(count)]

    prefixes = [tokens(_SHARED) for _ in range(_NUM_PREFIXES)]
    rows: dict[str, list[tuple[float, int]]] = {}

    def measure(stack: Stack, name: str) -> None:
        for _ in range(4):
            # Connections, handshakes, first steps.
            ttft(stack, tokens(64))
        rows[name] = [ttft(stack, prefix + tokens(_OWN)) for prefix in prefixes]

    with tempfile.TemporaryDirectory() as disk:
        flags = ("--prefill", "2", "--decode", "2", "--kv-cache-bytes", "192MiB", "--num-threads", "2",
                 "--kvstore-args", f"--capacity 512MiB --disk-path {disk}")  # fmt: skip
        with running_stack(*flags) as stack:
            measure(stack, "cold")
            measure(stack, "same")
            num_blocks = _NUM_PREFIXES * _SHARED // 16
            wait_for(lambda: stored(stack) >= num_blocks)
            kill(stack, *_WORKERS)
            measure(stack, "store")
            wait_for(lambda: len(list(Path(disk).glob("*/??/*"))) >= num_blocks)
            kill(stack, *_WORKERS, "kvstore")
            measure(stack, "disk")
            counters = {node["id"]: node["counters"] for node in stack.nodes("kvstore")}
    medians = {name: statistics.median(seconds for seconds, _ in row) for name, row in rows.items()}
    print(
        json.dumps(
            {
                "ttft_ms": {name: round(1e3 * seconds, 1) for name, seconds in medians.items()},
                "of_cold": {name: round(seconds / medians["cold"], 3) for name, seconds in medians.items()},
                "cached_tokens": {name: [cached for _, cached in row] for name, row in rows.items()},
                "kvstore": counters,
            }
        )
    )


if __name__ == "__main__":
    main()
