from biphase.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeInfo(_message.Message):
    __slots__ = ("node_id", "role", "incarnation", "pid", "address", "version", "layout", "model", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "endpoint")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_BATCHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    role: str
    incarnation: str
    pid: int
    address: str
    version: str
    layout: _common_pb2.KVLayout
    model: ModelInfo
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    endpoint: _common_pb2.TransferEndpoint
    def __init__(self, node_id: _Optional[str] = ..., role: _Optional[str] = ..., incarnation: _Optional[str] = ..., pid: _Optional[int] = ..., address: _Optional[str] = ..., version: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., model: _Optional[_Union[ModelInfo, _Mapping]] = ..., num_blocks: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_num_batched_tokens: _Optional[int] = ..., endpoint: _Optional[_Union[_common_pb2.TransferEndpoint, _Mapping]] = ...) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("model", "served_names", "vocab_size", "max_model_len_tokens", "dtype", "architecture", "tokenizer_digest")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SERVED_NAMES_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    model: str
    served_names: _containers.RepeatedScalarFieldContainer[str]
    vocab_size: int
    max_model_len_tokens: int
    dtype: str
    architecture: str
    tokenizer_digest: str
    def __init__(self, model: _Optional[str] = ..., served_names: _Optional[_Iterable[str]] = ..., vocab_size: _Optional[int] = ..., max_model_len_tokens: _Optional[int] = ..., dtype: _Optional[str] = ..., architecture: _Optional[str] = ..., tokenizer_digest: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NodeStatus(_message.Message):
    __slots__ = ("state", "num_blocks", "num_used_blocks", "num_cached_blocks", "num_leased_blocks", "num_draining_blocks", "num_running", "num_waiting", "num_waiting_for_remote_kv", "num_queued_prefill_tokens", "prefill_tokens_per_second", "decode_step_seconds", "num_prefix_cache_queries_tokens", "num_prefix_cache_hits_tokens", "num_preemptions", "uptime_seconds", "peers", "counters")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_USED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAINING_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FOR_REMOTE_KV_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    DECODE_STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_QUERIES_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFIX_CACHE_HITS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    state: str
    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_leased_blocks: int
    num_draining_blocks: int
    num_running: int
    num_waiting: int
    num_waiting_for_remote_kv: int
    num_queued_prefill_tokens: int
    prefill_tokens_per_second: float
    decode_step_seconds: float
    num_prefix_cache_queries_tokens: int
    num_prefix_cache_hits_tokens: int
    num_preemptions: int
    uptime_seconds: float
    peers: _containers.RepeatedCompositeFieldContainer[PeerTransport]
    counters: _containers.ScalarMap[str, int]
    def __init__(self, state: _Optional[str] = ..., num_blocks: _Optional[int] = ..., num_used_blocks: _Optional[int] = ..., num_cached_blocks: _Optional[int] = ..., num_leased_blocks: _Optional[int] = ..., num_draining_blocks: _Optional[int] = ..., num_running: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_waiting_for_remote_kv: _Optional[int] = ..., num_queued_prefill_tokens: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., decode_step_seconds: _Optional[float] = ..., num_prefix_cache_queries_tokens: _Optional[int] = ..., num_prefix_cache_hits_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., uptime_seconds: _Optional[float] = ..., peers: _Optional[_Iterable[_Union[PeerTransport, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ...) -> None: ...

class PeerTransport(_message.Message):
    __slots__ = ("node_id", "transport", "gigabytes_per_second", "bytes_read")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    GIGABYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    BYTES_READ_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    transport: str
    gigabytes_per_second: float
    bytes_read: int
    def __init__(self, node_id: _Optional[str] = ..., transport: _Optional[str] = ..., gigabytes_per_second: _Optional[float] = ..., bytes_read: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("timeout_seconds",)
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    timeout_seconds: float
    def __init__(self, timeout_seconds: _Optional[float] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetCacheRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetCacheResponse(_message.Message):
    __slots__ = ("is_empty",)
    IS_EMPTY_FIELD_NUMBER: _ClassVar[int]
    is_empty: bool
    def __init__(self, is_empty: _Optional[bool] = ...) -> None: ...
