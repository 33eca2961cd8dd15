"""What the split costs one request: TTFT and text, disaggregated against aggregated, on the same cores in one run.

    python -m tests.bench.bench_split [--tokens 2048] [--rounds 9] [--output 48] [-- flags of biphase serve]

Starts `biphase serve` twice, once with a prefill and a decode worker and once aggregated, and asks them in turn, never
both at once: an idle stack uses no processor, so each has all cores for its prompt. Prompts are random token ids, new
ones each round, the same for both stacks; greedy, in the model's own dtype (bfloat16). One request at a time is the
same batch composition on both sides, so the texts must be equal. Exits with 1 when they are not. Prints one JSON
object: TTFT medians in ms, the median of the rounds' ratios, and the share of TTFT in which transfer was waited for.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import random
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

from tests.e2e.stack import Stack, running_stack

_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 1_000, 30_000
MODES = {"split": "1", "aggregated": "0"}


@dataclass(frozen=True)
class Asked:
    ttft_seconds: float
    token_ids: list[int]


def ask(stack: Stack, prompt: list[int], output_tokens: int, request_id: str) -> Asked:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=300)
    body = {
        "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        "return_token_ids": True, "request_id": request_id,
    }  # fmt: skip
    started = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    first, token_ids = 0.0, []
    for line in answer:
        if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
            continue
        first = first or time.perf_counter()
        for choice in json.loads(line[6:])["choices"]:
            token_ids += choice.get("token_ids") or []
    connection.close()
    return Asked(first - started, token_ids)


def report_of(stack: Stack, request_id: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = [
        entry for entry in stack.status()["requests"] if request_id in str(entry["request_id"])
    ]
    return found[0]


def main() -> int:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=int, default=48)
    chosen = parser.parse_args(arguments[:at])
    draw = random.Random(0)
    ttfts: dict[str, list[float]] = {mode: [] for mode in MODES}
    exposed: list[float] = []
    num_different = 0
    with contextlib.ExitStack() as stacks:
        running = {
            mode: stacks.enter_context(running_stack("--prefill", prefill, *arguments[at + 1 :]))
            for mode, prefill in MODES.items()
        }
        for lap in range(-1, chosen.rounds):
            prompt = [draw.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(chosen.tokens)]
            # Each goes first every other time.
            order = list(MODES) if lap % 2 else list(MODES)[::-1]
            answers = {mode: ask(running[mode], prompt, chosen.output, f"lap{lap}x") for mode in order}
            num_different += answers["split"].token_ids != answers["aggregated"].token_ids
            report = report_of(running["split"], f"lap{lap}x")
            assert report["prefill_mode"] == "remote", report
            if lap < 0:
                continue
            for mode, answer in answers.items():
                ttfts[mode].append(answer.ttft_seconds)
            exposed.append(report["exposed_transfer_seconds"] / answers["split"].ttft_seconds)
    ratios = [split / alone for split, alone in zip(ttfts["split"], ttfts["aggregated"], strict=True)]
    print(
        json.dumps(
            {
                "prompt_tokens": chosen.tokens,
                "rounds": chosen.rounds,
                "ttft_ms": {mode: round(1e3 * statistics.median(values), 1) for mode, values in ttfts.items()},
                "ttft_ratio": {
                    "median": round(statistics.median(ratios), 3),
                    "best_over_best": round(min(ttfts["split"]) / min(ttfts["aggregated"]), 3),
                },
                "exposed_share_of_ttft": {
                    "median": round(statistics.median(exposed), 4), "max": round(max(exposed), 4)
                },
                "different_texts": num_different,
            },
            indent=2,
        )
    )  # fmt: skip
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
