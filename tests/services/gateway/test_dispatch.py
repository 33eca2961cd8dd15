"""What happens to sequences when workers die, refuse, fill up, and when clients go away."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable

import httpx
import pytest

from biphase.errors import LayoutMismatchError, OverloadedError
from biphase.rpc.v1 import common_pb2, decode_pb2
from biphase.telemetry import context, tracing
from services.gateway.dispatch import SequenceStream
from tests.fakes import FakeDecode, free_port
from tests.services.gateway.conftest import TEXT, StartGateway, finishes, text_of

Says = Callable[..., FakeDecode]


@pytest.mark.parametrize("dies_after", [1, 3, 7])
async def test_a_stream_goes_on_at_another_worker(start_gateway: StartGateway, says: Says, dies_after: int) -> None:
    """No token lost, none doubled, and the client sees nothing of it."""
    workers = [says(dies_after=dies_after, delay_seconds=0.01), says(delay_seconds=0.002)]
    running = await start_gateway(*workers, routing_policy="round_robin")
    expected = None
    for _ in range(2):
        chunks = await running.stream(max_tokens=14, logprobs=True, top_logprobs=1, seed=5)
        if expected is None:
            expected = text_of(chunks)
        assert text_of(chunks) == expected == TEXT[: len(expected)] and finishes(chunks) == {0: ["length"]}
        entries = [c["logprobs"] for chunk in chunks for c in chunk["choices"]]
        assert sum(len(entry["content"]) for entry in entries if entry) == 14
    moved = [seen.request for seen in workers[1].seen if len(seen.request.token_ids) > seen.request.num_prompt_tokens]
    (request,) = moved
    assert len(request.token_ids) == request.num_prompt_tokens + dies_after
    original = workers[0].seen[0].request
    assert request.sampling == original.sampling and request.request_id == original.request_id
    metrics = (await running.client.get("/metrics")).text
    assert 'biphase:migrations_total{code="unavailable"} 1.0' in metrics


async def test_prompt_logprobs_are_not_doubled_by_a_move(start_gateway: StartGateway, says: Says) -> None:
    workers = [says(dies_after=2, delay_seconds=0.01), says()]
    running = await start_gateway(*workers, routing_policy="round_robin")
    body = (await running.complete(echo=True, logprobs=1, max_tokens=6)).json()
    (choice,) = body["choices"]
    assert len(choice["logprobs"]["tokens"]) == 3 + 6 and choice["text"].startswith("The sky is Paris is the")
    assert not workers[1].seen[0].request.sampling.HasField("prompt_logprobs")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_moved_request_carries_its_own_ids(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """The task that reads a stream after its first token is not the one that opened it."""
    trace = f"00-{'a' * 32}-{'b' * 16}-01"

    def traced(*_: object) -> tracing.Span:
        context.traceparent.set(trace)
        return tracing.NO_SPAN

    monkeypatch.setattr("services.gateway.generation.sequence_span", traced)
    workers = [says(dies_after=3, delay_seconds=0.01), says()]
    running = await start_gateway(*workers, routing_policy="round_robin")
    if stream:
        await running.stream(max_tokens=9)
    else:
        await running.chat(max_tokens=9)
    (before,), (after,) = workers[0].seen, workers[1].seen
    assert before.carried == after.carried == (before.request.request_id, trace)


async def test_what_is_recorded_keeps_no_message_alive(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a message would hold all of it: the logprobs of a long prompt, for as long as the request is shown."""
    report = common_pb2.RequestReport(reason="local", spans=[common_pb2.Span(phase="chunk", node_id="told")])
    running = await start_gateway(says(report=report))
    messages: list[decode_pb2.GenerateResponse] = []
    took = SequenceStream._took

    def remember(stream: SequenceStream, message: decode_pb2.GenerateResponse) -> None:
        messages.append(message)
        took(stream, message)

    monkeypatch.setattr(SequenceStream, "_took", remember)
    assert (await running.chat()).status_code == 200
    assert sum(message.HasField("report") for message in messages) > 0
    for message in messages:
        # Whoever shares a message's memory sees this.
        message.report.reason = "changed"
        for span in message.report.spans:
            span.node_id = "changed"
    (item,) = running.gateway.recorder._recent
    assert item.record.report is not None and item.record.report.reason == "local"
    assert [span.node_id for attempt in item.record.attempts for span in attempt.spans] == ["told"]


async def test_a_worker_that_died_after_its_last_token(start_gateway: StartGateway, says: Says) -> None:
    workers = [says(dies_after=8), says()]
    running = await start_gateway(*workers, routing_policy="round_robin")
    body = (await running.chat(max_tokens=8)).json()
    assert body["choices"][0]["finish_reason"] == "length" and body["usage"]["completion_tokens"] == 8
    assert workers[1].seen == []


async def test_the_only_worker_comes_back(start_gateway: StartGateway, says: Says) -> None:
    port = free_port()
    worker = says(dies_after=3)
    await worker.start(port)
    running = await start_gateway(worker)
    stream = asyncio.create_task(running.stream(max_tokens=9))
    await running.settle(lambda: worker._server is None)
    again = says()
    await again.start(port)
    running.workers.append(again)
    chunks = await stream
    await again.stop()
    assert text_of(chunks) == TEXT[: len(text_of(chunks))] and finishes(chunks) == {0: ["length"]}
    assert len(again.seen) == 1


async def test_a_new_request_waits_a_moment_for_a_worker_that_was_just_there(
    start_gateway: StartGateway, says: Says
) -> None:
    port = free_port()
    worker = says()
    await worker.start(port)
    running = await start_gateway(worker)
    await worker.stop()
    await running.settle(lambda: running.gateway.nodes.usable("decode") == [], 8.0)
    waiting = asyncio.create_task(running.chat())
    await asyncio.sleep(0.3)
    assert not waiting.done()
    again = says()
    await again.start(port)
    running.workers.append(again)
    assert (await waiting).status_code == 200
    await again.stop()


async def test_a_new_request_is_told_when_no_worker_comes_back(
    start_gateway: StartGateway, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.gateway.nodes._LATELY_SECONDS", 1.0)
    worker = says()
    running = await start_gateway(worker)
    await worker.stop()
    nodes = running.gateway.nodes
    await running.settle(lambda: not nodes.usable("decode") and not nodes.ready_lately("decode"), 12.0)
    assert (await asyncio.wait_for(running.chat(), 1.0)).status_code == 503


async def test_a_prefill_worker_that_was_silent_gets_no_work_for_a_moment(
    start_gateway: StartGateway, says: Says
) -> None:
    prefills = [says(role="prefill"), says(role="prefill")]
    decode = says()
    running = await start_gateway(decode, *prefills)
    decode.report.silent_prefill_incarnations.append(prefills[0].incarnation)
    assert (await running.chat()).status_code == 200
    usable = [node.incarnation for node in running.gateway.nodes.usable("prefill")]
    assert usable == [prefills[1].incarnation]
    # Only an answer ends it: a frozen worker does not come back by itself.
    (silent,) = (node for node in running.gateway.nodes.nodes if node.incarnation == prefills[0].incarnation)
    assert not silent.is_usable(time.monotonic() + 60)
    decode.report.ClearField("silent_prefill_incarnations")
    await running.settle(lambda: len(running.gateway.nodes.usable("prefill")) == 2)


async def test_after_a_move_too_the_first_token_ends_the_prefill(start_gateway: StartGateway, says: Says) -> None:
    """What is counted as waiting at a prefill worker ends with the prefill, not with a long answer."""
    prefill = says(role="prefill")
    workers = [says(dies_after=2, delay_seconds=0.01), says(delay_seconds=0.2)]
    running = await start_gateway(*workers, prefill, routing_policy="round_robin")
    workers[1].report.silent_prefill_incarnations.append(prefill.incarnation)
    nodes = running.gateway.nodes
    (node,) = nodes.usable("prefill")
    stream = asyncio.create_task(running.stream(max_tokens=14))

    def has_ended() -> bool:
        is_given_back = node.num_in_flight == 0 == node.num_prefill_tokens_in_flight
        return len(workers[1].seen) == 1 and is_given_back and not nodes.usable("prefill")

    await running.settle(has_ended)
    assert workers[1].num_running == 1 and not stream.done()
    # A report is told again with the last token: nobody is suspended for it a second time.
    await running.settle(lambda: len(nodes.usable("prefill")) == 1)
    assert finishes(await stream) == {0: ["length"]}
    assert nodes.usable("prefill") == [node]


async def test_prefill_workers_with_blocks_of_another_size_are_asked_too(
    start_gateway: StartGateway, says: Says
) -> None:
    """The namespace differs, the family does not."""
    other = says(role="prefill", namespace=b"s" * 32, family=b"f" * 32)
    strange = says(role="prefill", namespace=b"t" * 32, family=b"g" * 32)
    decode = says(family=b"f" * 32)
    running = await start_gateway(decode, other, strange)
    assert (await running.chat()).status_code == 200
    assert [node.node_id for node in decode.seen[0].request.prefill_candidates] == [other.node_id]


async def test_retries_are_bounded(start_gateway: StartGateway, says: Says) -> None:
    workers = [says(dies_after=1) for _ in range(3)]
    running = await start_gateway(*workers, max_retries=1, routing_policy="round_robin")
    chunks = await running.stream(max_tokens=9)
    assert chunks[-1]["error"]["code"] == 503
    assert sum(len(worker.seen) for worker in workers) == 2


async def test_a_refusal_is_taken_elsewhere(start_gateway: StartGateway, says: Says) -> None:
    for error in (OverloadedError("full"), LayoutMismatchError("other namespace")):
        workers = [says(refuses=error), says()]
        running = await start_gateway(*workers, routing_policy="round_robin")
        for _ in range(2):
            assert (await running.chat()).status_code == 200
        assert len(workers[0].seen) >= 1 and len(workers[1].seen) == 2


async def test_a_client_that_goes_away_ends_the_work(start_gateway: StartGateway, says: Says) -> None:
    worker = says(delay_seconds=0.02)
    running = await start_gateway(worker)
    for stream in (True, False):
        for n in (1, 3):
            body = {"prompt": "x", "max_tokens": 1000, "stream": stream, "n": n, "temperature": 1}
            request = asyncio.create_task(running.client.post("/v1/completions", json=body))
            await running.settle(lambda n=n: worker.num_running == n)
            request.cancel()
            await running.settle(lambda: worker.num_running == 0, 2.0)
            assert all(seen.cancelled for seen in worker.seen)
    await running.settle(lambda: running.gateway.dispatcher.num_running == 0)
    assert running.gateway.recorder.num_open == 0
    rows = (await running.client.get("/status")).json()["requests"]
    assert {row["finish_reason"] for row in rows} == {"abort"} and len(rows) == 8


async def test_a_client_that_goes_away_while_it_waits(start_gateway: StartGateway, says: Says) -> None:
    worker = says(max_num_seqs=1, delay_seconds=0.01)
    running = await start_gateway(worker)
    first = asyncio.create_task(running.chat(max_tokens=60))
    await running.settle(lambda: worker.num_running == 1)
    second = asyncio.create_task(running.chat())
    await running.settle(lambda: running.gateway.queue.num_waiting == 1)
    second.cancel()
    await running.settle(lambda: running.gateway.queue.num_waiting == 0)
    assert (await first).status_code == 200
    assert (await running.chat()).status_code == 200
    assert len(worker.seen) == 2


async def test_a_full_queue_is_a_429(start_gateway: StartGateway, says: Says) -> None:
    worker = says(max_num_seqs=2, delay_seconds=0.02)
    running = await start_gateway(worker, max_queue=3)
    requests = [asyncio.create_task(running.chat(max_tokens=10)) for _ in range(12)]
    responses = await asyncio.gather(*requests)
    codes = [response.status_code for response in responses]
    assert codes.count(200) >= 5 and set(codes) == {200, 429}
    (refused, *_) = [response for response in responses if response.status_code == 429]
    assert int(refused.headers["retry-after"]) >= 1 and refused.json()["error"]["type"] == "RateLimitError"
    assert running.gateway.dispatcher.num_running == 0 and worker.num_running == 0


async def test_no_more_sequences_than_a_worker_takes(start_gateway: StartGateway, says: Says) -> None:
    workers = [says(max_num_seqs=3, delay_seconds=0.005) for _ in range(2)]
    running = await start_gateway(*workers)
    most = 0

    async def watch() -> None:
        nonlocal most
        while True:
            most = max(most, *(worker.num_running for worker in workers))
            await asyncio.sleep(0.002)

    watching = asyncio.create_task(watch())
    responses = await asyncio.gather(*(running.chat(max_tokens=5) for _ in range(30)))
    watching.cancel()
    assert all(response.status_code == 200 for response in responses) and most <= 3
    assert all(len(worker.seen) >= 10 for worker in workers)


async def test_prefill_backlog_holds_requests_in_the_gateway(start_gateway: StartGateway, says: Says) -> None:
    """A request goes out when a prefill worker is about to be free, shortest first among those that wait."""
    decode = says(first_delay_seconds=0.3)
    running = await start_gateway(decode, says(role="prefill"), max_prefill_backlog_tokens=64, max_busy_local_tokens=0)

    async def one(length: int) -> None:
        assert (await running.complete(prompt=[length] * length, max_tokens=1)).status_code == 200

    tasks = [asyncio.create_task(one(100))]
    await running.settle(lambda: decode.num_running == 1)
    for count, length in enumerate((90, 30, 60), 1):
        tasks.append(asyncio.create_task(one(length)))
        await running.settle(lambda count=count: running.gateway.queue.num_waiting == count)  # type: ignore[misc]
    await asyncio.gather(*tasks)
    assert [len(seen.request.token_ids) for seen in decode.seen] == [100, 30, 60, 90]


async def test_short_prompts_go_to_decode_alone_while_prefill_is_busy(start_gateway: StartGateway, says: Says) -> None:
    decode = says(first_delay_seconds=0.15)
    running = await start_gateway(decode, says(role="prefill"), max_busy_local_tokens=50)
    tasks = [asyncio.create_task(running.complete(prompt=[5] * 200, max_tokens=1))]
    await running.settle(lambda: decode.num_running == 1)
    tasks += [asyncio.create_task(running.complete(prompt=[length] * length, max_tokens=1)) for length in (40, 60)]
    responses = await asyncio.gather(*tasks)
    assert all(response.status_code == 200 for response in responses)
    ways = {len(seen.request.token_ids): len(seen.request.prefill_candidates) for seen in decode.seen}
    assert ways == {200: 1, 40: 0, 60: 1}
    reasons = {len(seen.request.token_ids): seen.request.local_prefill_reason for seen in decode.seen}
    assert reasons == {200: "", 40: "prefill_busy", 60: ""}


async def test_deadline(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(first_delay_seconds=5), request_timeout=0.3)
    response = await running.chat()
    assert response.status_code == 504 and response.json()["error"]["code"] == 504
    full = await start_gateway(says(max_num_seqs=1, delay_seconds=0.1), request_timeout=0.5)
    first = asyncio.create_task(full.chat(max_tokens=100))
    await asyncio.sleep(0.1)
    assert (await full.chat()).status_code == 504
    assert (await first).status_code == 504


async def test_choices_follow_the_first_to_its_worker(start_gateway: StartGateway, says: Says) -> None:
    workers = [says(delay_seconds=0.01) for _ in range(3)]
    running = await start_gateway(*workers)
    await running.complete(prompt=[7] * 40, n=4, temperature=1, max_tokens=4)
    counts = sorted(len(worker.seen) for worker in workers)
    assert counts == [0, 0, 4]


async def test_a_slow_reader_is_ended(start_gateway: StartGateway, says: Says) -> None:
    worker = says("word " * 200, max_model_len=10**6, tokens_per_message=64)
    running = await start_gateway(worker, slow_reader_seconds=0.5)
    # Large parts, so that the buffers of the connections between fill quickly.
    body = json.dumps({"prompt": "x", "max_tokens": 900_000, "stream": True, "logprobs": 20})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", running.port))
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        await running.settle(lambda: worker.num_running == 1)
        # A bystander is served meanwhile.
        assert (await running.chat()).status_code == 200
        await running.settle(lambda: worker.num_running == 0, 10.0)
        assert worker.seen[0].cancelled


async def test_drain_finishes_streams_and_refuses_new_work(start_gateway: StartGateway, says: Says) -> None:
    running = await start_gateway(says(delay_seconds=0.02))
    stream = asyncio.create_task(running.stream(max_tokens=20))
    await running.settle(lambda: running.gateway.dispatcher.num_running == 1)
    running.server._on_signal(15)
    assert not running.gateway.is_serving
    chunks = await stream
    assert finishes(chunks) == {0: ["length"]}
    async with httpx.AsyncClient() as other:
        with pytest.raises(httpx.ConnectError):
            await other.get(f"http://127.0.0.1:{running.port}/health")


async def test_nodes_come_and_go(start_gateway: StartGateway, says: Says) -> None:
    first, second = says(), says()
    running = await start_gateway(first, second)
    directory = running.gateway.nodes
    first.state = "draining"
    await running.settle(lambda: len(directory.usable("decode")) == 1)
    assert (await running.chat()).status_code == 200 and len(second.seen) == 1
    await second.stop()
    await running.settle(lambda: directory.usable("decode") == [], 8.0)
    first.state = "ready"
    await running.settle(lambda: len(directory.usable("decode")) == 1)
    assert (await running.chat()).status_code == 200


async def test_two_namespaces_side_by_side(start_gateway: StartGateway, says: Says) -> None:
    old, new = says(namespace=b"o" * 32), says(namespace=b"p" * 32)
    prefills = [says(role="prefill", namespace=b"o" * 32), says(role="prefill", namespace=b"p" * 32)]
    running = await start_gateway(old, new, *prefills)
    for _ in range(4):
        assert (await running.chat()).status_code == 200
    for decode, prefill in ((old, prefills[0]), (new, prefills[1])):
        for seen in decode.seen:
            assert seen.request.namespace == decode.namespace
            assert {c.node_id for c in seen.request.prefill_candidates} == {prefill.node_id}
