"""What the first token's report says of where the time went."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from biphase.request import MAX_CHUNKS_TOLD, Request, RequestId, SamplingParams
from biphase.rpc.spans import engine_spans
from biphase.rpc.v1 import common_pb2, decode_pb2
from services.decode import patience
from tests.worker.pair import Client, candidate, running_worker

DEAD = decode_pb2.PrefillCandidate(node_id="dead", incarnation="x", address="127.0.0.1:1")


async def _spans(
    client: Client, token_ids: list[int], candidates: list[decode_pb2.PrefillCandidate]
) -> list[common_pb2.Span]:
    reports = [message.report async for message in client.call(token_ids, candidates) if message.HasField("report")]
    assert not reports[-1].spans, "told once only"
    spans = list(reports[0].spans)
    assert all(0 <= span.start_seconds <= span.end_seconds < 60 for span in spans)
    return spans


async def test_a_hand_off_tells_its_phases_on_both_nodes(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a busy machine a refused connection, or this process's other worker, may take longer to answer than silence is
    # borne. That rule is about speed (test_patience) and this is not.
    monkeypatch.setattr(patience, "_MIN_ACCEPT_SECONDS", 60.0)
    monkeypatch.setattr(patience, "_MAX_ACCEPT_SECONDS", 60.0)
    async with AsyncExitStack() as stack:
        flags = ("--max-num-batched-tokens", "32", "--max-num-seqs", "4")
        prefill = await stack.enter_async_context(running_worker("prefill", tiny_llama, "prefill-0", *flags))
        decode = await stack.enter_async_context(running_worker("decode", tiny_llama, "decode-0"))
        client = Client(decode)
        stack.push_async_callback(client.close)
        spans = await _spans(client, [3 + i for i in range(100)], [DEAD, candidate(prefill)])
        where = Counter((span.phase, span.node_id, span.error_code) for span in spans)
        assert where[("handoff", "dead", "unavailable")] == where[("handoff", "prefill-0", "")] == 1
        assert where[("queue", "decode-0", "")] == where[("queue", "prefill-0", "")] == 1
        assert where[("chunk", "prefill-0", "")] == 4 and where[("exposed", "decode-0", "")] == 1
        by_phase = {span.phase: span for span in spans if not span.error_code}
        handoff = by_phase["handoff"]
        chunks = [span for span in spans if span.phase == "chunk"]
        assert sum(span.num_tokens for span in chunks) == 100
        # Offsets of the prefill worker are decode's own by now: they lie within its call.
        assert handoff.start_seconds <= chunks[0].start_seconds < chunks[-1].end_seconds <= handoff.end_seconds
        reads = [span for span in spans if span.phase == "read"]
        assert sum(span.num_bytes for span in reads) == 7 * decode.layout.block_bytes

        # Decode for itself: its own engine's chunks, and nothing of a hand-off.
        spans = await _spans(client, [5] * 40, [])
        assert {(span.phase, span.node_id) for span in spans} == {("queue", "decode-0"), ("chunk", "decode-0")}


def test_a_long_prompt_tells_a_bounded_number_of_chunks() -> None:
    request = Request(RequestId("r"), [1] * 10, SamplingParams(), arrival_time=100.0)
    request.first_scheduled_time = request.last_scheduled_time = 101.0
    for step in range(1000):
        request.last_scheduled_time = 101.0 + step
        request.note_chunk(101.5 + step, 8)
    spans = engine_spans(request, "node", fetches=True)
    assert len(spans) == MAX_CHUNKS_TOLD + 1
    assert sum(span.num_tokens for span in spans) == 8000
    assert (spans[0].phase, spans[0].end_seconds, spans[-1].end_seconds) == ("queue", 1.0, 1000.5)
