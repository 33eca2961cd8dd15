"""Random faults under load, one after another and several at a time, and the table of what became of the answers.

Owns which faults there are and when they are done and undone. Everything random comes from one seed; timing does not,
so a seed gives the same faults, not the same interleaving.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from tests.chaos.cluster import ChaosCluster
from tests.chaos.faults import Fault, FaultKind
from tests.chaos.load import Answer, Asker, Question, Verdict, judge
from tests.chaos.phases import PHASES_OF_ROLE, Phase, kill_at
from tests.chaos.processes import ServiceProcess

# Bytes after which a fault in a data plane strikes, at most: a prompt's blocks are a few hundred kilobytes.
_MAX_BLOCK_BYTES = 400_000
_MAX_RPC_BYTES = 20_000
# Corruption of RPC bytes is left out: gRPC trusts TCP's checksums (or TLS), the data plane has its own.
_RPC_FAULTS = (FaultKind.DELAY, FaultKind.DROP, FaultKind.TRUNCATE, FaultKind.RESET, FaultKind.SLOW)
# A kill costs a start of several seconds: of all faults so many are process faults.
_PROCESS_SHARE = 0.3
_WEIGHTS = {"kill": 3, "phase": 9, "freeze": 4, "blink": 5}


@dataclass(slots=True)
class Row:
    """What became of the answers that were under way when a fault of one kind struck."""

    num_faults: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)


@dataclass(slots=True)
class Finding:
    verdict: Verdict
    answer: Answer
    question: Question
    right: Answer
    faults: tuple[str, ...]

    def __str__(self) -> str:
        mine, right = self.answer, self.right
        same = next(
            (n for n, (a, b) in enumerate(zip(mine.token_ids, right.token_ids, strict=False)) if a != b),
            min(len(mine.token_ids), len(right.token_ids)),
        )
        return (
            f"{self.verdict}: status {mine.status} {mine.error!r}, finish {mine.finish_reason!r}, "
            f"{len(mine.token_ids)} tokens of {len(right.token_ids)} (equal up to {same}), usage "
            f"{mine.prompt_tokens}/{mine.completion_tokens} for {right.prompt_tokens}/{right.completion_tokens}, "
            f"temperature {self.question.temperature}, prompt of {len(self.question.token_ids)}, "
            f"{mine.seconds:.1f} s; during {', '.join(self.faults)}"
        )


class Storm:
    """One run of faults over a cluster, from `run` on."""

    def __init__(
        self,
        cluster: ChaosCluster,
        known: dict[Question, Answer],
        *,
        seed: int,
        num_faults: int,
        num_clients: int = 8,
        pause_seconds: float = 0.25,
    ) -> None:
        self.seed = seed
        self.table: dict[str, Row] = {}
        self.findings: list[Finding] = []
        self.totals: Counter[Verdict] = Counter()
        self.errors: Counter[str] = Counter()
        self._cluster = cluster
        self._known = known
        self._rng = random.Random(seed)
        self._num_faults = num_faults
        self._num_clients = num_clients
        self._pause_seconds = pause_seconds
        # An answer may come this long after the deadline that the gateway keeps, on a busy machine.
        self._deadline_seconds = cluster.plan.request_timeout_seconds + 5.0
        self._struck: list[tuple[float, str]] = []
        self._undoing: set[asyncio.Task[None]] = set()
        self._troubled: set[str] = set()
        # In turn, so that a run of some length has seen each.
        self._phases = {role: itertools.cycle(phases) for role, phases in PHASES_OF_ROLE.items()}
        # Will be killed when they come to the chosen point.
        self._awaited: set[str] = set()
        # By gateway.
        self._gateway_kills: defaultdict[str, list[float]] = defaultdict(list)
        self._salts = itertools.count()
        self._ended = False

    async def run(self) -> None:
        """Loads the cluster and lets the faults loose on it; returns when the last answer is there."""
        clients = [asyncio.create_task(self._client(number)) for number in range(self._num_clients)]
        try:
            for _ in range(self._num_faults):
                self._strike()
                await asyncio.sleep(self._pause_seconds * 2 * self._rng.random())
                self._revive()
            while self._undoing:
                await asyncio.wait(self._undoing)
        finally:
            self._ended = True
        await asyncio.gather(*clients)

    # ---- clients

    async def _client(self, number: int) -> None:
        rng = random.Random(self.seed * 1000 + number)
        questions = list(self._known)
        place = number % len(self._cluster.base_urls)
        asker = Asker(self._cluster.base_urls[place], self._deadline_seconds + 5.0)
        gateway = self._cluster.processes[f"gateway-{place}"]
        try:
            while not self._ended:
                question = rng.choice(questions)
                # A salt that nobody used before: a prompt that no cache holds.
                salt = "" if rng.random() < 0.4 else f"{self.seed}-{next(self._salts)}"
                logprobs = 1 if rng.random() < 0.3 else None
                begun = time.monotonic()
                answer = await asker.ask(question, stream=rng.random() < 0.6, cache_salt=salt, logprobs=logprobs)
                if answer.refused_connection and not (gateway.running and gateway.ready):
                    # Nobody was asked: the gateway is being started again.
                    await asyncio.sleep(0.2)
                    continue
                self._note(question, answer, begun, gateway.name)
                if answer.status != 200:
                    await asyncio.sleep(0.2)
        finally:
            await asker.close()

    def _note(self, question: Question, answer: Answer, begun: float, gateway: str) -> None:
        right = self._known[question]
        verdict = judge(answer, right, self._deadline_seconds)
        faults = tuple(dict.fromkeys(kind for at, kind in self._struck if begun - 10.0 <= at))
        if verdict is Verdict.BROKEN and any(at >= begun - 0.1 for at in self._gateway_kills[gateway]):
            verdict = Verdict.REFUSED
        self.totals[verdict] += 1
        if answer.status != 200:
            young = any(begun - 6.0 <= at for at in self._gateway_kills[gateway])
            self.errors[f"{answer.status} {answer.error}{' (gateway just restarted)' if young else ''}"] += 1
        for kind in dict.fromkeys(kind for at, kind in self._struck if begun - 0.5 <= at):
            self.table[kind].verdicts[verdict] += 1
        if verdict not in (Verdict.EQUAL, Verdict.REFUSED):
            self.findings.append(Finding(verdict, answer, question, right, faults))

    # ---- faults

    def _strike(self) -> None:
        kind = self._process_fault() if self._rng.random() < _PROCESS_SHARE else self._link_fault()
        if kind:
            self._struck_by(kind)

    def _struck_by(self, kind: str) -> None:
        self.table.setdefault(kind, Row()).num_faults += 1
        self._struck.append((time.monotonic(), kind))

    def _link_fault(self) -> str:
        rng = self._rng
        if rng.random() < 0.75:
            plane, proxies = "blocks", self._cluster.block_proxies
            fault = Fault.draw(rng, _MAX_BLOCK_BYTES)
        else:
            plane, proxies = "rpc", self._cluster.rpc_proxies
            fault = Fault(rng.choice(_RPC_FAULTS), rng.randrange(_MAX_RPC_BYTES), rng.random() * 2.0, 4096)
        name = rng.choice(sorted(proxies))
        proxy = proxies[name]
        way = rng.random()
        if way < 0.1:
            proxy.cut()
            return f"{plane}: all connections reset"
        if way < 0.2:
            proxy.refuse()
            proxy.cut()
            self._later(rng.random() * 2.0, lambda: proxy.refuse(False))
            return f"{plane}: nobody listens"
        proxy.arm(fault)
        return f"{plane}: {fault.kind}"

    def _process_fault(self) -> str:
        """Returns its kind; empty: that is known once it strikes."""
        rng = self._rng
        way = rng.choices(list(_WEIGHTS), list(_WEIGHTS.values()))[0]
        targets = ("prefill", "prefill", "decode", "decode", "kvstore", "valkey", "gateway")
        role = rng.choice(targets)
        if way == "phase" and role not in PHASES_OF_ROLE:
            way = "kill"
        if role == "valkey":
            return self._valkey_fault(way)
        # One worker of each role is left alone, else there is nothing that could go on.
        able = [p for p in self._cluster.of_role(role) if p.running and p.ready and p.name not in self._troubled]
        enough = 2 if role in ("prefill", "decode") else 1
        if len(able) < enough:
            return self._link_fault()
        if way == "phase":
            self._kill_in_phase(rng.choice(able), next(self._phases[role]))
            return ""
        self._hit(rng.choice(able), way)
        return f"{role}: {_WORDS[way]}"

    def _kill_in_phase(self, victim: ServiceProcess, phase: Phase) -> None:
        self._troubled.add(victim.name)
        self._awaited.add(victim.name)
        pause_seconds = self._rng.random()

        async def strike() -> None:
            met = await kill_at(self._cluster, victim, phase)
            self._struck_by(f"{victim.role}: killed {phase if met else 'at no point'}")
            await asyncio.sleep(pause_seconds)
            self._awaited.discard(victim.name)
            victim.start()

        self._background(strike())

    def _hit(self, victim: ServiceProcess, way: str) -> None:
        self._troubled.add(victim.name)
        if way == "kill":
            if victim.role == "gateway":
                self._gateway_kills[victim.name].append(time.monotonic())
            victim.kill()
            self._later(self._rng.random(), victim.start)
            return
        seconds = self._rng.random() * (6.0 if way == "freeze" and victim.role != "gateway" else 0.8)
        victim.freeze()

        def thaw() -> None:
            victim.thaw()
            self._troubled.discard(victim.name)

        self._later(seconds, thaw)

    def _valkey_fault(self, way: str) -> str:
        valkey = self._cluster.valkey
        if "valkey" in self._troubled:
            return self._link_fault()
        self._troubled.add("valkey")
        if way == "kill":
            self._cluster.kill_valkey()
        else:
            self._cluster.freeze_valkey()

        def undo() -> None:
            if way == "kill":
                valkey.restart()
            else:
                self._cluster.thaw_valkey()
            self._troubled.discard("valkey")

        self._later(self._rng.random() * 4.0, undo)
        return f"valkey: {_WORDS[way]}"

    def _revive(self) -> None:
        """Takes those who have come back into the circle of possible victims."""
        for process in self._cluster.processes.values():
            if (
                process.name in self._troubled - self._awaited
                and process.running
                and not process.frozen
                and process.ready
            ):
                self._troubled.discard(process.name)

    def _later(self, seconds: float, undo: Callable[[], None]) -> None:
        async def wait() -> None:
            await asyncio.sleep(seconds)
            undo()

        self._background(wait())

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    # ---- what came of it

    def report(self) -> str:
        """The table by kind of fault. A fault is counted against every answer that was under way."""
        lines = [f"seed {self.seed}: {sum(row.num_faults for row in self.table.values())} faults, "
                 f"{self.totals.total()} answers: {_counts(self.totals)}", ""]  # fmt: skip
        lines.append(f"{'fault':48} {'faults':>6} {'answers':>8} {'equal':>6} {'error':>6} {'wrong':>6} {'late':>5}")
        for kind, row in sorted(self.table.items()):
            v = row.verdicts
            wrong = v[Verdict.WRONG] + v[Verdict.BROKEN]
            lines.append(
                f"{kind:48} {row.num_faults:6} {v.total():8} {v[Verdict.EQUAL]:6} {v[Verdict.REFUSED]:6} "
                f"{wrong:6} {v[Verdict.LATE]:5}"
            )
        lines += ["", *(f"{count:5} x {error}" for error, count in self.errors.most_common(12))]
        return "\n".join(lines)


_WORDS = {"kill": "kill -9, restarted", "freeze": "frozen up to 6 s", "blink": "frozen up to 0.8 s"}


def _counts(totals: Counter[Verdict]) -> str:
    return ", ".join(f"{totals[verdict]} {verdict}" for verdict in Verdict if totals[verdict])
