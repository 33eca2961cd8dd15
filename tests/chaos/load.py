"""Clients that know the right answers: what they ask, what came, and what it is to be called.

Every question is asked once of the undisturbed cluster. Later any answer is equal to that one, or an explicit error
with a status of its own, or a finding.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import httpx

# Statuses that tell a client what it can do: come back later, or give up on time.
EXPLICIT = frozenset({429, 503, 504})
# A greedy token whose lead is smaller than this may fall the other way by the order of a sum.
_LEAST_LEAD = 1e-4


@dataclass(frozen=True, slots=True)
class Question:
    token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0

    def body(self, *, stream: bool, cache_salt: str = "", logprobs: int | None = None) -> dict[str, Any]:
        body: dict[str, Any] = {
            "prompt": list(self.token_ids),
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if cache_salt:
            body["cache_salt"] = cache_salt
        if logprobs is not None:
            body["logprobs"] = logprobs
        return body


@dataclass(slots=True)
class Answer:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    # Entries of logprobs; 0 where none were asked for.
    num_logprobs: int = 0
    leads: list[float] = field(default_factory=list)
    # HTTP status, or that of the error event of a stream; 0: the connection broke.
    status: int = 200
    error: str = ""
    refused_connection: bool = False
    seconds: float = 0.0
    # Longest time between two parts of a stream.
    longest_gap_seconds: float = 0.0


class Verdict(StrEnum):
    EQUAL = "equal"
    # 429, 503 or 504, said in words.
    REFUSED = "error"
    # The connection broke: right only when the gateway itself was killed.
    BROKEN = "broken"
    WRONG = "wrong"
    LATE = "late"


def judge(answer: Answer, expected: Answer, deadline_seconds: float) -> Verdict:
    if answer.seconds > deadline_seconds:
        return Verdict.LATE
    if answer.status == 0:
        return Verdict.BROKEN
    if answer.status in EXPLICIT:
        # What came before the error must have been right.
        right = answer.token_ids == expected.token_ids[: len(answer.token_ids)]
        return Verdict.REFUSED if right else Verdict.WRONG
    equal = (
        answer.status == 200
        and answer.token_ids == expected.token_ids
        and answer.text == expected.text
        and answer.finish_reason == expected.finish_reason
        and answer.prompt_tokens == expected.prompt_tokens
        and answer.completion_tokens == expected.completion_tokens == len(answer.token_ids)
        and answer.num_logprobs in (0, len(answer.token_ids))
    )
    return Verdict.EQUAL if equal else Verdict.WRONG


class Asker:
    """One HTTP client of a gateway, for one event loop."""

    def __init__(self, base_url: str, timeout_seconds: float) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(base_url=base_url, timeout=timeout_seconds, limits=limits)

    async def ask(
        self, question: Question, *, stream: bool, cache_salt: str = "", logprobs: int | None = None
    ) -> Answer:
        answer = Answer()
        started = time.monotonic()
        body = question.body(stream=stream, cache_salt=cache_salt, logprobs=logprobs)
        try:
            if stream:
                await self._streamed(body, answer)
            else:
                response = await self._client.post("/v1/completions", json=body)
                answer.status = response.status_code
                _take(answer, response.json())
        except (httpx.HTTPError, json.JSONDecodeError) as error:
            answer.status, answer.error = 0, f"{type(error).__name__}: {error}"
            answer.refused_connection = isinstance(error, httpx.ConnectError)
        answer.seconds = time.monotonic() - started
        return answer

    async def _streamed(self, body: dict[str, Any], answer: Answer) -> None:
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            answer.status = response.status_code
            if response.status_code != 200:
                _take(answer, json.loads(await response.aread()))
                return
            ended = False
            last = time.monotonic()
            async for line in response.aiter_lines():
                now = time.monotonic()
                answer.longest_gap_seconds = max(answer.longest_gap_seconds, now - last)
                last = now
                if line == "data: [DONE]":
                    ended = True
                elif line.startswith("data: "):
                    _take(answer, json.loads(line[6:]))
            if not ended:
                answer.status, answer.error = 0, "the stream ended without [DONE]"

    async def close(self) -> None:
        await self._client.aclose()


def _take(answer: Answer, part: dict[str, Any]) -> None:
    if "error" in part:
        answer.status = int(part["error"]["code"])
        answer.error = part["error"]["message"]
        return
    for choice in part["choices"]:
        answer.token_ids += choice["token_ids"]
        answer.text += choice["text"]
        answer.finish_reason = choice["finish_reason"] or answer.finish_reason
        if choice["logprobs"]:
            answer.num_logprobs += len(choice["logprobs"]["tokens"])
            for top in choice["logprobs"]["top_logprobs"]:
                first, second = sorted(top.values(), reverse=True)[:2] if len(top) > 1 else (0.0, -1.0)
                answer.leads.append(first - second)
    if part.get("usage"):
        answer.prompt_tokens = part["usage"]["prompt_tokens"]
        answer.completion_tokens = part["usage"]["completion_tokens"]


def draw_questions(rng: random.Random, count: int, *, lengths: Sequence[int], outputs: Sequence[int]) -> list[Question]:
    """Every fourth one samples with a seed, the others are greedy."""
    return [
        Question(
            tuple(rng.randrange(10, 350) for _ in range(rng.choice(lengths))),
            rng.choice(outputs),
            *((0.9, rng.randrange(1 << 30)) if number % 4 == 3 else (0.0, 0)),
        )
        for number in range(count)
    ]


async def undisturbed(asker: Asker, questions: Sequence[Question]) -> dict[Question, Answer]:
    """The right answers. Questions where rounding could decide a greedy token are left out."""
    answers = await asyncio.gather(*(asker.ask(question, stream=False, logprobs=2) for question in questions))
    for answer in answers:
        assert answer.status == 200 and answer.num_logprobs == len(answer.token_ids), answer
    return {
        question: answer
        for question, answer in zip(questions, answers, strict=True)
        if question.temperature or min(answer.leads) > _LEAST_LEAD
    }
