from biphase.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillRequest(_message.Message):
    __slots__ = ("request_id", "token_ids", "num_prompt_tokens", "sampling", "num_held_tokens", "priority", "cache_salt", "layout", "reader_node_id", "reader_incarnation")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_HELD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    READER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    num_prompt_tokens: int
    sampling: _common_pb2.SamplingParams
    num_held_tokens: int
    priority: int
    cache_salt: str
    layout: _common_pb2.KVLayout
    reader_node_id: str
    reader_incarnation: str
    def __init__(self, request_id: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., num_prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[_common_pb2.SamplingParams, _Mapping]] = ..., num_held_tokens: _Optional[int] = ..., priority: _Optional[int] = ..., cache_salt: _Optional[str] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., reader_node_id: _Optional[str] = ..., reader_incarnation: _Optional[str] = ...) -> None: ...

class PrefillResponse(_message.Message):
    __slots__ = ("accepted", "blocks_committed", "done")
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    accepted: PrefillAccepted
    blocks_committed: BlocksCommitted
    done: PrefillDone
    def __init__(self, accepted: _Optional[_Union[PrefillAccepted, _Mapping]] = ..., blocks_committed: _Optional[_Union[BlocksCommitted, _Mapping]] = ..., done: _Optional[_Union[PrefillDone, _Mapping]] = ...) -> None: ...

class PrefillAccepted(_message.Message):
    __slots__ = ("lease_id", "lease_seconds", "endpoint")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    endpoint: _common_pb2.TransferEndpoint
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., endpoint: _Optional[_Union[_common_pb2.TransferEndpoint, _Mapping]] = ...) -> None: ...

class BlocksCommitted(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockHandle]
    def __init__(self, blocks: _Optional[_Iterable[_Union[_common_pb2.BlockHandle, _Mapping]]] = ...) -> None: ...

class PrefillDone(_message.Message):
    __slots__ = ("first_token_id", "first_logprobs", "prompt_logprobs", "num_tokens", "chain_hash", "num_cached_tokens", "num_external_tokens", "num_computed_tokens", "queue_seconds", "prefill_seconds", "spans")
    FIRST_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CHAIN_HASH_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_EXTERNAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    first_token_id: int
    first_logprobs: _common_pb2.TokenLogprobs
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_common_pb2.TokenLogprobs]
    num_tokens: int
    chain_hash: bytes
    num_cached_tokens: int
    num_external_tokens: int
    num_computed_tokens: int
    queue_seconds: float
    prefill_seconds: float
    spans: _containers.RepeatedCompositeFieldContainer[_common_pb2.Span]
    def __init__(self, first_token_id: _Optional[int] = ..., first_logprobs: _Optional[_Union[_common_pb2.TokenLogprobs, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_common_pb2.TokenLogprobs, _Mapping]]] = ..., num_tokens: _Optional[int] = ..., chain_hash: _Optional[bytes] = ..., num_cached_tokens: _Optional[int] = ..., num_external_tokens: _Optional[int] = ..., num_computed_tokens: _Optional[int] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., spans: _Optional[_Iterable[_Union[_common_pb2.Span, _Mapping]]] = ...) -> None: ...
