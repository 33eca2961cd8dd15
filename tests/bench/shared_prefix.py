"""Prompt tokens taken in a second when prompts share their beginning: `python -m tests.bench.shared_prefix`.

    [--requests 24] [--concurrency 4] [--input-tokens 1152] [--shared-tokens 1024] [--output-tokens 16] [--rounds 3]
    [-- flags of biphase serve]

Closed loop on the whole stack. Each round sends the load with a shared beginning, which nobody has yet, and the same
load without one. Prints one JSON object: prompt tokens a second of both (medians over the rounds, their range), their
ratio, and for the shared one by which path the requests went and what they waited for, from `/status`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
from collections import Counter
from typing import Any

from tests.bench.serving import Load, run, served_model
from tests.e2e.stack import Stack, running_stack

_PARTS = (
    "ttft_seconds",
    "gateway_queue_seconds",
    "worker_queue_seconds",
    "prefill_seconds",
    "exposed_transfer_seconds",
)
_COUNTS = ("num_cached_tokens", "num_prefill_cached_tokens", "num_external_tokens", "num_computed_tokens")


def one_round(stack: Stack, load: Load) -> tuple[float, list[dict[str, Any]]]:
    """Prompt tokens a second, and what the gateway recorded of each request."""
    figures: dict[str, Any] = asyncio.run(run(stack.base_url, load))
    assert not figures["errors"], figures["first_error"]
    records = stack.status()["requests"][: load.num_requests]
    return load.num_requests * load.input_tokens / figures["seconds"], records


def paths(records: list[dict[str, Any]]) -> dict[str, object]:
    modes = Counter(f"{record.get('prefill_mode')} {record.get('reason')}" for record in records)
    means = {name: [record[name] for record in records if record.get(name) is not None] for name in _PARTS}
    return {
        "paths": dict(modes),
        "mean_ms": {name: round(1e3 * statistics.mean(values), 1) for name, values in means.items() if values},
        "tokens": {name: sum(record.get(name) or 0 for record in records) for name in _COUNTS},
    }


def main() -> None:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description="Prompts that share their beginning.")
    for name, default in (("requests", 24), ("concurrency", 4), ("input-tokens", 1152), ("shared-tokens", 1024),
                          ("output-tokens", 16), ("rounds", 3)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments[:at])
    rates: dict[str, list[float]] = {"shared": [], "unshared": []}
    found: list[dict[str, Any]] = []
    with running_stack(*arguments[at + 1 :]) as stack:
        model = asyncio.run(served_model(stack.base_url))

        def load(shared_tokens: int, seed: int, num_requests: int) -> Load:
            return Load(model, num_requests, given.concurrency, given.input_tokens, given.output_tokens,
                        shared_tokens, seed)  # fmt: skip

        # Connections, handshakes, first steps.
        one_round(stack, load(0, 0, 4))
        for number in range(1, given.rounds + 1):
            for name, shared in (("shared", given.shared_tokens), ("unshared", 0)):
                rate, records = one_round(stack, load(shared, 2 * number + bool(shared), given.requests))
                rates[name].append(rate)
                if shared:
                    found += records
    medians = {name: statistics.median(values) for name, values in rates.items()}
    figures = {
        "prompt_tokens_per_second": {name: round(median) for name, median in medians.items()},
        "range": {name: [round(min(values)), round(max(values))] for name, values in rates.items()},
        "shared_over_unshared": round(medians["shared"] / medians["unshared"], 2),
    }
    print(json.dumps(figures | paths(found), indent=2))


if __name__ == "__main__":
    main()
