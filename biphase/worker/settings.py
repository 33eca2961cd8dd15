"""Settings of a worker process, the same for both roles."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.settings import (
    ENGINE_FLAGS,
    MODEL_FLAGS,
    NODE_FLAGS,
    EngineSettings,
    Flag,
    ModelSettings,
    NodeSettings,
    boolean,
    non_negative,
    positive_seconds,
)
from biphase.telemetry.settings import METRICS_FLAGS, MetricsSettings

WORKER_FLAGS = (
    *NODE_FLAGS,
    *MODEL_FLAGS,
    *ENGINE_FLAGS,
    *METRICS_FLAGS,
    Flag("scheduling-policy", str, "", "default: fcfs for decode, shortest_first for prefill",
         choices=("fcfs", "priority", "shortest_first")),
    Flag("max-mixed-prefill-tokens", non_negative, 128,
         "prompt tokens in a step that also decodes, at most; 0: only --max-num-batched-tokens limits them"),
    Flag("transports", str, ("shm", "tcp"), "transports to use for KV blocks, best first", many=True),
    Flag("transport-choice", str, "speed",
         "which of several that work: the fastest by a test pattern, or the first in --transports",
         choices=("speed", "order")),
    Flag("transfer-port", non_negative, 0, "port where KV blocks can be read; 0: any free one"),
    Flag("advertised-address", str, "",
         "host:port at which others reach this worker's port, where that is another (a proxy, NAT, a container)"),
    Flag("advertised-transfer-address", str, "", "the same for --transfer-port"),
    Flag("require-transport", str, "", "refuse peers that cannot be reached by this transport"),
    Flag("min-remote-prefill-tokens", non_negative, 0,
         "decode prefills prompts with fewer uncached tokens itself"),
    Flag("max-local-suffix-tokens", non_negative, 64,
         "after a hit in its own cache, decode computes up to so many further prompt tokens itself"),
    Flag("max-slow-local-tokens", non_negative, 256,
         "decode computes prompts with so many uncached tokens at most itself when prefill takes far longer than it "
         "would itself"),
    Flag("prefill-stall-seconds", positive_seconds, 30.0,
         "decode leaves a prefill worker that made no progress for this long"),
    Flag("transfer-timeout-seconds", positive_seconds, 10.0, "one read of KV blocks may take this long"),
    Flag("offer-blocks", boolean, True, "offer computed KV blocks to the block store"),
    Flag("fetch-prefixes", boolean, True, "read prefixes that other nodes hold instead of computing them"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkerSettings(NodeSettings, ModelSettings, EngineSettings, MetricsSettings):
    """One field per flag in WORKER_FLAGS; see there for meaning and units."""

    scheduling_policy: str
    max_mixed_prefill_tokens: int
    transports: tuple[str, ...]
    transport_choice: str
    transfer_port: int
    advertised_address: str
    advertised_transfer_address: str
    require_transport: str
    min_remote_prefill_tokens: int
    max_local_suffix_tokens: int
    max_slow_local_tokens: int
    prefill_stall_seconds: float
    transfer_timeout_seconds: float
    offer_blocks: bool
    fetch_prefixes: bool
