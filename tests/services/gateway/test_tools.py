"""Tools and reasoning through the gateway: prompts, grammars, deltas and reasons for the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from biphase.rpc.v1 import decode_pb2
from biphase.telemetry import tracing
from biphase.tokenizer.chat_template import ChatTemplate
from biphase.tokenizer.loader import LoadedTokenizer
from services.gateway.spans import tell_phases
from tests.fakes import FakeDecode
from tests.services.gateway.conftest import Running, StartGateway, finishes, running_gateway, text_of

Says = Callable[..., FakeDecode]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TWO_CALLS = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "other", "arguments": {{}}}}\n</tool_call>'
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def prompt_of(running: Running, loaded: LoadedTokenizer) -> str:
    request = running.workers[0].seen[-1].request
    return loaded.tokenizer.decode(request.token_ids)


def streamed_calls(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls that the deltas add up to; asserts their form."""
    calls: list[dict[str, Any]] = []
    for chunk in chunks:
        for choice in chunk["choices"]:
            for delta in choice["delta"].get("tool_calls", []):
                if delta["index"] == len(calls):
                    assert set(delta) == {"index", "id", "type", "function"}
                    assert delta["type"] == "function"
                    assert delta["function"]["arguments"] == ""
                    calls.append({"id": delta["id"], "name": delta["function"]["name"], "arguments": ""})
                else:
                    assert set(delta) == {"index", "function"}
                    assert set(delta["function"]) == {"arguments"}
                calls[delta["index"]]["arguments"] += delta["function"]["arguments"]
    return calls


@pytest.mark.parametrize("choice", [None, "auto", "required", NAMED])
async def test_calls_whole_and_streamed(start_gateway: StartGateway, says: Says, choice: Any) -> None:
    running = await start_gateway(says(CALL, ends=True))
    fields = {"tools": [TOOL], "tool_choice": choice, "max_tokens": 60}
    whole = (await running.chat(**fields)).json()["choices"][0]
    (call,) = whole["message"]["tool_calls"]
    assert call["type"] == "function"
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert whole["message"]["content"] is None
    assert whole["finish_reason"] == ("stop" if choice is NAMED else "tool_calls")
    chunks = await running.stream(**fields)
    (streamed,) = streamed_calls(chunks)
    assert (streamed["name"], streamed["arguments"]) == ("get_weather", '{"city": "Rome"}')
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == [
        whole["finish_reason"]
    ]
    assert all(not c["delta"].get("content") for chunk in chunks for c in chunk["choices"])


async def test_content_and_parallel_calls(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(TWO_CALLS, ends=True))
    fields = {"tools": [TOOL, OTHER], "max_tokens": 90}
    message = (await running.chat(**fields)).json()["choices"][0]["message"]
    assert message["content"] == "Let me see."
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "other"]
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert [call["name"] for call in streamed_calls(await running.stream(**fields))] == ["get_weather", "other"]
    (call,) = (await running.chat(**fields, parallel_tool_calls=False)).json()["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "get_weather"


async def test_without_calls_there_is_no_trace_of_them(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(" Paris <tool", ends=True))
    for fields in ({"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}, {}):
        choice = (await running.chat(**fields, max_tokens=60)).json()["choices"][0]
        assert choice["message"]["content"] == " Paris <tool"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"


async def test_a_cut_call_says_length(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(CALL))
    choice = (await running.chat(tools=[TOOL], max_tokens=18)).json()["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_what_the_worker_is_told(
    start_gateway: StartGateway, says: Says, gateway_tokenizer: LoadedTokenizer
) -> None:
    running = await start_gateway(says(CALL, ends=True))

    async def asked(**fields: Any) -> Any:
        assert (await running.chat(max_tokens=60, **fields)).status_code == 200
        sampling = running.workers[0].seen[-1].request.sampling
        return json.loads(sampling.structured_output.spec) if sampling.HasField("structured_output") else None

    assert await asked(tools=[TOOL, OTHER]) is None
    prompt = prompt_of(running, gateway_tokenizer)
    # The default template knows no tools: they stand in the system message.
    assert '"weather of a city"' in prompt and '"other"' in prompt and "<tool_call>" in prompt
    assert await asked(tools=[TOOL], tool_choice="none") is None
    assert "weather of a city" not in prompt_of(running, gateway_tokenizer)
    required = await asked(tools=[TOOL, OTHER], tool_choice="required")
    assert [call["begin"] for call in required["calls"]] == [
        '<tool_call>\n{"name": "get_weather", "arguments": ',
        '<tool_call>\n{"name": "other", "arguments": ',
    ]
    assert required["many"] is False
    assert (await asked(tools=[TOOL], tool_choice="required", parallel_tool_calls=True))["many"] is True
    named = await asked(tools=[TOOL, OTHER], tool_choice=NAMED)
    assert len(named["calls"]) == 1
    both = await asked(tools=[TOOL], response_format={"type": "json_object"})
    assert both["content"]["kind"] == "json_object"
    assert (await asked(tools=[TOOL], tool_choice="required", response_format={"type": "json_object"}))[
        "content"
    ] is None


async def test_histories_with_calls(
    start_gateway: StartGateway, says: Says, gateway_tokenizer: LoadedTokenizer
) -> None:
    running = await start_gateway(says(" It is warm.", ends=True))
    call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Rome"}'}}
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "21 C"},
    ]
    assert (await running.chat(messages=messages, tools=[TOOL])).status_code == 200
    prompt = prompt_of(running, gateway_tokenizer)
    assert '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>' in prompt
    assert "<tool_response>\n21 C\n</tool_response>" in prompt


async def test_several_choices_each_have_calls(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(CALL, ends=True))
    body = (await running.chat(tools=[TOOL], n=3, max_tokens=60, logprobs=True)).json()
    for choice in body["choices"]:
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["logprobs"]["content"]
    assert len({choice["message"]["tool_calls"][0]["id"] for choice in body["choices"]}) == 3


THINKING = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools }}{% endif %}{% if message and message.tool_calls %}x{% endif %}"
    "assistant: {% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% if open %}<think>\n{% endif %}"
)


@pytest.fixture
def thinking_model(gateway_tokenizer: LoadedTokenizer) -> LoadedTokenizer:
    return replace(gateway_tokenizer, chat_template=ChatTemplate({"default": THINKING}, {}))


async def test_reasoning_stands_beside_the_content(thinking_model: LoadedTokenizer, says: Says) -> None:
    async with running_gateway(thinking_model, [says("<think>\nhm\n</think>\n\nYes.", ends=True)]) as running:
        body = (await running.chat(max_tokens=60)).json()
        message = body["choices"][0]["message"]
        assert (message["reasoning"], message["reasoning_content"], message["content"]) == ("hm", "hm", "Yes.")
        assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        chunks = await running.stream(max_tokens=60)
        deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert "".join(delta.get("reasoning", "") for delta in deltas) == "hm"
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "hm"
        assert "".join(delta.get("content") or "" for delta in deltas) == "Yes."
        hidden = (await running.chat(max_tokens=60, include_reasoning=False)).json()["choices"][0]["message"]
        assert (hidden["reasoning"], hidden["content"]) == (None, "Yes.")
        assert "reasoning_content" not in hidden


async def test_reasoning_is_ended_when_its_tokens_are_used_up(thinking_model: LoadedTokenizer, says: Says) -> None:
    encode = thinking_model.tokenizer.encode
    thoughts, answer, end = encode("<think>" + " hm" * 50), encode(" Yes."), encode("</think>")

    def script(request: decode_pb2.GenerateRequest) -> list[int]:
        """Thinks on and on, until it stands behind the end of its thoughts."""
        said = list(request.token_ids[request.num_prompt_tokens :])
        for place in range(len(said)):
            if said[place : place + len(end)] == end:
                return [*said[: place + len(end)], *answer, 2]
        return thoughts

    async with running_gateway(thinking_model, [FakeDecode(script=script)]) as running:
        for budget in (0, 1, 7):
            fields = {"max_tokens": 80, "thinking_token_budget": budget}
            body = (await running.chat(**fields, logprobs=True)).json()
            choice = body["choices"][0]
            assert (choice["message"]["content"], choice["finish_reason"]) == ("Yes.", "stop")
            thought = (choice["message"]["reasoning"] or "").split()
            assert min(budget, 1) <= len(thought) <= budget and set(thought) <= {"hm", "h"}
            assert len(choice["logprobs"]["content"]) == body["usage"]["completion_tokens"]
            chunks = await running.stream(**fields)
            assert text_of(chunks) == "Yes." and finishes(chunks) == {0: ["stop"]}
        assert running.workers[0].num_running == 0
        await _tells_no_move(running)
        # There is no room for the end of it, and none is asked for.
        for more in ({"max_tokens": 9, "thinking_token_budget": 8}, {"max_tokens": 30, "thinking_token_budget": -1}):
            assert (await running.chat(**more)).json()["choices"][0]["finish_reason"] == "length"
        assert (await running.chat(thinking_token_budget=-2)).status_code == 400


async def _tells_no_move(running: Running) -> None:
    """A request that was given up for the end of its thoughts was not lost, nor did it wait while it thought."""
    recorder = running.gateway.recorder
    record = recorder._recent[-1].record
    first, second = record.attempts
    assert first.ended is not None and first.error_code == second.error_code == ""
    (row, *_) = (await running.client.get("/status")).json()["requests"]
    phases = [phase["phase"] for phase in row["timeline"]]
    assert phases.count("queue") == 2 and "lost" not in phases and "num_moves" not in row
    told = max((phase for phase in row["timeline"] if phase["phase"] == "queue"), key=lambda phase: phase["start"])
    assert told["start"] == pytest.approx(first.ended - record.arrival, abs=1e-4)
    children: list[str] = []

    class Noted(tracing.Span):
        def child(self, name: str, start: float, end: float, attributes: tracing.Attributes | None = None) -> None:
            children.append(name)

    tell_phases(Noted(), record, "stop", "")
    assert children.count("route") == 2 and "migrate" not in children
    recorder.began(record)
    assert recorder.active(1)[0]["num_moves"] == 0
    recorder._active.clear()


async def test_grammars_begin_after_reasoning(thinking_model: LoadedTokenizer, says: Says) -> None:
    async with running_gateway(thinking_model, [says("hm</think>{}", ends=True)]) as running:

        async def marks(**fields: Any) -> tuple[str, str]:
            response = await running.chat(max_tokens=60, response_format={"type": "json_object"}, **fields)
            assert response.status_code == 200, response.text
            structured = running.workers[0].seen[-1].request.sampling.structured_output
            return structured.reasoning_start, structured.reasoning_end

        assert await marks() == ("<think>", "</think>")
        assert await marks(chat_template_kwargs={"open": True}) == ("", "</think>")
        assert await marks(chat_template_kwargs={"enable_thinking": False}) == ("", "")
        assert await marks(reasoning_effort="none") == ("", "")


async def test_parsers_can_be_chosen(thinking_model: LoadedTokenizer, says: Says) -> None:
    text = '<think>hm</think>[TOOL_CALLS]get_weather{"city": "Rome"}'
    flags = {"tool_call_parser": "mistral", "reasoning_parser": "none"}
    async with running_gateway(thinking_model, [says(text, ends=True)], **flags) as running:
        message = (await running.chat(max_tokens=60, tools=[TOOL])).json()["choices"][0]["message"]
        assert message["content"] == "<think>hm</think>"
        assert message["reasoning"] is None
        assert message["tool_calls"][0]["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
        assert len(message["tool_calls"][0]["id"]) == 9
