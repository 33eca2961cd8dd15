"""Says whether a grammar compiles, without compiling it here: that is done by processes that can be killed.

For an asyncio loop that serves others meanwhile. Answers are kept, so that a schema that comes with every request is
compiled once. Loads no grammar engine into its own process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
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

_TOO_COMPLEX = "too complex"


class _DiedError(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        # Minus the signal, as subprocesses have it.
        self.code = code


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
        self._busy: set[Process] = set()
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
            try:
                error = await self._asked(asked)
            except _DiedError as died:
                log.warning("grammar_process_died", kind=asked.kind, num_characters=len(asked.spec), code=died.code)
                try:
                    # Out of time is an answer. Whatever else killed it may have had nothing to do with this question.
                    error = _TOO_COMPLEX if died.code == -signal.SIGPROF else await self._asked(asked)
                except _DiedError:
                    error = _TOO_COMPLEX
        if error is _TOO_COMPLEX:
            error = (
                f"Invalid {asked.kind}: too complex: it does not compile within {self._compile_seconds:g} s of "
                "processor time and the memory for it."
            )
        self._kept[asked] = error
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return error

    async def _asked(self, asked: StructuredOutput) -> str | None:
        """What a process says of it.

        Raises:
            _DiedError: it died of the question, or had to be killed.
            InternalError: no process can be had.
        """
        process = self._idle.pop()
        try:
            if process is None or process.returncode is not None:
                process = await self._start()
            self._busy.add(process)
            answer = await self._ask(process, asked)
        except BaseException:
            # Whatever it would still say belongs to nobody.
            if process is not None:
                await _end(process)
                self._busy.discard(process)
            process = None
            raise
        finally:
            if process is not None:
                self._busy.discard(process)
            self._idle.append(process)
        return answer["error"]

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

    async def _ask(self, process: Process, asked: StructuredOutput) -> dict[str, str | None]:
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
        except TimeoutError:
            await _end(process)
            raise _DiedError(-signal.SIGPROF) from None
        except (asyncio.IncompleteReadError, ConnectionError):
            code = await _end(process)
            if code > 0:
                # It came to an end by itself, before any question: a fault of ours, not of the grammar.
                raise InternalError(f"the process that compiles grammars ended with {code}") from None
            raise _DiedError(code) from None

    async def close(self) -> None:
        """Ends all processes, also in the middle of something."""
        for task in list(self._running.values()):
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        for process in self._idle:
            if process is not None:
                await _end(process)
        self._idle = [None] * len(self._idle)


async def _end(process: Process) -> int:
    """Kills it unless it has ended by itself. Its exit code."""
    if process.returncode is None:
        # Not Process.kill, which looks after the process itself and takes its exit code away from asyncio.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    return await process.wait()
