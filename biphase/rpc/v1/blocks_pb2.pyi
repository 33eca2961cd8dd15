from biphase.rpc.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRequest(_message.Message):
    __slots__ = ("block_hashes", "layout", "reader_node_id", "reader_incarnation", "first_index")
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    READER_NODE_ID_FIELD_NUMBER: _ClassVar[int]
    READER_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    layout: _common_pb2.KVLayout
    reader_node_id: str
    reader_incarnation: str
    first_index: int
    def __init__(self, block_hashes: _Optional[_Iterable[bytes]] = ..., layout: _Optional[_Union[_common_pb2.KVLayout, _Mapping]] = ..., reader_node_id: _Optional[str] = ..., reader_incarnation: _Optional[str] = ..., first_index: _Optional[int] = ...) -> None: ...

class LeaseResponse(_message.Message):
    __slots__ = ("lease_id", "lease_seconds", "blocks", "endpoint")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    lease_seconds: float
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockHandle]
    endpoint: _common_pb2.TransferEndpoint
    def __init__(self, lease_id: _Optional[str] = ..., lease_seconds: _Optional[float] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockHandle, _Mapping]]] = ..., endpoint: _Optional[_Union[_common_pb2.TransferEndpoint, _Mapping]] = ...) -> None: ...

class RenewRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class RenewResponse(_message.Message):
    __slots__ = ("expired",)
    EXPIRED_FIELD_NUMBER: _ClassVar[int]
    expired: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, expired: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_ids",)
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    lease_ids: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, lease_ids: _Optional[_Iterable[str]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OfferRequest(_message.Message):
    __slots__ = ("endpoint", "blocks", "lease_id", "tenant")
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    endpoint: _common_pb2.TransferEndpoint
    blocks: _containers.RepeatedCompositeFieldContainer[_common_pb2.BlockHandle]
    lease_id: str
    tenant: str
    def __init__(self, endpoint: _Optional[_Union[_common_pb2.TransferEndpoint, _Mapping]] = ..., blocks: _Optional[_Iterable[_Union[_common_pb2.BlockHandle, _Mapping]]] = ..., lease_id: _Optional[str] = ..., tenant: _Optional[str] = ...) -> None: ...

class OfferResponse(_message.Message):
    __slots__ = ("num_stored", "num_known", "num_refused")
    NUM_STORED_FIELD_NUMBER: _ClassVar[int]
    NUM_KNOWN_FIELD_NUMBER: _ClassVar[int]
    NUM_REFUSED_FIELD_NUMBER: _ClassVar[int]
    num_stored: int
    num_known: int
    num_refused: int
    def __init__(self, num_stored: _Optional[int] = ..., num_known: _Optional[int] = ..., num_refused: _Optional[int] = ...) -> None: ...
