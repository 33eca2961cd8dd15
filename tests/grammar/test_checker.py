"""The checker: right answers, kept; the loop free meanwhile; what hangs, dies or eats memory is killed and said so."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator

import pytest

from biphase.errors import InternalError, InvalidRequestError, OverloadedError
from biphase.grammar import spec
from biphase.grammar.checker import GrammarChecker
from biphase.grammar.vocabulary import Vocabulary
from biphase.request import StructuredOutput

# The compiler needs about a second for it.
SLOW = spec.json_schema(
    {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]{1,100}$"} for i in range(9000)}}
)


@pytest.fixture
async def checker(grammar_vocabulary: Vocabulary) -> AsyncIterator[GrammarChecker]:
    checker = GrammarChecker(lambda: grammar_vocabulary)
    yield checker
    await checker.close()


def pids(checker: GrammarChecker) -> list[int]:
    return [process.pid for process in checker._idle if process is not None]


async def test_answers_and_keeps_them(checker: GrammarChecker) -> None:
    await checker.check(spec.json_object())
    with pytest.raises(InvalidRequestError, match="unclosed character class"):
        await checker.check(spec.regex("foo[["))
    (pid,) = pids(checker)
    os.kill(pid, 9)
    # Known answers need no process.
    await checker.check(spec.json_object())
    with pytest.raises(InvalidRequestError, match="unclosed"):
        await checker.check(spec.regex("foo[["))
    # New ones get a new process.
    await checker.check(spec.regex("foo"))
    assert pids(checker) != [pid]


async def test_equal_questions_at_once_are_asked_once(checker: GrammarChecker) -> None:
    await asyncio.gather(*(checker.check(spec.regex("a+")) for _ in range(50)))
    assert len(pids(checker)) == 1
    many = [checker.check(spec.regex(f"a{{{number}}}")) for number in range(1, 31)]
    await asyncio.gather(*many)
    assert len(pids(checker)) <= 2


async def test_the_loop_stays_free_and_others_are_served(checker: GrammarChecker) -> None:
    await asyncio.gather(checker.check(spec.regex("x")), checker.check(spec.regex("y")))
    slow = asyncio.create_task(checker.check(SLOW))
    longest = 0.0
    for number in range(20):
        began = time.monotonic()
        await checker.check(spec.regex(f"b{{{number + 1}}}"))
        longest = max(longest, time.monotonic() - began)
    assert not slow.done()
    assert longest < 0.5
    with contextlib.suppress(InvalidRequestError):
        await slow


async def test_too_much_processor_time_is_killed_and_remembered(grammar_vocabulary: Vocabulary) -> None:
    checker = GrammarChecker(lambda: grammar_vocabulary, compile_seconds=0.2)
    try:
        began = time.monotonic()
        with pytest.raises(InvalidRequestError, match=r"too complex: it does not compile within 0\.2 s"):
            await checker.check(SLOW)
        assert time.monotonic() - began < 10.0
        began = time.monotonic()
        with pytest.raises(InvalidRequestError, match="too complex"):
            await checker.check(SLOW)
        assert time.monotonic() - began < 0.05
        await checker.check(spec.regex("a"))
    finally:
        await checker.close()


async def test_a_silent_process_is_killed(checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch) -> None:
    await checker.check(spec.regex("a"))
    (pid,) = pids(checker)
    monkeypatch.setattr("biphase.grammar.checker._START_SECONDS", 0.1)
    monkeypatch.setattr("biphase.grammar.checker._WALL_FACTOR", 0.1)
    os.kill(pid, 19)  # stopped: it answers nothing
    with pytest.raises(InvalidRequestError, match="too complex"):
        await checker.check(spec.regex("b"))
    monkeypatch.undo()
    await checker.check(spec.regex("c"))


async def test_whoever_goes_away_takes_nobody_with_him(checker: GrammarChecker) -> None:
    first = asyncio.create_task(checker.check(SLOW))
    second = asyncio.create_task(checker.check(SLOW))
    await asyncio.sleep(0.05)
    first.cancel()
    with contextlib.suppress(InvalidRequestError):
        await second
    assert first.cancelled()


async def test_too_many_at_once_are_refused(grammar_vocabulary: Vocabulary) -> None:
    checker = GrammarChecker(lambda: grammar_vocabulary, max_waiting=2)
    try:
        asked = [asyncio.create_task(checker.check(spec.regex(f"a{{{number + 1}}}"))) for number in range(5)]
        results = await asyncio.gather(*asked, return_exceptions=True)
        assert sum(isinstance(result, OverloadedError) for result in results) == 3
        assert sum(result is None for result in results) == 2
    finally:
        await checker.close()


async def test_a_process_that_cannot_start_is_our_fault(grammar_vocabulary: Vocabulary) -> None:
    no_end = Vocabulary(grammar_vocabulary.tokens, frozenset(), frozenset())
    checker = GrammarChecker(lambda: no_end)
    try:
        with pytest.raises(InternalError):
            await checker.check(spec.regex("a"))
    finally:
        await checker.close()


async def test_closing_leaves_no_process(grammar_vocabulary: Vocabulary) -> None:
    checker = GrammarChecker(lambda: grammar_vocabulary)
    await checker.check(spec.regex("a"))
    task = asyncio.create_task(checker.check(SLOW))
    await asyncio.sleep(0.2)
    (pid,) = [*pids(checker), *[p.pid for p in checker._busy]]
    await checker.close()
    assert task.cancelled() or task.done()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_process_ends_with_whoever_started_it(grammar_vocabulary: Vocabulary) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "biphase.grammar.check_process", "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.communicate(b"", timeout=30)
    assert process.returncode == 0


def test_the_checker_loads_no_engine() -> None:
    program = (
        "import sys, biphase.grammar.checker, biphase.grammar.spec; "
        "sys.exit(str(sorted({'llguidance', 'torch', 'numpy', 'transformers'} & sys.modules.keys()) or '') or 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_specs_travel_as_they_are() -> None:
    asked = StructuredOutput("regex", "é\n", "<think>", "</think>")
    from biphase.request import SamplingParams
    from biphase.rpc.messages import sampling_from_proto, sampling_to_proto

    params = SamplingParams(structured_output=asked, max_tokens=3)
    assert sampling_from_proto(sampling_to_proto(params)).structured_output == asked
