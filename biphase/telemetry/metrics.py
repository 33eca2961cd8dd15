"""What a service counts, made of its part of the table. Nothing else in the project names a metric.

Two kinds: what is counted as it happens, and what is read off when somebody asks, which costs nothing until then.
Latencies are in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from biphase.telemetry.table import BY_NAME, GATEWAY, Metric, metrics_of

# A series more for each counter and histogram, that nobody asks for.
disable_created_metrics()  # type: ignore[no-untyped-call]

# (name, value, labels beside those that every metric of the process has)
Reading = tuple[str, float, dict[str, str]]


class MetricSet:
    """The metrics of one service in one registry.

    Args:
        constants: label values that are the same for the whole process.
        read: gives the present values of metrics that are read off on demand; from any thread, quickly.
        read_names: which ones those are; all others of the service are counted as it happens.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        service: str,
        constants: dict[str, str],
        read: Callable[[], Iterable[Reading]] = tuple,
        read_names: frozenset[str] = frozenset(),
    ) -> None:
        self.registry = registry
        self._constants = constants
        self._counted: dict[str, Any] = {}
        mine = {metric.name: metric for metric in metrics_of(service)}
        assert read_names <= mine.keys(), read_names - mine.keys()
        for name, metric in mine.items():
            if name not in read_names:
                self._counted[name] = _make(metric, registry)
        if read_names:
            registry.register(_Readings([mine[name] for name in mine if name in read_names], constants, read))

    def get(self, name: str, **labels: str) -> Any:
        """The counter, gauge or histogram under these labels. Keep it where it is used often."""
        metric = BY_NAME[name]
        if not metric.labels:
            return self._counted[name]
        values = self._constants | labels
        return self._counted[name].labels(*(values[label] for label in metric.labels))

    def clear(self, name: str) -> None:
        """Forgets all values of a metric with labels."""
        self._counted[name].clear()


def _make(metric: Metric, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    if metric.kind == "histogram":
        return Histogram(metric.name, metric.help, metric.labels, buckets=metric.buckets, registry=registry)
    kind = Counter if metric.kind == "counter" else Gauge
    return kind(metric.name, metric.help, metric.labels, registry=registry)


class _Readings(Collector):
    def __init__(self, metrics: list[Metric], constants: dict[str, str], read: Callable[[], Iterable[Reading]]) -> None:
        self._metrics = metrics
        self._constants = constants
        self._read = read

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        # Without it the registry would ask for values now.
        return iter(self._families().values())

    def _families(self) -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        return {
            metric.name: (CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily)(
                metric.name, metric.help, labels=metric.labels
            )
            for metric in self._metrics
        }

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        families = self._families()
        for name, value, labels in self._read():
            values = self._constants | labels
            families[name].add_metric([values[label] for label in BY_NAME[name].labels], value)
        return iter(families.values())


class GatewayMetrics:
    """What the gateway sees of requests, and of the nodes it asks for their status.

    Args:
        model_name: label on every vllm:* metric.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self._set = MetricSet(registry, GATEWAY, {"model_name": model_name, "engine": "0"})
        get = self._set.get
        self.num_requests_running = get("vllm:num_requests_running")
        self.num_requests_waiting = get("vllm:num_requests_waiting")
        self.prompt_tokens = get("vllm:prompt_tokens")
        self.generation_tokens = get("vllm:generation_tokens")
        self.time_to_first_token = get("vllm:time_to_first_token_seconds")
        self.inter_token_latency = get("vllm:inter_token_latency_seconds")
        self.time_per_output_token = get("vllm:request_time_per_output_token_seconds")
        self.e2e_request_latency = get("vllm:e2e_request_latency_seconds")
        self.request_queue_time = get("vllm:request_queue_time_seconds")
        self.request_prefill_time = get("vllm:request_prefill_time_seconds")
        self.request_decode_time = get("vllm:request_decode_time_seconds")
        self.request_inference_time = get("vllm:request_inference_time_seconds")
        self.request_prompt_tokens = get("vllm:request_prompt_tokens")
        self.request_generation_tokens = get("vllm:request_generation_tokens")
        self.request_params_n = get("vllm:request_params_n")
        self.request_params_max_tokens = get("vllm:request_params_max_tokens")
        self.prefix_cache_queries = get("vllm:prefix_cache_queries")
        self.prefix_cache_hits = get("vllm:prefix_cache_hits")
        self.external_prefix_cache_queries = get("vllm:external_prefix_cache_queries")
        self.external_prefix_cache_hits = get("vllm:external_prefix_cache_hits")
        self.num_preemptions = get("vllm:num_preemptions")
        self.transferred_tokens = get("biphase:transferred_tokens")
        self.transferred_bytes = get("biphase:transferred_bytes")
        self.exposed_transfer = get("biphase:exposed_transfer_seconds")
        self.prefill_retries = get("biphase:prefill_retries")
        self.waiting_prefill_tokens = get("biphase:waiting_prefill_tokens")

    def rate_limit_skipped(self) -> None:
        self._set.get("biphase:rate_limit_skipped").inc()

    def asked(self, n: int, max_tokens: int) -> None:
        """A valid request for text."""
        self.request_params_n.observe(n)
        self.request_params_max_tokens.observe(max_tokens)

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP answer began. The endpoint has to be one of a few names."""
        self._set.get("biphase:http_requests", endpoint=endpoint, status=str(status)).inc()

    def finished(self, reason: str) -> None:
        self._set.get("vllm:request_success", finished_reason=reason).inc()

    def took_path(self, mode: str, reason: str, transport: str) -> None:
        self._set.get(
            "biphase:requests", mode=mode or "unknown", reason=reason or "unknown", transport=transport or "none"
        ).inc()

    def prompt_tokens_from(self, source: str, count: int) -> None:
        if count:
            self._set.get("biphase:prompt_tokens_by_source", source=source).inc(count)

    def routed(self, policy: str, reason: str) -> None:
        self._set.get("biphase:routing_decisions", policy=policy, reason=reason).inc()

    def moved(self, code: str) -> None:
        self._set.get("biphase:migrations", code=code).inc()

    def failed(self, code: str) -> None:
        self._set.get("biphase:request_errors", code=code).inc()

    def begin_nodes(self) -> None:
        """Forgets the nodes of the last scrape; `node` and `nodes_in_state` follow."""
        for name in (
            "vllm:kv_cache_usage_perc",
            "vllm:cache_config_info",
            "biphase:nodes",
            "biphase:leased_blocks",
            "biphase:draining_blocks",
        ):
            self._set.clear(name)

    def node(
        self, node_id: str, role: str, *, num_blocks: int, used: int, leased: int, draining: int, block_size: int
    ) -> None:
        get = self._set.get
        get("vllm:kv_cache_usage_perc", engine=node_id).set(used / num_blocks if num_blocks else 0.0)
        config = {"engine": node_id, "block_size": str(block_size), "num_gpu_blocks": str(num_blocks)}
        get("vllm:cache_config_info", **config).set(1)
        get("biphase:leased_blocks", node=node_id, role=role).set(leased)
        get("biphase:draining_blocks", node=node_id, role=role).set(draining)

    def nodes_in_state(self, role: str, state: str, count: int) -> None:
        self._set.get("biphase:nodes", role=role, state=state).set(count)
