"""Every metric of every process, declared once: docs/metrics.md, the classes that count and the tests go by this table.

`vllm:*` is what vLLM calls the same thing, so that its dashboards and autoscalers work. Counters are exposed with the
suffix `_total`, histograms with `_bucket`, `_sum` and `_count`. Every label has few values: ids of requests and
clients are never labels; ids of nodes are, as many as there are processes. Plain data, standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

GATEWAY, PREFILL, DECODE, KVSTORE = SERVICES = ("gateway", "prefill", "decode", "kvstore")
WORKERS = (PREFILL, DECODE)
HOLDERS = (*WORKERS, KVSTORE)

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_ITL = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0)
_REQUEST = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 480.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SHORT = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_GIGABYTES = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0)
_N = (1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Args:
        kind: "counter", "gauge" or "histogram".
        services: who exposes it.
        unit: of its value; "" for a count of what its name says.
    """

    name: str
    kind: str
    services: tuple[str, ...]
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()

    @property
    def sample_names(self) -> tuple[str, ...]:
        """What queries call it."""
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(self.kind, ("",))
        return tuple(self.name + suffix for suffix in suffixes)


_ENGINE = ("model_name", "engine")
_NODE = ("node", "role")


def _vllm(
    name: str, kind: str, services: tuple[str, ...], help: str, unit: str = "", more: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:  # fmt: skip
    return Metric(f"vllm:{name}", kind, services, help, (*_ENGINE, *more), unit, buckets)


def _node(
    name: str, kind: str, services: tuple[str, ...], help: str, unit: str = "", more: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
) -> Metric:  # fmt: skip
    return Metric(f"biphase:{name}", kind, services, help, (*_NODE, *more), unit, buckets)


def _own(
    name: str, kind: str, help: str, unit: str = "", labels: tuple[str, ...] = (), buckets: tuple[float, ...] = ()
) -> Metric:
    return Metric(f"biphase:{name}", kind, (GATEWAY,), help, labels, unit, buckets)


_SERVING = (GATEWAY, PREFILL, DECODE)
_CLIENT_SIDE = (GATEWAY, DECODE)

_REQUESTS = (
    _vllm("num_requests_running", "gauge", _SERVING,
          "Sequences given to decode workers (gateway); requests in the running batch (workers)."),
    _vllm("num_requests_waiting", "gauge", _SERVING, "Sequences that wait for a place."),
    _vllm("request_success", "counter", _SERVING, "Ended sequences.", more=("finished_reason",)),
    _vllm("prompt_tokens", "counter", _SERVING,
          "Prompt tokens of requests with a first token (gateway); computed here (workers).", "tokens"),
    _vllm("generation_tokens", "counter", _SERVING, "Tokens generated.", "tokens"),
    _vllm("time_to_first_token_seconds", "histogram", _CLIENT_SIDE, "From arrival there to the first token.", "seconds",
          buckets=_TTFT),
    _vllm("inter_token_latency_seconds", "histogram", _CLIENT_SIDE, "Between two messages with tokens of one sequence.",
          "seconds", buckets=_ITL),
    _vllm("request_time_per_output_token_seconds", "histogram", _CLIENT_SIDE,
          "Mean time of a sequence's output tokens after its first.", "seconds", buckets=_ITL),
    _vllm("e2e_request_latency_seconds", "histogram", _SERVING, "From arrival there to the end.", "seconds",
          buckets=_REQUEST),
    _vllm("request_queue_time_seconds", "histogram", _SERVING,
          "Waiting for a place: in gateway and workers together (gateway); there (workers).", "seconds",
          buckets=_REQUEST),
    _vllm("request_prefill_time_seconds", "histogram", _SERVING, "From the first prefill chunk to the first token.",
          "seconds", buckets=_REQUEST),
    _vllm("request_decode_time_seconds", "histogram", _CLIENT_SIDE, "From the first token to the last.", "seconds",
          buckets=_REQUEST),
    _vllm("request_inference_time_seconds", "histogram", _CLIENT_SIDE, "Prefill and decode together.", "seconds",
          buckets=_REQUEST),
    _vllm("request_prompt_tokens", "histogram", _SERVING, "Prompt length.", "tokens", buckets=_TOKENS),
    _vllm("request_generation_tokens", "histogram", _CLIENT_SIDE, "Output length.", "tokens", buckets=_TOKENS),
    _vllm("request_params_n", "histogram", (GATEWAY,), "The n that requests ask for.", buckets=_N),
    _vllm("request_params_max_tokens", "histogram", (GATEWAY,), "The max_tokens that requests ask for.", "tokens",
          buckets=_TOKENS),
    _vllm("prefix_cache_queries", "counter", _SERVING, "Prompt tokens looked up in own caches.", "tokens"),
    _vllm("prefix_cache_hits", "counter", _SERVING, "Prompt tokens found there.", "tokens"),
    _vllm("external_prefix_cache_queries", "counter", (GATEWAY,), "Prompt tokens that no own cache held.", "tokens"),
    _vllm("external_prefix_cache_hits", "counter", (GATEWAY,),
          "Prompt tokens read from a third node or the block store.", "tokens"),
    _vllm("num_preemptions", "counter", _SERVING, "Preemptions, for lack of blocks."),
    _vllm("iteration_tokens_total", "histogram", WORKERS, "Tokens in a step.", "tokens", buckets=_STEP_TOKENS),
    _vllm("kv_cache_usage_perc", "gauge", _SERVING,
          "Share of KV blocks in use, 0 to 1; the gateway tells it of every node, by `engine`.", "ratio"),
    _vllm("cache_config_info", "gauge", _SERVING, "1; the labels tell of a node's KV cache.",
          more=("block_size", "num_gpu_blocks")),
)  # fmt: skip

_ROUTING = (
    _own("http_requests", "counter", "HTTP requests for text, by status code; 429 is what was shed.",
         labels=("endpoint", "status")),
    _own("requests", "counter", "Ended sequences by who prefilled, why, and what moved the blocks.",
         labels=("mode", "reason", "transport")),
    _own("request_errors", "counter", "Sequences that ended in an error, by its code; `overloaded` was shed.",
         labels=("code",)),
    _own("prompt_tokens_by_source", "counter",
         "Prompt tokens by where their KV came from: decode_cache, prefill_cache, external, computed.", "tokens",
         ("source",)),
    _own("transferred_tokens", "counter", "Prompt tokens whose KV went from prefill to decode.", "tokens"),
    _own("transferred_bytes", "counter", "KV bytes that went from prefill to decode.", "bytes"),
    _own("exposed_transfer_seconds", "histogram",
         "What a request waited for its last blocks after prefill was done.", "seconds", buckets=_SHORT),
    _own("routing_decisions", "counter", "Placements, by policy and reason.", labels=("policy", "reason")),
    _own("migrations", "counter", "Sequences sent on to another decode worker, by what went wrong at the first.",
         labels=("code",)),
    _own("prefill_retries", "counter", "Prefill workers left for the next, or for decode itself."),
    _own("waiting_prefill_tokens", "gauge", "Prompt tokens, cached ones not counted, of sequences that wait here.",
         "tokens"),
    _own("rate_limit_skipped", "counter", "Requests let through since Redis could not be asked."),
    _own("nodes", "gauge", "Nodes known, by role and state.", labels=("role", "state")),
)  # fmt: skip

_ALL = SERVICES

_NODES = (
    _node("leased_blocks", "gauge", _ALL, "Blocks under a lease; the gateway tells it of every node.", "blocks"),
    _node("draining_blocks", "gauge", _ALL,
          "Quarantined: blocks given up that an unfinished read or write still holds.", "blocks"),
    _node("kv_blocks", "gauge", HOLDERS, "KV blocks: total, used (referenced), cached (reusable).", "blocks",
          ("state",)),
    _node("leases", "gauge", HOLDERS, "Leases open."),
    _node("leases_ended", "counter", HOLDERS, "Leases ended: released, reader_gone, expired.", more=("how",)),
    _node("kv_waste_ratio", "gauge", WORKERS,
          "Wasted KV memory: share of held blocks' token slots that hold no token. 0 to 1, below 0.04 in a mixed load.",
          "ratio"),
    _node("queued_prefill_tokens", "gauge", WORKERS, "Prompt tokens that wait to be computed here.", "tokens"),
    _node("queued_prefill_seconds", "gauge", WORKERS,
          "What they take at the measured rate; 0 before anything was measured.", "seconds"),
    _node("prefill_tokens_per_second", "gauge", WORKERS, "Measured rate of prefill; 0: none yet.", "tokens/second"),
    _node("decode_step_seconds", "gauge", WORKERS, "Moving mean of steps without prompt tokens.", "seconds"),
    _node("requests_waiting_for_kv", "gauge", WORKERS, "Requests whose blocks are on their way here."),
    _node("engine_steps", "counter", WORKERS, "Steps run."),
    _node("transfer_seconds", "histogram", HOLDERS, "One read of KV blocks, from its first byte asked for.", "seconds",
          ("transport",), _SHORT),
    _node("transfer_bytes", "counter", HOLDERS, "KV bytes read and verified.", "bytes", ("transport",)),
    _node("transfer_blocks", "counter", HOLDERS, "Blocks (descriptors) read: verified, stale, corrupt.", "blocks",
          ("transport", "outcome")),
    _node("transfer_gigabytes_per_second", "histogram", HOLDERS, "Speed of one read of a megabyte or more.",
          "gigabytes/second", ("transport",), _GIGABYTES),
    _node("transfer_errors", "counter", HOLDERS, "Reads that ended in an error, by its code.", more=("code",)),
    _node("sent_bytes", "counter", HOLDERS, "KV bytes sent to readers over sockets; shared memory is read without us.",
          "bytes"),
    _node("sent_blocks", "counter", HOLDERS, "Blocks sent to readers over sockets.", "blocks"),
    _node("handoff_exposed_seconds", "histogram", (DECODE,),
          "What a request waited for its last blocks after prefill was done, by transport.", "seconds",
          ("transport",), _SHORT),
    _node("handoff_bytes", "histogram", (DECODE,), "KV bytes of one hand-off.", "bytes", ("transport",),
          tuple(float(4**power) for power in range(6, 18))),
    _node("handoff_failures", "counter", (DECODE,), "Prefill workers that failed a hand-off."),
    _node("prefill_modes", "counter", (DECODE,), "Requests by who prefilled, and why.", more=("mode", "reason")),
    _node("offer_blocks", "counter", WORKERS,
          "Blocks offered to stores: offered, stored, refused, postponed, given_up, and lost (evicted unstored).",
          "blocks", ("outcome",)),
    _node("offers_dropped", "counter", WORKERS, "Chains of blocks forgotten in the queue of offers."),
    _node("offers_failed", "counter", WORKERS, "Calls to a store that failed."),
    _node("prefix_fetches", "counter", WORKERS, "Prefixes of other nodes: started, failed, not_worth_it.",
          more=("outcome",)),
    _node("prefix_fetched_blocks", "counter", WORKERS, "Blocks read from third nodes.", "blocks"),
    _node("index_published", "counter", HOLDERS, "Index events written."),
    _node("index_publish_failures", "counter", HOLDERS, "Times that Redis did not take them."),
    _node("index_unpublished", "gauge", HOLDERS, "Changes that wait to be written."),
    _node("index_applied", "counter", WORKERS, "Index events of others read."),
    _node("index_lag_seconds", "gauge", WORKERS,
          "Age of the last event when it was read here, by Redis's clock and this machine's.", "seconds"),
)  # fmt: skip

_STORE = (
    _node("store_namespaces", "gauge", (KVSTORE,), "Models (namespaces) held."),
    _node("store_tenants", "gauge", (KVSTORE,), "Tenants with blocks."),
    _node("store_disk_blocks", "gauge", (KVSTORE,), "Blocks on disk.", "blocks"),
    _node("store_offers", "counter", (KVSTORE,), "Offers: received, refused for being too many at once.",
          more=("outcome",)),
    _node("store_blocks", "counter", (KVSTORE,),
          "Blocks offered: stored, known, unverified, refused_full, refused_frequency, refused_quota; and evicted.",
          "blocks", ("outcome",)),
    _node("store_lookups", "counter", (KVSTORE,), "Blocks that readers asked for: asked, hit.", "blocks", ("outcome",)),
    _node("store_disk", "counter", (KVSTORE,),
          "Blocks: written, read, promoted, read_ahead, evicted, skipped, corrupt, failed, recovered.", "blocks",
          ("what",)),
)  # fmt: skip

TABLE: tuple[Metric, ...] = (*_REQUESTS, *_ROUTING, *_NODES, *_STORE)
BY_NAME = {metric.name: metric for metric in TABLE}
assert len(BY_NAME) == len(TABLE), "a metric is declared twice"


def metrics_of(service: str) -> tuple[Metric, ...]:
    return tuple(metric for metric in TABLE if service in metric.services)
