"""Who a worker is: its name, its life, what it serves, where its blocks can be read."""

from __future__ import annotations

import os
from dataclasses import dataclass

from biphase import __version__
from biphase.index.registry import NodeLoad, NodeRecord, TransferAddress
from biphase.request import NodeId
from biphase.rpc.v1 import common_pb2, node_pb2
from biphase.transfer.layout import KVLayout


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Everything that stays the same for one incarnation."""

    node_id: NodeId
    role: str
    incarnation: str
    address: str
    layout: KVLayout
    model: node_pb2.ModelInfo
    endpoint: common_pb2.TransferEndpoint
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    metrics_address: str = ""

    def info(self) -> node_pb2.NodeInfo:
        return node_pb2.NodeInfo(
            node_id=self.node_id,
            role=self.role,
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=self.address,
            version=__version__,
            layout=self.layout.to_proto(),
            model=self.model,
            num_blocks=self.num_blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            endpoint=self.endpoint,
        )

    def record(self, state: str, load: NodeLoad) -> NodeRecord:
        return NodeRecord(
            node_id=self.node_id,
            role=self.role,
            incarnation=self.incarnation,
            pid=os.getpid(),
            address=self.address,
            state=state,
            namespace=self.layout.namespace.hex(),
            block_size=self.layout.block_size_tokens,
            model=self.model.model,
            served_names=tuple(self.model.served_names),
            max_model_len=self.model.max_model_len_tokens,
            vocab_size=self.model.vocab_size,
            version=__version__,
            load=load,
            metrics_address=self.metrics_address,
            transfer=TransferAddress(
                tcp_address=self.endpoint.tcp_address,
                transports=tuple(self.endpoint.transports),
                shm_address=self.endpoint.shm_address,
                host_id=self.endpoint.host_id,
            ),
        )
