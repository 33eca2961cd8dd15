"""The Node service: what a worker says about itself."""

from __future__ import annotations

from typing import Any

from biphase.rpc.errors import unary_method
from biphase.rpc.v1 import node_pb2, node_pb2_grpc
from biphase.worker.worker import Worker


class NodeServicer(node_pb2_grpc.NodeServicer):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @unary_method
    async def GetInfo(self, request: node_pb2.GetInfoRequest, context: Any) -> node_pb2.NodeInfo:
        return self._worker.identity.info()

    @unary_method
    async def GetStatus(self, request: node_pb2.GetStatusRequest, context: Any) -> node_pb2.NodeStatus:
        return self._worker.status()

    @unary_method
    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:
        self._worker.request_stop(request.timeout_seconds or None)
        return node_pb2.DrainResponse()
