"""Runs one request's sequences and merges what comes of them.

Choices of one prompt share its blocks: the first one runs until its first token, then the others follow to the same
decode worker, which holds the prompt by then. However the request ends, leaving `deltas` ends all its sequences.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from biphase.errors import BiphaseError
from biphase.request import FinishReason
from biphase.rpc.v1 import common_pb2, decode_pb2
from biphase.telemetry import context
from biphase.tokenizer.tokenizer import ModelTokenizer
from services.gateway.dispatch import Dispatcher, SequenceStream
from services.gateway.domain import Generation, SequenceSpec
from services.gateway.frames.choice import Choice
from services.gateway.frames.usage import Usage
from services.gateway.message.parts import gather
from services.gateway.message.reader import MessageReader
from services.gateway.recorder import Recorder, SequenceRecord
from services.gateway.sequence_text import Delta, SequenceText
from services.gateway.spans import sequence_span, tell_phases

# Sequences of one request that may run or wait for a worker at once; the rest wait for these.
_MAX_AT_ONCE = 64
# Deltas of one request that may wait for its reader.
_MAX_BUFFERED = 64


class GenerationRun:
    """
    Args:
        deadline: on the monotonic clock.
        arrival: when the request came in, monotonic.
    """

    def __init__(
        self,
        generation: Generation,
        *,
        dispatcher: Dispatcher,
        tokenizer: ModelTokenizer,
        recorder: Recorder,
        deadline: float,
        arrival: float,
        client_id: str = "",
    ) -> None:
        self.generation = generation
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._recorder = recorder
        self._deadline = deadline
        self._arrival = arrival
        self._client_id = client_id
        self._keeps = not generation.answer.stream
        self.choices = [
            Choice(index, generation.prompts[index // generation.n]) for index in range(generation.num_sequences)
        ]
        self.usage = Usage(prompt_tokens=sum(len(prompt.token_ids) for prompt in generation.prompts))
        # By prompt: set once its first choice has a token, with the worker that holds it.
        self._holders: dict[int, asyncio.Future[str]] = {}

    async def deltas(self) -> AsyncIterator[tuple[Choice, Delta]]:
        """What the choices' sequences bring, as it comes. Close it to end everything.

        Raises:
            BiphaseError: one of the sequences cannot go on; the others are ended.
        """
        if len(self.choices) == 1:
            single = self._run(self.generation.sequence(0), self.choices[0])
            try:
                async for delta in single:
                    yield self.choices[0], delta
            finally:
                await single.aclose()  # type: ignore[attr-defined]
            return
        queue: asyncio.Queue[tuple[Choice, Delta] | BaseException | None] = asyncio.Queue(_MAX_BUFFERED)
        pump = asyncio.create_task(self._pump(queue))
        try:
            while (item := await queue.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            pump.cancel()
            await asyncio.wait([pump])

    async def _pump(self, queue: asyncio.Queue[tuple[Choice, Delta] | BaseException | None]) -> None:
        loop = asyncio.get_running_loop()
        self._holders = {place: loop.create_future() for place in range(len(self.generation.prompts))}
        places = asyncio.Semaphore(_MAX_AT_ONCE)
        # Starting the first choices of all prompts before the rest means that nobody waits for a prompt not begun.
        n = self.generation.n
        ordered = (place * n + choice for choice in range(n) for place in range(len(self.generation.prompts)))
        try:
            async with asyncio.TaskGroup() as group:
                for index in ordered:
                    await places.acquire()
                    spec = self.generation.sequence(index)
                    task = group.create_task(self._into(queue, spec, self.choices[index]))
                    task.add_done_callback(lambda _: places.release())
        except BaseExceptionGroup as failures:
            await queue.put(failures.exceptions[0])
        else:
            await queue.put(None)

    async def _into(
        self,
        queue: asyncio.Queue[tuple[Choice, Delta] | BaseException | None],
        spec: SequenceSpec,
        choice: Choice,
    ) -> None:
        preferred = await self._holders[spec.prompt_index] if spec.choice else ""
        deltas = self._run(spec, choice, preferred)
        try:
            async for delta in deltas:
                await queue.put((choice, delta))
        finally:
            await deltas.aclose()  # type: ignore[attr-defined]
            holder = self._holders[spec.prompt_index]
            if not holder.done():
                holder.set_result("")

    async def _run(self, spec: SequenceSpec, choice: Choice, preferred: str = "") -> AsyncIterator[Delta]:
        context.request_id.set(spec.request_id)
        span = sequence_span(self.generation, spec)
        stream = self._dispatcher.open(spec, deadline=self._deadline, preferred=preferred)
        text = SequenceText(self._tokenizer, spec, self.generation.text)
        reader = None if self.generation.message is None else self.generation.message.reader()
        record = SequenceRecord(
            request_id=spec.request_id,
            endpoint=self.generation.endpoint.value,
            num_prompt_tokens=len(spec.token_ids),
            counts_prompt=spec.choice == 0,
            client_id=self._client_id,
            # The others' clocks start when they do.
            arrival=time.monotonic() if spec.choice else self._arrival,
        )
        record.attempts, record.entered = stream.attempts, stream.entered_time
        self._recorder.began(record)
        outcome, code = "abort", ""
        try:
            forced: decode_pb2.GenerateResponse | None = None
            while not text.finished:
                message = forced or await stream.read()
                forced = None
                delta = text.push(message)
                if message.HasField("report"):
                    record.report = stream.report
                    if not stream.has_moved_output:
                        record.num_cached_tokens = _num_hits(record, message.report)
                if delta.token_ids:
                    self._took(record, stream, spec, choice, delta)
                if self.generation.answer.prompt_only and delta.token_ids:
                    # A scoring call: the one token that had to be generated is nobody's business.
                    self._forget_output(choice)
                    text.finished = True
                    delta = Delta("", (), (), FinishReason.LENGTH.value)
                if delta.finish_reason is not None:
                    outcome = delta.finish_reason
                if reader is not None:
                    self._read(reader, delta)
                    if reader.has_thought_enough and delta.finish_reason is None:
                        forced = stream.go_on_after(reader.reasoning_end_ids)
                if delta.finish_reason is not None:
                    choice.finish_reason = delta.finish_reason
                    choice.stop_reason = delta.stop_reason
                    stream.close()
                    if record.counts_prompt:
                        self.usage.cached_tokens += record.num_cached_tokens
                elif not delta.token_ids:
                    continue
                if self._keeps:
                    choice.text += delta.text
                    choice.reasoning += delta.reasoning
                    gather(choice.tool_calls, delta.tool_calls)
                    choice.token_ids.extend(delta.token_ids)
                    choice.logprobs.extend(delta.logprobs)
                yield delta
        except BiphaseError as error:
            outcome, code = "error", str(error.code)
            raise
        finally:
            stream.close()
            record.admitted, record.num_moves = stream.admitted_time, stream.num_moves
            self._recorder.finished(record, outcome, code)
            if span.is_recording:
                tell_phases(span, record, outcome, code)
            span.end()

    def _read(self, reader: MessageReader, delta: Delta) -> None:
        """Takes the text apart into what a chat's message has."""
        count, thought = len(delta.token_ids), reader.num_reasoning_tokens
        part = reader.push(delta.text, num_tokens=count, is_last=delta.finish_reason is not None)
        self.usage.reasoning_tokens += reader.num_reasoning_tokens - thought
        delta.text, delta.reasoning, delta.tool_calls = part.content, part.reasoning, part.tool_calls
        if delta.finish_reason is not None:
            delta.finish_reason = reader.finish_reason(delta.finish_reason)

    def _forget_output(self, choice: Choice) -> None:
        self.usage.completion_tokens -= choice.num_tokens
        choice.num_tokens = 0

    def _took(
        self, record: SequenceRecord, stream: SequenceStream, spec: SequenceSpec, choice: Choice, delta: Delta
    ) -> None:
        count = len(delta.token_ids)
        if record.first_token is None:
            choice.prompt_logprobs = stream.prompt_logprobs
            holder = self._holders.get(spec.prompt_index)
            if holder is not None and not holder.done():
                holder.set_result(stream.decode_incarnation)
        self._recorder.tokens(record, count)
        choice.num_tokens += count
        self.usage.completion_tokens += count


def _num_hits(record: SequenceRecord, report: common_pb2.RequestReport) -> int:
    """Prompt tokens that nobody computed for this request. What was merely transferred is no hit."""
    hits = report.num_cached_tokens + report.num_prefill_cached_tokens + report.num_external_tokens
    return min(hits, record.num_prompt_tokens)
