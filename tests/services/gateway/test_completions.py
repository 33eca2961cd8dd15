from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fakes import FakeDecode
from tests.services.gateway.conftest import TEXT, StartGateway, finishes, text_of

Says = Callable[..., FakeDecode]


async def test_golden_keys_are_all_there(start_gateway: StartGateway, says: Says, golden: Callable[[str], Any]) -> None:
    running = await start_gateway(says())
    theirs = golden("comp.txt")
    ours = (await running.complete(logprobs=2, echo=True)).json()
    assert theirs.keys() - ours.keys() <= {"ec_transfer_params", "metrics"}
    assert theirs["choices"][0].keys() - ours["choices"][0].keys() <= {"routed_experts"}
    assert theirs["choices"][0]["logprobs"].keys() == ours["choices"][0]["logprobs"].keys()
    assert ours["id"].startswith("cmpl-") and ours["object"] == "text_completion"


async def test_four_forms_of_a_prompt(start_gateway: StartGateway, says: Says, gateway_tokenizer: Any) -> None:
    worker = says()
    running = await start_gateway(worker)
    ids = gateway_tokenizer.tokenizer.encode("The sky is")
    for prompt in ("The sky is", ["The sky is"], ids, [ids]):
        response = await running.complete(prompt=prompt)
        assert response.json()["choices"][0]["text"] == TEXT[: len(response.json()["choices"][0]["text"])]
    assert {tuple(seen.request.token_ids) for seen in worker.seen} == {tuple(ids)}


async def test_max_tokens_is_sixteen_by_default(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    for body in ({"prompt": "x"}, {"prompt": "x", "max_tokens": None}):
        response = await running.client.post("/v1/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 16


async def test_prompts_and_choices_are_ordered_prompt_major(start_gateway: StartGateway, says: Says) -> None:
    worker = says()
    running = await start_gateway(worker)
    body = (await running.complete(prompt=["1 2 3", "a b c d"], n=2, seed=3, temperature=1, echo=True)).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    starts = [choice["text"].split(" Paris")[0] for choice in body["choices"]]
    assert starts == ["1 2 3", "1 2 3", "a b c d", "a b c d"]
    lengths = {len(seen.request.token_ids) for seen in worker.seen}
    assert body["usage"]["prompt_tokens"] == sum(lengths) and body["usage"]["completion_tokens"] == 32
    # The k-th choice has the same seed whatever its prompt.
    by_index = {seen.request.request_id[-1]: seen.request.sampling.seed for seen in worker.seen}
    assert by_index["0"] == by_index["2"] == 3 and by_index["1"] == by_index["3"] != 3


async def test_scoring_call(start_gateway: StartGateway, says: Says) -> None:
    worker = says()
    running = await start_gateway(worker)
    body = (await running.complete(echo=True, max_tokens=0, logprobs=1)).json()
    (choice,) = body["choices"]
    assert choice["text"] == "The sky is" and choice["finish_reason"] == "length"
    assert choice["logprobs"]["tokens"] == ["The", " sky", " is"]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert choice["logprobs"]["text_offset"] == [0, 3, 7] and choice["logprobs"]["top_logprobs"][0] is None
    assert body["usage"] | {} == {
        "prompt_tokens": 3,
        "total_tokens": 3,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": None,
    }
    assert worker.seen[0].request.sampling.max_tokens == 1
    assert worker.seen[0].request.sampling.prompt_logprobs == 1


async def test_echo_and_logprobs_streamed_are_those_of_the_whole(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(" 🦙 x y"))
    whole = (await running.complete(echo=True, logprobs=2, max_tokens=7)).json()["choices"][0]
    chunks = await running.stream("/v1/completions", echo=True, logprobs=2, max_tokens=7)
    assert text_of(chunks) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        parts = [c["logprobs"][name] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        assert [value for part in parts for value in part] == whole["logprobs"][name], name
    assert finishes(chunks) == {0: ["length"]}


async def test_logprobs_zero_is_the_sampled_token_alone(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    logprobs = (await running.complete(logprobs=0, max_tokens=3)).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-0.5] * 3 and logprobs["top_logprobs"] == [
        {" Paris": -0.5},
        {" is": -0.5},
        {" the": -0.5},
    ]


async def test_prompt_logprobs(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says())
    rows = (await running.complete(prompt_logprobs=1)).json()["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == 3
    assert all(next(iter(row.values())).keys() == {"logprob", "rank", "decoded_token"} for row in rows[1:])
    body = (await running.chat(prompt_logprobs=0)).json()
    assert len(body["prompt_logprobs"]) == body["usage"]["prompt_tokens"]
    assert (await running.complete(prompt_logprobs=1, stream=True)).status_code == 400


async def test_truncation(start_gateway: StartGateway, says: Says) -> None:
    worker = says(max_model_len=64)
    running = await start_gateway(worker)
    ids = list(range(100, 200))
    assert (await running.complete(prompt=ids, truncate_prompt_tokens=10)).status_code == 200
    assert list(worker.seen[-1].request.token_ids) == ids[-10:]
    await running.complete(prompt=ids, truncate_prompt_tokens=10, truncation_side="right")
    assert list(worker.seen[-1].request.token_ids) == ids[:10]
    await running.complete(prompt=ids, truncate_prompt_tokens=-1, max_tokens=4)
    assert list(worker.seen[-1].request.token_ids) == ids[-60:]


async def test_streams_of_several_prompts_interleave_by_index(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(delay_seconds=0.002))
    chunks = await running.stream("/v1/completions", prompt=["a", "b", "c"], max_tokens=6)
    assert finishes(chunks) == {0: ["length"], 1: ["length"], 2: ["length"]}
    whole = (await running.complete(prompt="a", max_tokens=6)).json()["choices"][0]["text"]
    assert {text_of(chunks, index) for index in range(3)} == {whole}
    order = [chunk["choices"][0]["index"] for chunk in chunks]
    assert order != sorted(order)


async def test_scoring_as_evaluation_harnesses_ask_for_it(start_gateway: StartGateway, says: Says) -> None:
    """Context and continuation as tokens; the continuation's logprobs are found by position, up to the last but one."""
    running = await start_gateway(says())
    prompts = [[504, 2240, 314, 4461], [504, 5265, 282, 4649, 314]]
    for max_tokens, extra in ((1, 1), (0, 0)):
        answer = await running.complete(
            prompt=prompts, temperature=0, max_tokens=max_tokens, logprobs=1, seed=1234, echo=True
        )
        assert answer.status_code == 200, answer.text
        choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
        for prompt, choice in zip(prompts, choices, strict=True):
            told = choice["logprobs"]
            assert len(told["token_logprobs"]) == len(told["top_logprobs"]) == len(prompt) + extra
            assert told["token_logprobs"][0] is None and told["top_logprobs"][0] is None
            scored = told["token_logprobs"][1 : len(prompt)]
            assert scored == [-0.5] * (len(prompt) - 1)
            assert all(max(top.values()) == -0.5 for top in told["top_logprobs"][1 : len(prompt)])
    until = await running.complete(prompt=prompts, temperature=0, max_tokens=20, stop=[" capital"], seed=1234)
    assert [choice["text"] for choice in until.json()["choices"]] == [" Paris is the"] * 2
