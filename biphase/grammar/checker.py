"""Says whether a grammar compiles, without compiling it here: that is done by processes that can be killed.

For an asyncio loop that serves others meanwhile. Answers are kept, so that a schema that comes with every request is
compiled once. Loads no grammar engine into its own process.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import asdict

from biphase.errors import InternalError, InvalidRequestError, OverloadedError
from biphase.grammar.limits import COMPILE_SECONDS
from biphase.grammar.pipe import LENGTH, framed
from biphase.grammar.vocabulary import Vocabulary
from biphase.request import StructuredOutput
from biphase.telemetry.events import event_logger

log = event_logger(__name__)

_NUM_PROCESSES = 2
_MAX_WAITING = 64
_MAX_KEPT = 512
# A process that gets little of the processor is not to blame for it; one that answers nothing for so long is.
_WALL_FACTOR = 10.0
_START_SECONDS = 30.0


class GrammarChecker:
    """
    Args:
        vocabulary: of the model; called in a thread, when the first grammar comes.
        compile_seconds: processor time that one may take.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        num_processes: int = _NUM_PROCESSES,
        compile_seconds: float = COMPILE_SECONDS,
        max_waiting: int = _MAX_WAITING,
    ) -> None:
        self._vocabulary = vocabulary
        self._compile_seconds = compile_seconds
        self._max_waiting = max_waiting
        self._packed: asyncio.Future[bytes] | None = None
        # Idle processes; None stands for one that is not started.
        self._idle: list[Process | None] = [None] * num_processes
        self._places = asyncio.Semaphore(num_processes)
        self._kept: OrderedDict[StructuredOutput, str | None] = OrderedDict()
        self._running: dict[StructuredOutput, asyncio.Task[str | None]] = {}

    async def check(self, asked: StructuredOutput) -> None:
        """
        Raises:
            InvalidRequestError: it does not compile, or not within the limits.
            OverloadedError: too many others are waiting to be compiled.
        """
        error = await self._answer(asked)
        if error is not None:
            raise InvalidRequestError(error)

    async def _answer(self, asked: StructuredOutput) -> str | None:
        if asked in self._kept:
            self._kept.move_to_end(asked)
            return self._kept[asked]
        task = self._running.get(asked)
        if task is None:
            if len(self._running) >= self._max_waiting:
                raise OverloadedError("Too many grammars are being compiled. Try again later.")
            task = self._running[asked] = asyncio.create_task(self._check(asked))
            task.add_done_callback(lambda _: self._running.pop(asked, None))
        # Whoever asked may go away; the others that wait for the same answer stay.
        return await asyncio.shield(task)

    async def _check(self, asked: StructuredOutput) -> str | None:
        async with self._places:
            process = self._idle.pop()
            try:
                if process is None or process.returncode is not None:
                    process = await self._start()
                answer = await self._ask(process, asked)
            except BaseException:
                _kill(process)
                process = None
                raise
            finally:
                self._idle.append(process)
        if answer is None:
            log.warning("grammar_killed", kind=asked.kind, num_characters=len(asked.spec))
            error: str | None = (
                f"Invalid {asked.kind}: too complex: it does not compile within {self._compile_seconds:g} s of "
                "processor time and the memory for it."
            )
        else:
            error = answer["error"]
        self._kept[asked] = error
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return error

    async def _start(self) -> Process:
        packed = await self._packed_vocabulary()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "biphase.grammar.check_process",
            str(self._compile_seconds),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
        )
        assert process.stdin is not None
        process.stdin.write(framed(packed))
        return process

    async def _packed_vocabulary(self) -> bytes:
        if self._packed is None:
            loop = asyncio.get_running_loop()
            self._packed = loop.run_in_executor(None, lambda: self._vocabulary().pack())
        try:
            return await asyncio.shield(self._packed)
        except Exception:
            self._packed = None
            raise

    async def _ask(self, process: Process, asked: StructuredOutput) -> dict[str, str | None] | None:
        """The process's answer; None when it died of the question or had to be killed."""
        assert process.stdin is not None
        assert process.stdout is not None
        request = json.dumps(asdict(asked)).encode()
        try:
            async with asyncio.timeout(_START_SECONDS + self._compile_seconds * _WALL_FACTOR):
                process.stdin.write(framed(request))
                await process.stdin.drain()
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                answer: dict[str, str | None] = json.loads(await process.stdout.readexactly(length))
                return answer
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError):
            _kill(process)
            code = await process.wait()
            if code > 0:
                # It came to an end by itself, before any question: a fault of ours, not of the grammar.
                raise InternalError(f"the process that compiles grammars ended with {code}") from None
            return None

    async def close(self) -> None:
        """Ends all processes, also in the middle of something."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for process in self._idle:
            if process is not None:
                _kill(process)
                await process.wait()
        self._idle = [None] * len(self._idle)


def _kill(process: Process | None) -> None:
    if process is not None and process.returncode is None:
        process.kill()
