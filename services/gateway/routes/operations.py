"""Health, version, load, metrics and status: for probes, scrapers and people."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from biphase import __version__
from biphase.errors import UnavailableError
from biphase.rpc.v1 import node_pb2
from services.gateway.gateway import Gateway
from services.gateway.node import Node
from services.gateway.routes.query import number_of, query_flag, query_parameters


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="200 when requests can be served")
    @router.get("/ping", summary="The same, for SageMaker")
    @router.post("/ping", summary="The same, for those who post")
    async def health() -> Response:
        if not gateway.is_serving:
            why = "The gateway is draining." if gateway.draining else gateway.nodes.why_none("decode")
            raise UnavailableError(why)
        return Response(status_code=200)

    @router.get("/version", summary="Version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/load", summary="Requests being answered")
    async def load() -> dict[str, int]:
        return {"server_load": gateway.recorder.num_open}

    @router.post(
        "/reset_prefix_cache",
        summary="Forget cached prefixes; success is false when running requests keep some",
        openapi_extra=query_parameters(reset_running_requests="boolean", reset_external="boolean"),
    )
    async def reset_prefix_cache(request: Request) -> dict[str, bool]:
        # Running requests keep their blocks, whatever reset_running_requests says: the answer tells.
        query_flag(request, "reset_running_requests")
        roles = ("decode", "prefill", "kvstore") if query_flag(request, "reset_external") else ("decode", "prefill")
        return {"success": await gateway.nodes.reset_caches(roles)}

    @router.get("/metrics", summary="Prometheus metrics")
    async def metrics() -> Response:
        update_gauges(gateway)
        return Response(generate_latest(gateway.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/metrics/targets", summary="Where the other processes' metrics are, for Prometheus's http_sd_configs")
    async def metrics_targets() -> list[dict[str, Any]]:
        return [
            {"targets": [record.metrics_address], "labels": {"node": record.node_id, "role": record.role}}
            for record in gateway.registered_nodes
            if record.metrics_address
        ]

    @router.get("/status", summary="Nodes and recent requests")
    async def status(request: Request) -> dict[str, Any]:
        limit, after = (number_of(request.query_params.get(name, "")) for name in ("limit", "after"))
        return status_object(gateway, 100 if limit is None else limit, after or 0)

    return router


def update_gauges(gateway: Gateway) -> None:
    """Gauges are read off when somebody asks, not kept."""
    metrics = gateway.metrics
    metrics.num_requests_running.set(gateway.dispatcher.num_running)
    metrics.num_requests_waiting.set(gateway.queue.num_waiting)
    metrics.waiting_prefill_tokens.set(gateway.queue.num_waiting_tokens)
    metrics.begin_nodes()
    states: Counter[tuple[str, str]] = Counter()
    for node in gateway.nodes.nodes:
        states[(node.role or "unknown", node.state)] += 1
        if node.info is not None and node.status.num_blocks:
            metrics.node(
                node.node_id,
                node.role,
                num_blocks=node.status.num_blocks,
                used=node.status.num_used_blocks,
                leased=node.status.num_leased_blocks,
                draining=node.status.num_draining_blocks,
                block_size=node.block_size,
            )
    for (role, state), count in states.items():
        metrics.nodes_in_state(role, state, count)


def status_object(gateway: Gateway, num_requests: int, after: int = 0) -> dict[str, Any]:
    """
    Args:
        num_requests: so many of the finished and of the active ones at most.
        after: finished ones later than this number only.
    """
    recorder = gateway.recorder
    return {
        "time": round(time.time(), 3),
        "gateway": {
            "id": gateway.node_id,
            "role": "gateway",
            "pid": os.getpid(),
            "address": gateway.address,
            "incarnation": gateway.incarnation,
            "state": "draining" if gateway.draining else "ready" if gateway.is_serving else "waiting_for_workers",
            "version": __version__,
            "uptime_seconds": round(time.time() - gateway.started, 1),
            "running": gateway.dispatcher.num_running,
            "waiting": gateway.queue.num_waiting,
            "max_waiting": gateway.settings.max_queue,
            "routing_policy": gateway.settings.routing_policy,
        },
        "model": {
            "names": list(gateway.model.names),
            "root": gateway.model.root,
            "max_model_len": gateway.max_model_len(),
        },
        "nodes": [_node(node) for node in gateway.nodes.nodes],
        "totals": asdict(recorder.totals),
        "routing": {
            "policy": gateway.settings.routing_policy,
            "decisions": dict(recorder.decisions.most_common()),
        },
        "num_active": recorder.num_active,
        "active": recorder.active(num_requests),
        "requests": recorder.recent(num_requests, after),
    }


def _node(node: Node) -> dict[str, Any]:
    info, status = node.info or node_pb2.NodeInfo(), node.status
    return {
        "id": info.node_id,
        "role": info.role,
        "pid": info.pid,
        "address": node.address,
        "incarnation": info.incarnation,
        "state": node.state,
        "refused": node.refused or None,
        "version": info.version,
        "namespace": info.layout.namespace.hex(),
        "kv_dtype": info.layout.kv_dtype,
        "block_size": info.layout.block_size_tokens,
        "blocks": {
            "total": status.num_blocks,
            "used": status.num_used_blocks,
            "cached": status.num_cached_blocks,
            "leased": status.num_leased_blocks,
            "draining": status.num_draining_blocks,
        },
        "max_running": info.max_num_seqs,
        "running": status.num_running,
        "waiting": status.num_waiting,
        "waiting_for_remote_kv": status.num_waiting_for_remote_kv,
        "queued_prefill_tokens": status.num_queued_prefill_tokens,
        "prefill_tokens_per_second": round(status.prefill_tokens_per_second, 1),
        "decode_step_seconds": round(status.decode_step_seconds, 5),
        "prefix_cache_queries_tokens": status.num_prefix_cache_queries_tokens,
        "prefix_cache_hits_tokens": status.num_prefix_cache_hits_tokens,
        "preemptions": status.num_preemptions,
        "uptime_seconds": round(status.uptime_seconds, 1),
        "in_flight": node.num_in_flight,
        "counters": dict(sorted(status.counters.items())),
        "peers": [
            {
                "id": peer.node_id,
                "transport": peer.transport,
                "gigabytes_per_second": round(peer.gigabytes_per_second, 3),
                "bytes_read": peer.bytes_read,
            }
            for peer in status.peers
        ],
    }
