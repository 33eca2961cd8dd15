"""Chats of many turns: how many tokens are computed again. `python -m tests.bench.multi_turn [--users 16] [--turns 8]`

Two prefill and two decode workers. Every turn sends the whole conversation so far, with the generated tokens, and a
new user message; lengths vary by a quarter around those given. `recomputed_of_new`, per turn: prompt tokens computed
over tokens of the new message (the answer before it was computed when it was generated). `floor` is what blocks of 16
tokens leave: the last token of an answer is never run, and the block it stands in is not full, so that 1 to 16 tokens,
8.5 on average, are computed again. That is 1.07 for messages of 128 tokens, 1.13 for 64, 1.27 for 32; it is under 1.1
from 85 tokens on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time

import aiohttp

from tests.e2e.stack import running_stack

_BLOCK_TOKENS = 16
_FLAGS = ("--prefill", "2", "--decode", "2", "--kv-cache-bytes", "384MiB")


async def converse(url: str, users: int, turns: int, new_tokens: int, output_tokens: int) -> dict[str, object]:
    draw = random.Random(0)
    computed, new, lost, waits = [0] * turns, [0] * turns, [0] * turns, [0.0] * turns

    async def user(session: aiohttp.ClientSession) -> None:
        history: list[int] = []
        for turn in range(turns):
            length, answer_length = (draw.randint(n * 3 // 4, n * 5 // 4) for n in (new_tokens, output_tokens))
            message = [draw.randrange(1000, 30000) for _ in range(length)]
            # Of the turns before, what fills blocks; the last token has not been run.
            reusable = max(0, len(history) - 1) // _BLOCK_TOKENS * _BLOCK_TOKENS
            history += message
            body = {"prompt": history, "max_tokens": answer_length, "ignore_eos": True, "temperature": 0,
                    "return_token_ids": True}  # fmt: skip
            start = time.perf_counter()
            async with session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.text()
                answer = await response.json()
            waits[turn] += time.perf_counter() - start
            usage = answer["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            computed[turn] += usage["prompt_tokens"] - cached
            new[turn] += len(message)
            lost[turn] += (len(history) - len(message)) - reusable
            history += answer["choices"][0]["token_ids"]

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(user(session) for _ in range(users)))
    return {
        "users": users,
        "new_tokens_per_turn": new_tokens,
        "output_tokens_per_turn": output_tokens,
        "recomputed_of_new": [round(a / b, 3) for a, b in zip(computed, new, strict=True)],
        "floor": [round((a + b) / b, 3) for a, b in zip(lost, new, strict=True)],
        "all_but_first": round(sum(computed[1:]) / sum(new[1:]), 3),
        "seconds_per_turn": [round(seconds / users, 2) for seconds in waits],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Chats of many turns.")
    for name, default in (("users", 16), ("turns", 8), ("new-tokens", 128), ("output-tokens", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    with running_stack(*_FLAGS) as stack:
        figures = converse(stack.base_url, given.users, given.turns, given.new_tokens, given.output_tokens)
        print(json.dumps(asyncio.run(figures)))
        modes = [(request.get("prefill_mode"), request.get("reason")) for request in stack.status()["requests"]]
        print(json.dumps({f"{mode} {reason}": modes.count((mode, reason)) for mode, reason in sorted(set(modes))}))


if __name__ == "__main__":
    main()
