"""POST /drain: sends one process of the cluster off, for whoever has the admin key."""

from __future__ import annotations

import hmac
from typing import Any

import grpc
from fastapi import APIRouter, Request
from pydantic import Field

from biphase.errors import NotFoundError, UnauthorizedError
from biphase.rpc.errors import from_rpc_error
from biphase.rpc.v1 import node_pb2, node_pb2_grpc
from biphase.telemetry.events import event_logger
from services.gateway.bodies import BodyReader, body_schema
from services.gateway.gateway import Gateway
from services.gateway.http_errors import shown
from services.gateway.key_file import digest_of
from services.gateway.wire import Body

log = event_logger(__name__)

_MAX_BODY_BYTES = 4096
_CALL_SECONDS = 5.0


class DrainRequest(Body):
    """Which process, by its id in /status, and how long its running requests may take; default: its own setting."""

    node: str
    timeout_seconds: float | None = Field(default=None, gt=0, le=86400)


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()
    bodies = BodyReader(_MAX_BODY_BYTES)

    @router.post("/drain", openapi_extra=body_schema(DrainRequest), summary="Send a process off: needs the admin key")
    async def drain(request: Request) -> dict[str, Any]:
        _require_admin(gateway.settings.admin_key, request.headers.get("authorization"))
        body = await bodies.read(request, DrainRequest)
        if body.node == gateway.node_id:
            gateway.begin_drain()
            return {"node": gateway.node_id, "incarnation": gateway.incarnation, "state": "draining"}
        node = next((node for node in gateway.nodes.nodes if body.node == node.node_id), None)
        if node is None:
            raise NotFoundError(f"There is no node {shown(body.node)!r} here: /status lists them.", "node")
        stub: Any = node_pb2_grpc.NodeStub(gateway.channels.get(node.address))
        try:
            await stub.Drain(node_pb2.DrainRequest(timeout_seconds=body.timeout_seconds), timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, node.node_id) from error
        # Its own word comes with the next heartbeat.
        node.leaving = True
        log.info("drain_asked_for", node=node.node_id, timeout_seconds=body.timeout_seconds)
        return {"node": node.node_id, "incarnation": node.incarnation, "state": "draining"}

    return router


def _require_admin(admin_key: str, authorization: str | None) -> None:
    """
    Raises:
        NotFoundError: this gateway has no admin key, so nobody may.
        UnauthorizedError: no key was sent, or another.
    """
    if not admin_key:
        raise NotFoundError("/drain is off: start the gateway with BIPHASE_ADMIN_KEY set.")
    scheme, _, key = (authorization or "").partition(" ")
    good = hmac.compare_digest(digest_of(key.strip()), digest_of(admin_key))
    if scheme.lower() != "bearer" or not good:
        raise UnauthorizedError("/drain needs the admin key, as 'Authorization: Bearer <key>'.")
