"""Structured output through real workers: first tokens by prefill, the rest by decode, moved and preempted streams."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from biphase.grammar import spec
from biphase.model.source import resolve_model
from biphase.request import StructuredOutput
from biphase.rpc.v1 import common_pb2
from biphase.tokenizer.loader import load_tokenizer
from biphase.tokenizer.tokenizer import ModelTokenizer
from biphase.worker.worker import Worker
from tests.tiny_models import save_tiny
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE, save_tokenizer
from tests.worker.pair import Answer, Client, candidate, no_block_in_use, running_worker

EOS = 2
POINT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "n": {"type": "integer", "minimum": -99, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 3},
    },
    "required": ["name", "n", "tags"],
    "additionalProperties": False,
}


def asked(structured: StructuredOutput) -> common_pb2.StructuredOutput:
    return common_pb2.StructuredOutput(
        kind=structured.kind,
        spec=structured.spec,
        reasoning_start=structured.reasoning_start,
        reasoning_end=structured.reasoning_end,
    )


def options(structured: StructuredOutput, **values: Any) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "structured_output": asked(structured),
        "eos_token_ids": [EOS],
        "max_tokens": 200,
        "temperature": 1.0,
        "ignore_eos": False,
    }
    return defaults | values


def prompt(seed: int, length: int = 40) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(4, 360) for _ in range(length)]


@pytest.fixture(scope="module")
def readable_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer. Its vocabulary is padded beyond the tokenizer's."""
    return save_tokenizer(save_tiny("llama", tmp_path_factory.mktemp("readable"), vocab_size=MODEL_VOCAB_SIZE))


@pytest.fixture(scope="module")
def readable_tokenizer(readable_model: Path) -> ModelTokenizer:
    return load_tokenizer(resolve_model(str(readable_model))).tokenizer


@pytest.fixture
async def structured_pair(readable_model: Path) -> AsyncIterator[tuple[Worker, Worker, Client]]:
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(running_worker("prefill", readable_model, "prefill-0"))
        decode = await stack.enter_async_context(running_worker("decode", readable_model, "decode-0"))
        client = Client(decode)
        stack.push_async_callback(client.close)
        yield prefill, decode, client


def text_of(tokenizer: ModelTokenizer, answer: Answer) -> str:
    assert answer.token_ids[-1] == EOS
    assert answer.reason == "stop"
    return tokenizer.decode(answer.token_ids[:-1])


def is_point(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "n", "tags"}
        and len(value["name"]) <= 12
        and -99 <= value["n"] <= 99
        and all(tag in ("a", "bb", "ccc") for tag in value["tags"])
    )


async def test_handed_off_output_is_valid_and_the_same_as_alone(
    structured_pair: tuple[Worker, Worker, Client], readable_tokenizer: ModelTokenizer
) -> None:
    prefill, _, client = structured_pair
    for seed in range(6):
        values = options(spec.json_schema(POINT), seed=seed)
        split = await client.generate(prompt(seed), [candidate(prefill)], **values)
        assert split.report.prefill_mode == "remote"
        assert is_point(text_of(readable_tokenizer, split))
        alone = await client.generate(prompt(seed), [], **values)
        assert alone.token_ids == split.token_ids


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (spec.choice(["alpha", "beta", "al"]), "alpha|beta|al"),
        (spec.regex("[ab]{3}-[0-9]{2}"), "[ab]{3}-[0-9]{2}"),
        (spec.grammar('root ::= "(" root ")" | "x"'), r"\(*x\)*"),
        (StructuredOutput("regex", "[01]", reasoning_end="!"), r"(?s)[^!]*!\s{0,4}[01]"),
    ],
)
async def test_every_kind(
    structured_pair: tuple[Worker, Worker, Client],
    readable_tokenizer: ModelTokenizer,
    structured: StructuredOutput,
    pattern: str,
) -> None:
    prefill, _, client = structured_pair
    bias = {0: 0.0}
    if structured.reasoning_end:
        bias = {readable_tokenizer.encode("!", add_special_tokens=False)[0]: 8.0}
    for seed in range(3):
        values = options(structured, seed=seed, max_tokens=400, logit_bias=bias)
        answer = await client.generate(prompt(seed), [candidate(prefill)], **values)
        assert re.fullmatch(pattern, text_of(readable_tokenizer, answer)) is not None
        greedy = await client.generate(prompt(seed), [candidate(prefill)], **values | {"temperature": 0.0})
        if greedy.reason == "stop":
            assert re.fullmatch(pattern, text_of(readable_tokenizer, greedy)) is not None


async def test_a_moved_stream_stands_where_it_stood(structured_pair: tuple[Worker, Worker, Client]) -> None:
    prefill, _, client = structured_pair
    tokens = prompt(3, 50)
    values = options(spec.json_schema(POINT), seed=5)
    whole = await client.generate(tokens, [candidate(prefill)], **values)
    num_tokens = len(whole.token_ids)
    for cut in (1, 2, num_tokens // 2, num_tokens - 1):
        for candidates in ([candidate(prefill)], []):
            rest = await client.generate(tokens + whole.token_ids[:cut], candidates, num_output=cut, **values)
            assert whole.token_ids[:cut] + rest.token_ids == whole.token_ids


async def test_free_and_structured_requests_share_steps(
    structured_pair: tuple[Worker, Worker, Client], readable_tokenizer: ModelTokenizer
) -> None:
    """Each gets what it gets alone, logprobs too; the free ones are not touched by their neighbours' grammars."""
    prefill, _, client = structured_pair
    free = {"temperature": 1.0, "seed": 9, "max_tokens": 30}
    calls: list[tuple[list[int], dict[str, Any]]] = []
    for seed in range(5):
        calls.append((prompt(seed), options(spec.json_schema(POINT), seed=seed, logprobs=2)))
        calls.append((prompt(seed), options(spec.choice(["one", "two"]), seed=seed, repetition_penalty=1.3)))
        calls.append((prompt(seed), free))
    alone = [await client.generate(tokens, [candidate(prefill)], **values) for tokens, values in calls]
    together = await asyncio.gather(
        *(client.generate(tokens, [candidate(prefill)], **values) for tokens, values in calls)
    )
    assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
    for answer, (_, values) in zip(together, calls, strict=True):
        if "logprobs" in values:
            assert len(answer.logprobs) == len(answer.token_ids)
    assert is_point(text_of(readable_tokenizer, together[0]))


async def test_preempted_requests_go_on_within_their_grammars(
    readable_model: Path, readable_tokenizer: ModelTokenizer
) -> None:
    structured = spec.regex("[a-z ]{80,90}")
    small = ("--num-blocks", "20", "--max-model-len", "256")
    async with running_worker("decode", readable_model, "decode-small", *small) as decode:
        client = Client(decode)
        values = [options(structured, seed=seed) for seed in range(6)]
        alone = [await client.generate(prompt(seed), [], **given) for seed, given in enumerate(values)]
        together = await asyncio.gather(
            *(client.generate(prompt(seed), [], **given) for seed, given in enumerate(values))
        )
        assert sum(answer.report.num_preemptions for answer in together) > 0
        assert [answer.token_ids for answer in together] == [answer.token_ids for answer in alone]
        assert all(re.fullmatch("[a-z ]{80,90}", text_of(readable_tokenizer, answer)) for answer in together)
        await client.close()


async def test_min_tokens_and_ignore_eos_give_way(
    structured_pair: tuple[Worker, Worker, Client], readable_tokenizer: ModelTokenizer
) -> None:
    prefill, _, client = structured_pair
    values = options(spec.choice(["alpha"]), min_tokens=100, ignore_eos=True)
    answer = await client.generate(prompt(1), [candidate(prefill)], **values)
    assert text_of(readable_tokenizer, answer) == "alpha"


async def test_a_request_that_cannot_go_on_fails_alone(structured_pair: tuple[Worker, Worker, Client]) -> None:
    prefill, decode, client = structured_pair
    free = {"temperature": 1.0, "seed": 9, "max_tokens": 60}
    undisturbed = await client.generate(prompt(2), [candidate(prefill)], **free)
    beside = asyncio.create_task(client.generate(prompt(2), [candidate(prefill)], **free))
    for candidates in ([candidate(prefill)], []):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate(prompt(1), candidates, **options(spec.regex("[ab]c"), allowed_token_ids=[9]))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "other settings" in (caught.value.details() or "")
    assert (await beside).token_ids == undisturbed.token_ids
    await no_block_in_use(decode)
    await no_block_in_use(prefill)


@pytest.mark.parametrize("structured", [spec.regex("["), StructuredOutput("nonsense", "x")])
async def test_a_bad_grammar_is_refused(
    structured_pair: tuple[Worker, Worker, Client], structured: StructuredOutput
) -> None:
    prefill, decode, client = structured_pair
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await client.generate(prompt(1), [candidate(prefill)], **options(structured))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await no_block_in_use(decode)


async def test_a_model_without_a_tokenizer_says_so(tiny_llama: Path) -> None:
    async with running_worker("decode", tiny_llama, "decode-mute") as decode:
        client = Client(decode)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await client.generate([5, 6, 7], [], **options(spec.regex("a")))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await client.close()
