"""Load on the whole stack, closed loop, and what its clients feel. `make bench`, or

    python -m tests.bench.serving [--url http://host:port] [--requests 64] [--concurrency 32] [--input-tokens 128]
                                  [--output-tokens 64] [--shared-tokens 0] [--seed 0] [-- flags of biphase serve]

Without --url it starts `biphase serve` itself, with the flags after --, and ends it again. Prompts are token ids from a
seeded generator; greedy, no end before the last token, so that every run does the same work. Prints one JSON object;
seconds and milliseconds are in the names. TTFT counts from sending the request, ITL are the gaps between chunks of one
stream, TPOT is a stream's mean gap after the first token. Failed requests are counted and left out of the rest.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from dataclasses import dataclass, field

import aiohttp

from tests.e2e.stack import running_stack

# Ids that every vocabulary has, above the special ones.
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 1_000, 30_000


@dataclass
class Stream:
    """One request as its client saw it; times in seconds on one clock."""

    sent: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: int = 0
    error: str = ""


@dataclass(frozen=True)
class Load:
    model: str
    num_requests: int
    concurrency: int
    input_tokens: int
    output_tokens: int
    shared_tokens: int
    seed: int

    def prompts(self) -> list[list[int]]:
        draw = random.Random(self.seed)

        def tokens(count: int) -> list[int]:
            return [draw.randrange(_FIRST_TOKEN_ID, _LAST_TOKEN_ID) for _ in range(count)]

        shared = tokens(self.shared_tokens)
        return [shared + tokens(self.input_tokens - self.shared_tokens) for _ in range(self.num_requests)]


async def run(url: str, load: Load) -> dict[str, object]:
    """Sends the load and returns the figures."""
    timeout = aiohttp.ClientTimeout(total=None)
    # A connection for each request: some servers close theirs without a word, and the next request on it is lost.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(url, timeout=timeout, connector=connector) as session:
        queue = iter(load.prompts())
        streams: list[Stream] = []

        async def client() -> None:
            for prompt in queue:
                streams.append(await one(session, load, prompt))

        started = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(load.concurrency)))
        return figures(streams, time.perf_counter() - started)


async def one(session: aiohttp.ClientSession, load: Load, prompt: list[int]) -> Stream:
    body = {
        "model": load.model, "prompt": prompt, "max_tokens": load.output_tokens, "ignore_eos": True, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    stream = Stream(time.perf_counter())
    try:
        async with session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                stream.error = f"HTTP {response.status}: {(await response.text())[:200]}"
                return stream
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    stream.error = str(chunk["error"])
                if chunk.get("usage"):
                    stream.num_tokens = chunk["usage"]["completion_tokens"]
                if chunk.get("choices"):
                    stream.arrivals.append(time.perf_counter())
    except (aiohttp.ClientError, ValueError) as error:
        stream.error = f"{type(error).__name__}: {error}"
    if not stream.error and not stream.arrivals:
        stream.error = "no token came"
    return stream


def figures(streams: list[Stream], seconds: float) -> dict[str, object]:
    good = [stream for stream in streams if not stream.error]
    gaps = [b - a for stream in good for a, b in zip(stream.arrivals, stream.arrivals[1:], strict=False)]
    tpot = [
        (stream.arrivals[-1] - stream.arrivals[0]) / (stream.num_tokens - 1) for stream in good if stream.num_tokens > 1
    ]
    num_tokens = sum(stream.num_tokens for stream in good)
    return {
        "requests": len(streams),
        "errors": len(streams) - len(good),
        "first_error": next((stream.error for stream in streams if stream.error), None),
        "seconds": round(seconds, 2),
        "output_tokens": num_tokens,
        "output_tokens_per_second": round(num_tokens / seconds, 1),
        "ttft_ms": percentiles([stream.arrivals[0] - stream.sent for stream in good]),
        "itl_ms": percentiles(gaps),
        "tpot_ms": percentiles(tpot),
    }


def percentiles(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    if not ordered:
        return {}
    return {f"p{p}": round(1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)], 1) for p in (50, 90, 99)}


async def served_model(url: str) -> str:
    async with aiohttp.ClientSession(url) as session, session.get("/v1/models") as response:
        return str((await response.json())["data"][0]["id"])


def main() -> int:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    own, serve_flags = arguments[:at], arguments[at + 1 :]
    parser = argparse.ArgumentParser(description="Load on the whole stack.")
    parser.add_argument("--url", default="")
    for name, default in (("requests", 64), ("concurrency", 32), ("input-tokens", 128), ("output-tokens", 64),
                          ("shared-tokens", 0), ("seed", 0)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(own)
    with contextlib.ExitStack() as stack:
        url = given.url or stack.enter_context(running_stack(*serve_flags)).base_url
        model = asyncio.run(served_model(url))
        load = Load(model, given.requests, given.concurrency, given.input_tokens, given.output_tokens,
                    given.shared_tokens, given.seed)  # fmt: skip
        print(json.dumps({"load": vars(load)} | asyncio.run(run(url, load)), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
