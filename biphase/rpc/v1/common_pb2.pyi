from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "max_tokens", "min_tokens", "stop_token_ids", "eos_token_ids", "ignore_eos", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "prompt_logprobs", "structured_output", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenIds]
    logprobs: int
    prompt_logprobs: int
    structured_output: StructuredOutput
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., structured_output: _Optional[_Union[StructuredOutput, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("kind", "spec", "reasoning_end", "reasoning_start")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    REASONING_END_FIELD_NUMBER: _ClassVar[int]
    REASONING_START_FIELD_NUMBER: _ClassVar[int]
    kind: str
    spec: str
    reasoning_end: str
    reasoning_start: str
    def __init__(self, kind: _Optional[str] = ..., spec: _Optional[str] = ..., reasoning_end: _Optional[str] = ..., reasoning_start: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("token_ids", "logprobs", "rank")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    rank: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., rank: _Optional[int] = ...) -> None: ...

class KVLayout(_message.Message):
    __slots__ = ("namespace", "kv_dtype", "block_size_tokens", "num_layers", "num_kv_heads", "head_dim", "block_bytes", "first_kv_head", "family")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_KV_HEAD_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    namespace: bytes
    kv_dtype: str
    block_size_tokens: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_bytes: int
    first_kv_head: int
    family: bytes
    def __init__(self, namespace: _Optional[bytes] = ..., kv_dtype: _Optional[str] = ..., block_size_tokens: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., block_bytes: _Optional[int] = ..., first_kv_head: _Optional[int] = ..., family: _Optional[bytes] = ...) -> None: ...

class BlockHandle(_message.Message):
    __slots__ = ("index", "block_id", "generation", "block_hash")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    BLOCK_ID_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    index: int
    block_id: int
    generation: int
    block_hash: bytes
    def __init__(self, index: _Optional[int] = ..., block_id: _Optional[int] = ..., generation: _Optional[int] = ..., block_hash: _Optional[bytes] = ...) -> None: ...

class TransferEndpoint(_message.Message):
    __slots__ = ("node_id", "incarnation", "tcp_address", "transports", "layout", "shm_address", "host_id")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TCP_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    SHM_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: str
    tcp_address: str
    transports: _containers.RepeatedScalarFieldContainer[str]
    layout: KVLayout
    shm_address: str
    host_id: str
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[str] = ..., tcp_address: _Optional[str] = ..., transports: _Optional[_Iterable[str]] = ..., layout: _Optional[_Union[KVLayout, _Mapping]] = ..., shm_address: _Optional[str] = ..., host_id: _Optional[str] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("phase", "node_id", "start_seconds", "end_seconds", "num_tokens", "num_bytes", "error_code")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    START_SECONDS_FIELD_NUMBER: _ClassVar[int]
    END_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    phase: str
    node_id: str
    start_seconds: float
    end_seconds: float
    num_tokens: int
    num_bytes: int
    error_code: str
    def __init__(self, phase: _Optional[str] = ..., node_id: _Optional[str] = ..., start_seconds: _Optional[float] = ..., end_seconds: _Optional[float] = ..., num_tokens: _Optional[int] = ..., num_bytes: _Optional[int] = ..., error_code: _Optional[str] = ...) -> None: ...

class RequestReport(_message.Message):
    __slots__ = ("prefill_mode", "reason", "prefill_node_id", "decode_node_id", "transport", "num_cached_tokens", "num_transferred_tokens", "num_computed_tokens", "num_prefill_cached_tokens", "num_external_tokens", "transfer_bytes", "transfer_seconds", "exposed_transfer_seconds", "queue_seconds", "prefill_seconds", "num_preemptions", "num_prefill_failures", "spans", "silent_prefill_incarnations")
    PREFILL_MODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PREFILL_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_TRANSFERRED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_TRANSFER_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_FAILURES_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    SILENT_PREFILL_INCARNATIONS_FIELD_NUMBER: _ClassVar[int]
    prefill_mode: str
    reason: str
    prefill_node_id: str
    decode_node_id: str
    transport: str
    num_cached_tokens: int
    num_transferred_tokens: int
    num_computed_tokens: int
    num_prefill_cached_tokens: int
    num_external_tokens: int
    transfer_bytes: int
    transfer_seconds: float
    exposed_transfer_seconds: float
    queue_seconds: float
    prefill_seconds: float
    num_preemptions: int
    num_prefill_failures: int
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    silent_prefill_incarnations: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, prefill_mode: _Optional[str] = ..., reason: _Optional[str] = ..., prefill_node_id: _Optional[str] = ..., decode_node_id: _Optional[str] = ..., transport: _Optional[str] = ..., num_cached_tokens: _Optional[int] = ..., num_transferred_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., num_prefill_cached_tokens: _Optional[int] = ..., num_external_tokens: _Optional[int] = ..., transfer_bytes: _Optional[int] = ..., transfer_seconds: _Optional[float] = ..., exposed_transfer_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., num_preemptions: _Optional[int] = ..., num_prefill_failures: _Optional[int] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., silent_prefill_incarnations: _Optional[_Iterable[str]] = ...) -> None: ...
