"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from services.gateway.gateway import Gateway


def routes(gateway: Gateway) -> APIRouter:
    router = APIRouter()

    @router.get("/v1/models", summary="Models")
    async def list_models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(gateway, name) for name in gateway.model.names]}

    # Names may hold slashes, as hub ids do.
    @router.get("/v1/models/{name:path}", summary="One model")
    async def get_model(name: str) -> dict[str, Any]:
        return _model(gateway, gateway.model.check_name(name))

    return router


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    created = gateway.model.created
    return {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "biphase",
        "root": gateway.model.root,
        "parent": None,
        "max_model_len": gateway.max_model_len(),
        "permission": [
            {
                "id": f"modelperm-{name}",
                "object": "model_permission",
                "created": created,
                "allow_create_engine": False,
                "allow_sampling": True,
                "allow_logprobs": True,
                "allow_search_indices": False,
                "allow_view": True,
                "allow_fine_tuning": False,
                "organization": "*",
                "group": None,
                "is_blocking": False,
            }
        ],
    }
