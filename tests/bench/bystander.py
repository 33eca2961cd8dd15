"""What an innocent client feels while hostile ones use the same gateway.

    python -m tests.bench.bystander [--requests 40] [--kinds schemas,regexes] [-- flags of biphase serve]

Starts `biphase serve`. A bystander asks for short streamed answers, one after the other with a pause between. First it
is alone, then beside each kind of attack, whose clients begin again as soon as they are answered, and alone again.
Prints for each kind the bystander's latency (to the first token, and to the last) at p50 and p99, and the ratios to
what it was alone just before and after.

The attackers are a process of their own, niced: they stand for other machines, whose CPU time is not the server's.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.e2e.stack import running_stack

_HI = [{"role": "user", "content": "Say hi"}]
_TOKENS = 16
_PAUSE_SECONDS = 0.02
_ATTACKER_NICE = 10
# Until an attack is under way, and until what it left behind is done with.
_REST_SECONDS = 2.0


@dataclass(frozen=True)
class Attack:
    """`bodies` yields what one client sends next; it may be different every time, so that no cache helps."""

    num_clients: int
    body: Callable[[int], bytes]
    path: str = "/v1/chat/completions"
    # Sent in full, its answer never read.
    never_reads: bool = False


def _json(**fields: object) -> bytes:
    return json.dumps({"messages": _HI, "max_tokens": 8, **fields}).encode()


def _schema(number: int) -> bytes:
    """Patterns that multiply, properties that may come in any order, and choices within choices."""
    kind = number % 4
    if kind == 0:
        schema: object = {"type": "string", "pattern": f"^(a?){{{200 + number % 50}}}(b|a){{200}}c$"}
    elif kind == 1:
        schema = {"type": "object", "properties": {f"k{number}_{n}": {"type": "string"} for n in range(3000)}}
    elif kind == 2:
        schema = {"anyOf": [{"type": "array", "items": {"enum": [f"{number}{n}{m}" for m in range(40)]}}
                            for n in range(100)]}  # fmt: skip
    else:
        inner: object = {"type": "integer"}
        for depth in range(60):
            inner = {"type": "object", "properties": {f"p{number}_{depth}": inner, "q": {"type": "string"}}}
        schema = inner
    return _json(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})


def _regex(number: int) -> bytes:
    patterns = (
        "(x+x+)+y{number}", "((a{1,100}){1,100}){1,10}{number}", "(.*a.*b.*c){40}{number}",
        "(a|a|aa)*{number}[^a]{500}",
        "(?:\\w{0,300}\\d{0,300}){0,30}{number}",
    )  # fmt: skip
    return _json(structured_outputs={"regex": patterns[number % len(patterns)].replace("{number}", str(number))})


def _grammar(number: int) -> bytes:
    grammars = (
        'root ::= s\ns ::= s s | "a{number}" | s "b" s | ',
        "root ::= " + " | ".join(f'"{{number}}x{n}" root' for n in range(2000)) + ' | "end"',
        'root ::= (("a" | "b" | "ab")* ("c{number}" | "a")*)* "z"',
    )
    return _json(structured_outputs={"grammar": grammars[number % len(grammars)].replace("{number}", str(number))})


_IDS = random.Random(0).sample(range(1000, 49_000), 40_000)


def _long_list(number: int) -> bytes:
    kinds: tuple[dict[str, object], ...] = (
        {"stop_token_ids": _IDS},
        {"allowed_token_ids": _IDS},
        {"logit_bias": dict.fromkeys(map(str, _IDS), 1)},
        {"stop": ["x"] * 40_000},
        {"bad_words": ["x"] * 40_000},
        {"messages": _HI * 40_000},
        {"structured_outputs": {"choice": [f"{number}-{n}" for n in range(40_000)]}},
        {"tools": [{"type": "function", "function": {"name": f"f{number}_{n}"}} for n in range(40_000)]},
    )
    return _json(**kinds[number % len(kinds)])


def _deep(number: int) -> bytes:
    name = ("tools", "response_format", "metadata", "messages")[number % 4]
    return f'{{"messages":[{{"role":"user","content":"hi"}}],"{name}":'.encode() + b"[" * 3000 + b"]" * 3000 + b"}"


_HUGE = (
    _json(messages=[{"role": "user", "content": "word " * 3_000_000}]),
    b'{"messages":[' + b"[]," * 5_000_000 + b"[]]}",
    b'{"prompt":[' + b"5," * 7_000_000 + b"5]}",
    b'{"messages":"' + b'\\"' * 7_000_000 + b'"}',
    b"x" * 20_000_000,
)


def _huge(number: int) -> bytes:
    return _HUGE[number % len(_HUGE)]


def _slow(number: int) -> bytes:
    return _json(max_tokens=4000, ignore_eos=True, stream=True, seed=number, logprobs=True, top_logprobs=20)


ATTACKS = {
    "schemas": Attack(4, _schema),
    "regexes": Attack(4, _regex),
    "grammars": Attack(4, _grammar),
    "lists": Attack(2, _long_list),
    "deep": Attack(4, _deep),
    "huge": Attack(2, _huge),
    "slow readers": Attack(2, _slow, never_reads=True),
}


def _head(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode()


async def _attack(port: int, attack: Attack) -> None:
    numbers = itertools.count(random.randrange(10**6) * 1000)

    async def client() -> None:
        while True:
            body = attack.body(next(numbers))
            try:
                await _send(port, attack, body)
            except OSError:
                # The gateway closes what it does not want to read to the end.
                await asyncio.sleep(0.01)

    await asyncio.gather(*(client() for _ in range(attack.num_clients)))


async def _send(port: int, attack: Attack, body: bytes) -> None:
    raw = socket.socket()
    raw.setblocking(False)
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=2**12)
    try:
        writer.write(_head(attack.path, body) + body)
        await writer.drain()
        if attack.never_reads:
            await asyncio.sleep(3600)
        while await reader.read(65536):
            pass
    finally:
        writer.close()


def _attackers(port: int, name: str) -> None:
    os.nice(_ATTACKER_NICE)
    asyncio.run(_attack(port, ATTACKS[name]))


async def _ask(port: int) -> tuple[float, float]:
    """Seconds to the first token and to the last."""
    body = _json(max_tokens=_TOKENS, ignore_eos=True, stream=True, temperature=0)
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(_head("/v1/chat/completions", body) + body)
    answer, first = b"", 0.0
    while b"data: [DONE]" not in answer:
        part = await reader.read(65536)
        if not part:
            raise RuntimeError(f"the bystander was not served: {answer[-400:]!r}")
        answer += part
        if not first and b"data: " in answer:
            first = time.perf_counter() - start
    writer.close()
    return first, time.perf_counter() - start


def _measure(port: int, num_requests: int) -> list[tuple[float, float]]:
    async def ask_all() -> list[tuple[float, float]]:
        found = []
        for _ in range(num_requests):
            found.append(await _ask(port))
            await asyncio.sleep(_PAUSE_SECONDS)
        return found

    return asyncio.run(ask_all())


def _beside(port: int, name: str, num_requests: int) -> list[tuple[float, float]]:
    """What the bystander feels during an attack."""
    attackers = multiprocessing.get_context("spawn").Process(target=_attackers, args=(port, name))
    attackers.start()
    try:
        time.sleep(_REST_SECONDS)
        return _measure(port, num_requests)
    finally:
        attackers.kill()
        attackers.join()


def _percentiles(found: Sequence[tuple[float, float]]) -> list[float]:
    """Milliseconds: first token p50 and p99, last token p50 and p99."""
    told = []
    for which in (0, 1):
        values = sorted(times[which] * 1e3 for times in found)
        told += [values[len(values) // 2], values[min(len(values) - 1, int(len(values) * 0.99))]]
    return told


def main() -> int:
    place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, flags = sys.argv[1:place], sys.argv[place + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--kinds", default=",".join(ATTACKS))
    args = parser.parse_args(own)
    worst = 0.0
    with running_stack("--prefill", "1", "--decode", "1", *flags) as stack:
        _measure(stack.port, 5)
        print(f"{'milliseconds':14}" + "".join(f"{name:>22}" for name in ("first p50", "p99", "last p50", "p99")))
        before = _measure(stack.port, args.requests)
        for name in args.kinds.split(","):
            found = _beside(stack.port, name, args.requests)
            time.sleep(_REST_SECONDS)
            after = _measure(stack.port, args.requests)
            base, values = _percentiles(before + after), _percentiles(found)
            ratios = [value / alone for value, alone in zip(values, base, strict=True)]
            worst = max(worst, *ratios)
            print(f"{'alone':14}" + "".join(f"{value:15.1f}       " for value in base))
            cells = (f"{value:15.1f} ({ratio:4.2f})" for value, ratio in zip(values, ratios, strict=True))
            print(f"{name:14}" + "".join(cells), flush=True)
            before = after
    print(f"worst ratio {worst:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
