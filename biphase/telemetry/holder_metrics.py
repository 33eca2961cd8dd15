"""What workers and stores count as it happens: reads of KV blocks; and of a worker its steps and requests.

The rest of their metrics is read off when somebody asks: biphase.worker.metrics and services.kvstore.metrics do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry

from biphase.telemetry.metrics import MetricSet, Reading
from biphase.telemetry.table import DECODE, metrics_of

# Shorter reads tell of overheads rather than of a link's speed.
_MIN_RATED_BYTES = 2**20
# Counted in HolderMetrics and WorkerMetrics.
_AS_IT_HAPPENS = frozenset(
    {
        "biphase:transfer_bytes",
        "biphase:transfer_blocks",
        "biphase:transfer_errors",
        "biphase:handoff_failures",
        "biphase:prefill_modes",
    }
)


class EndedRead(Protocol):
    """A biphase.transfer ReadResult."""

    @property
    def verified(self) -> tuple[int, ...]: ...
    @property
    def stale(self) -> tuple[int, ...]: ...
    @property
    def corrupt(self) -> tuple[int, ...]: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def transport(self) -> str: ...
    @property
    def error_code(self) -> str: ...


class HolderMetrics:
    """Of a process that holds blocks.

    Args:
        role: the service's name in the table.
        model_name: label on vllm:* metrics; a store has none of them.
        read: the present values of what is not counted here.
    """

    def __init__(self, role: str, node_id: str, read: Callable[[], Iterable[Reading]], *, model_name: str = "") -> None:
        self.registry = CollectorRegistry()
        constants = {"node": node_id, "role": role, "engine": node_id, "model_name": model_name}
        read_off = frozenset(
            metric.name
            for metric in metrics_of(role)
            if metric.kind != "histogram" and metric.name not in _AS_IT_HAPPENS
        )
        self._set = MetricSet(self.registry, role, constants, read, read_off)

    def read_ended(self, result: EndedRead) -> None:
        """One read of blocks has ended. From any thread."""
        get, transport = self._set.get, result.transport
        if result.error_code:
            get("biphase:transfer_errors", code=result.error_code).inc()
        for outcome, blocks in (("verified", result.verified), ("stale", result.stale), ("corrupt", result.corrupt)):
            if blocks:
                get("biphase:transfer_blocks", transport=transport, outcome=outcome).inc(len(blocks))
        if result.num_bytes:
            get("biphase:transfer_bytes", transport=transport).inc(result.num_bytes)
            get("biphase:transfer_seconds", transport=transport).observe(result.seconds)
            if result.num_bytes >= _MIN_RATED_BYTES and result.seconds:
                speed = result.num_bytes / result.seconds / 1e9
                get("biphase:transfer_gigabytes_per_second", transport=transport).observe(speed)


class WorkerMetrics(HolderMetrics):
    """Of a worker, either role. Times are seconds of this worker's own clock."""

    def __init__(self, role: str, node_id: str, model_name: str, read: Callable[[], Iterable[Reading]]) -> None:
        super().__init__(role, node_id, read, model_name=model_name)
        get = self._set.get
        self._iteration_tokens = get("vllm:iteration_tokens_total")
        self._e2e = get("vllm:e2e_request_latency_seconds")
        self._queue = get("vllm:request_queue_time_seconds")
        self._prefill = get("vllm:request_prefill_time_seconds")
        self._prompt_tokens = get("vllm:request_prompt_tokens")
        if role == DECODE:
            self._ttft = get("vllm:time_to_first_token_seconds")
            self._itl = get("vllm:inter_token_latency_seconds")
            self._tpot = get("vllm:request_time_per_output_token_seconds")
            self._decode = get("vllm:request_decode_time_seconds")
            self._inference = get("vllm:request_inference_time_seconds")
            self._generation_tokens = get("vllm:request_generation_tokens")

    def stepped(self, num_tokens: int) -> None:
        """The engine's thread ran a step of so many tokens."""
        self._iteration_tokens.observe(num_tokens)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: float) -> None:
        """Tokens came, so long after the ones before."""
        self._itl.observe(seconds)

    def prefilled(self, num_prompt_tokens: int, queue_seconds: float, prefill_seconds: float, seconds: float) -> None:
        """A prefill worker is done with a prompt.

        Args:
            seconds: since the request came.
        """
        self._prompt_tokens.observe(num_prompt_tokens)
        self._queue.observe(queue_seconds)
        self._prefill.observe(prefill_seconds)
        self._e2e.observe(seconds)

    def generated(
        self,
        num_prompt_tokens: int,
        num_output_tokens: int,
        *,
        queue_seconds: float,
        prefill_seconds: float,
        ttft_seconds: float,
        seconds: float,
    ) -> None:
        """A decode worker is done with a sequence."""
        self.prefilled(num_prompt_tokens, queue_seconds, prefill_seconds, seconds)
        decode_seconds = max(0.0, seconds - ttft_seconds)
        self._generation_tokens.observe(num_output_tokens)
        self._decode.observe(decode_seconds)
        self._inference.observe(decode_seconds + prefill_seconds)
        if num_output_tokens > 1:
            self._tpot.observe(decode_seconds / (num_output_tokens - 1))

    def took_path(self, mode: str, reason: str) -> None:
        self._set.get("biphase:prefill_modes", mode=mode, reason=reason).inc()

    def handed_off(self, transport: str, num_bytes: int, exposed_seconds: float, num_failures: int) -> None:
        """A request with a hand-off has its first token.

        Args:
            num_failures: prefill workers that failed at it before.
        """
        if num_failures:
            self._set.get("biphase:handoff_failures").inc(num_failures)
        if num_bytes:
            self._set.get("biphase:handoff_bytes", transport=transport).observe(num_bytes)
            self._set.get("biphase:handoff_exposed_seconds", transport=transport).observe(exposed_seconds)
