"""The Node service: what every process says about itself, and how it is told to drain or to forget."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from biphase.rpc.errors import unary_method
from biphase.rpc.v1 import node_pb2, node_pb2_grpc


class NodeServicer(node_pb2_grpc.NodeServicer):
    """
    Args:
        info, status: answer for the process; quick.
        request_stop: starts a drain with that many seconds, or the process's own default when None.
        reset_cache: forgets all cached blocks that nobody uses; whether none are left.
    """

    def __init__(
        self,
        info: Callable[[], node_pb2.NodeInfo],
        status: Callable[[], node_pb2.NodeStatus],
        request_stop: Callable[[float | None], None],
        reset_cache: Callable[[], bool],
    ) -> None:
        self._info = info
        self._status = status
        self._request_stop = request_stop
        self._reset_cache = reset_cache

    @unary_method
    async def GetInfo(self, request: node_pb2.GetInfoRequest, context: Any) -> node_pb2.NodeInfo:
        return self._info()

    @unary_method
    async def GetStatus(self, request: node_pb2.GetStatusRequest, context: Any) -> node_pb2.NodeStatus:
        return self._status()

    @unary_method
    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:
        self._request_stop(request.timeout_seconds or None)
        return node_pb2.DrainResponse()

    @unary_method
    async def ResetCache(self, request: node_pb2.ResetCacheRequest, context: Any) -> node_pb2.ResetCacheResponse:
        return node_pb2.ResetCacheResponse(is_empty=self._reset_cache())
