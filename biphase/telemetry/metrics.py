"""Every metric name of every process, in one place. `vllm:*` where dashboards and autoscalers know the name already.

Each room gets a class that holds its metrics in one CollectorRegistry; nothing else in the project names a metric.
Latencies are in seconds, sizes in tokens unless the name says otherwise.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_SHORT = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class GatewayMetrics:
    """What the gateway sees of requests, and of the nodes it asks for their status.

    Args:
        model_name: label on every vllm:* metric.
    """

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self.registry = registry
        self._label = {"model_name": model_name, "engine": "0"}
        self.num_requests_running = self._gauge("vllm:num_requests_running", "Sequences given to decode workers.")
        self.num_requests_waiting = self._gauge("vllm:num_requests_waiting", "Sequences waiting in the gateway.")
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of finished and running requests.")
        self.generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _TTFT
        )
        self.inter_token_latency = self._histogram(
            "vllm:inter_token_latency_seconds", "Between two messages with tokens of one sequence.", _ITL
        )
        self.e2e_request_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _REQUEST
        )
        self.request_queue_time = self._histogram(
            "vllm:request_queue_time_seconds", "Waiting, in the gateway and at workers.", _REQUEST
        )
        self.request_prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "From the first prefill chunk to the first token.", _REQUEST
        )
        self.request_decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last.", _REQUEST
        )
        self.request_inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "Prefill and decode together.", _REQUEST
        )
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Prompt length.", _TOKENS)
        self.request_generation_tokens = self._histogram("vllm:request_generation_tokens", "Output length.", _TOKENS)
        self.prefix_cache_queries = self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up in caches.")
        self.prefix_cache_hits = self._counter(
            "vllm:prefix_cache_hits", "Prompt tokens found in the cache of the node that prefilled, or of decode."
        )
        self.external_prefix_cache_queries = self._counter(
            "vllm:external_prefix_cache_queries", "Prompt tokens that no own cache held."
        )
        self.external_prefix_cache_hits = self._counter(
            "vllm:external_prefix_cache_hits", "Prompt tokens read from a third node or the block store."
        )
        self.num_preemptions = self._counter("vllm:num_preemptions", "Preemptions of finished requests.")
        self._success = Counter(
            "vllm:request_success",
            "Finished sequences by reason.",
            ["model_name", "engine", "finished_reason"],
            registry=registry,
        )
        self._nodes_gauges()
        self._biphase()

    def _nodes_gauges(self) -> None:
        per_node = ["model_name", "engine"]
        self._kv_cache_usage = Gauge(
            "vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1, by node.", per_node, registry=self.registry
        )
        self._cache_config = Gauge(
            "vllm:cache_config_info",
            "KV cache of a node.",
            [*per_node, "block_size", "num_gpu_blocks"],
            registry=self.registry,
        )
        self._nodes = Gauge(
            "biphase:nodes", "Nodes known, by role and state.", ["role", "state"], registry=self.registry
        )
        self._leased = Gauge("biphase:leased_blocks", "Blocks under a lease.", ["node"], registry=self.registry)
        self._draining = Gauge(
            "biphase:draining_blocks", "Blocks freed that an unfinished read holds.", ["node"], registry=self.registry
        )

    def _biphase(self) -> None:
        self._requests = Counter(
            "biphase:requests",
            "Finished sequences by who prefilled, why, and what moved the blocks.",
            ["mode", "reason", "transport"],
            registry=self.registry,
        )
        self._prompt_tokens_by_source = Counter(
            "biphase:prompt_tokens_by_source",
            "Prompt tokens by where their KV came from: decode_cache, prefill_cache, external, computed.",
            ["source"],
            registry=self.registry,
        )
        self.transferred_tokens = Counter(
            "biphase:transferred_tokens", "Prompt tokens whose KV went from prefill to decode.", registry=self.registry
        )
        self.transferred_bytes = Counter(
            "biphase:transferred_bytes", "KV bytes that went from prefill to decode.", registry=self.registry
        )
        self.exposed_transfer = Histogram(
            "biphase:exposed_transfer_seconds",
            "What a request waited for its last blocks after prefill was done.",
            buckets=_SHORT,
            registry=self.registry,
        )
        self._decisions = Counter(
            "biphase:routing_decisions",
            "Placements by policy and reason.",
            ["policy", "reason"],
            registry=self.registry,
        )
        self._moves = Counter(
            "biphase:migrations",
            "Sequences sent on to another decode worker, by what went wrong at the first.",
            ["code"],
            registry=self.registry,
        )
        self._errors = Counter(
            "biphase:request_errors", "Requests that ended in an error, by its code.", ["code"], registry=self.registry
        )
        self._rate_limit_skipped = Counter(
            "biphase:rate_limit_skipped", "Requests let through since Redis could not be asked.", registry=self.registry
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._label), registry=self.registry).labels(**self._label)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._label), registry=self.registry).labels(**self._label)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, list(self._label), buckets=buckets, registry=self.registry).labels(**self._label)

    def rate_limit_skipped(self) -> None:
        self._rate_limit_skipped.inc()

    def finished(self, reason: str) -> None:
        self._success.labels(**self._label, finished_reason=reason).inc()

    def took_path(self, mode: str, reason: str, transport: str) -> None:
        self._requests.labels(mode or "unknown", reason or "unknown", transport or "none").inc()

    def prompt_tokens_from(self, source: str, count: int) -> None:
        if count:
            self._prompt_tokens_by_source.labels(source).inc(count)

    def routed(self, policy: str, reason: str) -> None:
        self._decisions.labels(policy, reason).inc()

    def moved(self, code: str) -> None:
        self._moves.labels(code).inc()

    def failed(self, code: str) -> None:
        self._errors.labels(code).inc()

    def begin_nodes(self) -> None:
        """Forgets the nodes of the last scrape; `node` and `nodes_in_state` follow."""
        for gauge in (self._kv_cache_usage, self._cache_config, self._nodes, self._leased, self._draining):
            gauge.clear()

    def node(self, node_id: str, *, num_blocks: int, used: int, leased: int, draining: int, block_size: int) -> None:
        name = self._label["model_name"]
        self._kv_cache_usage.labels(name, node_id).set(used / num_blocks if num_blocks else 0.0)
        self._cache_config.labels(name, node_id, str(block_size), str(num_blocks)).set(1)
        self._leased.labels(node_id).set(leased)
        self._draining.labels(node_id).set(draining)

    def nodes_in_state(self, role: str, state: str, count: int) -> None:
        self._nodes.labels(role, state).set(count)
