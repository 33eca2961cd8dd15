"""Settings of the gateway: flags and BIPHASE_* variables. vLLM's names where vLLM has the setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

from biphase.settings import (
    API_FLAGS,
    MODEL_FLAGS,
    NODE_FLAGS,
    ApiSettings,
    Flag,
    ModelSettings,
    NodeSettings,
    boolean,
    non_negative,
    non_negative_seconds,
    num_bytes,
    positive,
    positive_seconds,
)
from services.gateway.message.reasoning import FORMATS as REASONING_FORMATS
from services.gateway.message.tool_formats import FORMATS as TOOL_FORMATS

DEFAULT_PORT = 8000

GATEWAY_FLAGS = (
    *(replace(flag, default=DEFAULT_PORT) if flag.name == "port" else flag for flag in NODE_FLAGS),
    *MODEL_FLAGS,
    *API_FLAGS,
    Flag("response-store-seconds", positive_seconds, 86400.0, "how long /v1/responses keeps what it answered"),
    Flag("check-tokenizer", boolean, True, "refuse workers whose tokenizer files are not the gateway's own"),
    Flag("enable-tokenizer-info-endpoint", boolean, False, "GET /tokenizer_info, which shows the chat template"),
    Flag("decode-nodes", str, (), "host:port of decode workers, when there is no registry", many=True),
    Flag("prefill-nodes", str, (), "host:port of prefill workers, when there is no registry", many=True),
    Flag("routing-policy", str, "cost", "how workers are chosen", choices=("cost", "round_robin", "least_loaded")),
    Flag("max-queue", positive, 1024, "sequences that may wait for a worker; more are answered 429"),
    Flag("max-prefill-backlog-tokens", non_negative, 0,
         "uncached prompt tokens sent ahead to one prefill worker; 0: two of its steps"),
    Flag("max-busy-local-tokens", non_negative, 256,
         "prompts of so many uncached tokens are prefilled by decode while the whole pool has more to do; 0: none"),
    Flag("request-timeout", positive_seconds, 600.0, "seconds a request may take altogether"),
    Flag("max-retries", non_negative, 3, "other decode workers to try when one fails a request"),
    Flag("tool-call-parser", str, "auto", "format of the model's tool calls; auto: what its chat template shows",
         choices=("auto", *TOOL_FORMATS)),
    Flag("reasoning-parser", str, "auto",
         "format of the model's reasoning; auto: what its chat template shows; none: all is content",
         choices=("auto", "none", *REASONING_FORMATS)),
    Flag("max-request-bytes", num_bytes, 16 * 2**20, "largest request body"),
    Flag("max-n", positive, 16384, "largest n of a request, and of sequences in one request"),
    Flag("max-logprobs", non_negative, 20, "most alternatives with each token"),
    Flag("slow-reader-seconds", positive_seconds, 60.0, "a stream whose client reads nothing for so long is ended"),
    Flag("sse-keep-alive-seconds", non_negative_seconds, 0.0,
         "a stream that has nothing to say for so long sends a comment, also before its first token; 0: never"),
    Flag("allowed-origins", str, ("*",), "CORS origins", many=True),
    Flag("allow-credentials", boolean, False, "CORS credentials"),
    Flag("disable-docs", boolean, False, "no /docs and /openapi.json"),
    Flag("disable-ui", boolean, False, "no page at /ui"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(NodeSettings, ModelSettings, ApiSettings):
    """One field per flag in GATEWAY_FLAGS; see there for meaning and units."""

    response_store_seconds: float
    check_tokenizer: bool
    enable_tokenizer_info_endpoint: bool
    decode_nodes: tuple[str, ...]
    prefill_nodes: tuple[str, ...]
    routing_policy: str
    max_queue: int
    max_prefill_backlog_tokens: int
    max_busy_local_tokens: int
    request_timeout: float
    max_retries: int
    tool_call_parser: str
    reasoning_parser: str
    max_request_bytes: int
    max_n: int
    max_logprobs: int
    slow_reader_seconds: float
    sse_keep_alive_seconds: float
    allowed_origins: tuple[str, ...]
    allow_credentials: bool
    disable_docs: bool
    disable_ui: bool
