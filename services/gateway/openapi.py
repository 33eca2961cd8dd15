"""What /openapi.json says beyond what the routes say of themselves: every status, every kind of content, every error.

Owns the description only. Bodies are described by the models that parse them; see `bodies.body_schema`.
"""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

_JSON = "application/json"
_EVENTS = "text/event-stream"

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "path of the field that is wrong"},
                "code": {"type": "integer", "description": "the HTTP status"},
            },
        }
    },
}
_MEANINGS = {
    400: "The request is wrong; `param` names the field.",
    401: "No API key, or one that is not known.",
    404: "No such model, path or response.",
    413: "The body is too large.",
    429: "Too much at once, or more than the key may use; see Retry-After.",
    500: "A fault of the server.",
    501: "It is well formed and not supported; sending it again is of no use.",
    503: "No worker can take it now, or the server is draining; see Retry-After.",
    504: "It took longer than the server allows.",
}
_BODY = (400, 413)
_TEXT = (*_BODY, 401, 404, 429, 500, 501, 503, 504)


def _object(required: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": kind} for name, kind in required.items()}
    return {"type": "object", "required": list(required), "properties": properties}


_USAGE = _object({"prompt_tokens": "integer", "completion_tokens": "integer", "total_tokens": "integer"})
_ANSWER = _object({"id": "string", "object": "string", "created": "integer", "model": "string", "choices": "array"})
_ANSWER["properties"]["usage"] = _USAGE
_RESPONSE = _object(
    {"id": "string", "object": "string", "created_at": "integer", "status": "string", "output": "array"}
)
_LIST = _object({"object": "string", "data": "array"})

# path -> method -> schema of a good answer (None: no content), and the statuses of refusals.
_ROUTES: dict[tuple[str, str], tuple[dict[str, Any] | None, tuple[int, ...]]] = {
    ("post", "/v1/chat/completions"): (_ANSWER, _TEXT),
    ("post", "/v1/completions"): (_ANSWER, _TEXT),
    ("post", "/v1/responses"): (_RESPONSE, _TEXT),
    ("get", "/v1/responses/{response_id}"): (_RESPONSE, (400, 401, 404)),
    ("delete", "/v1/responses/{response_id}"): (_object({"id": "string", "deleted": "boolean"}), (401, 404)),
    ("get", "/v1/responses/{response_id}/input_items"): (_LIST, (401, 404)),
    ("post", "/v1/responses/{response_id}/cancel"): (_RESPONSE, (400, 401, 404)),
    ("get", "/v1/models"): (_LIST, (401,)),
    ("get", "/v1/models/{name}"): (_object({"id": "string", "object": "string", "created": "integer"}), (401, 404)),
    ("post", "/tokenize"): (_object({"count": "integer", "tokens": "array"}), (*_BODY, 404)),
    ("post", "/detokenize"): (_object({"prompt": "string"}), (*_BODY, 404)),
    ("get", "/tokenizer_info"): (_object({"tokenizer_class": "string"}), ()),
    ("get", "/health"): (None, (503,)),
    ("get", "/ping"): (None, (503,)),
    ("post", "/ping"): (None, (503,)),
    ("post", "/reset_prefix_cache"): (_object({"success": "boolean"}), (400, 401)),
    ("post", "/drain"): (
        _object({"node": "string", "incarnation": "string", "state": "string"}),
        (*_BODY, 401, 404, 429, 500, 501, 503, 504),
    ),
    ("get", "/metrics/targets"): (
        {"type": "array", "items": _object({"targets": "array", "labels": "object"})},
        (401,),
    ),
    ("get", "/version"): (_object({"version": "string"}), ()),
    ("get", "/load"): (_object({"server_load": "integer"}), ()),
    ("get", "/status"): (
        _object({"gateway": "object", "model": "object", "nodes": "array", "active": "array", "requests": "array"}),
        (401,),
    ),
}
# What can be asked about an answer once its id is known.
_LINKED = {
    "get": "/v1/responses/{response_id}",
    "delete": "/v1/responses/{response_id}",
    "items": "/v1/responses/{response_id}/input_items",
    "cancel": "/v1/responses/{response_id}/cancel",
}
_METHODS = {"items": "get", "cancel": "post"}
_STREAMED = frozenset(
    {
        ("post", "/v1/chat/completions"),
        ("post", "/v1/completions"),
        ("post", "/v1/responses"),
        ("get", "/v1/responses/{response_id}"),
    }
)


def install(app: FastAPI) -> None:
    """Replaces the app's own document, made when it is first asked for."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _completed(get_openapi(title=app.title, version=app.version, routes=app.routes))
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components["schemas"] = {"Error": _ERROR}
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            operation["responses"] = _responses(method, path)
            if path.startswith("/v1"):
                # The empty one: where no key is configured none is asked for.
                operation["security"] = [{"key": []}, {}]
    answer = document["paths"]["/v1/responses"]["post"]["responses"]["200"]
    answer["links"] = {
        name: {
            "operationId": document["paths"][path][_METHODS.get(name, name)]["operationId"],
            "parameters": {"response_id": "$response.body#/id"},
        }
        for name, path in _LINKED.items()
    }
    return document


def _responses(method: str, path: str) -> dict[str, Any]:
    if path == "/metrics":
        return {"200": {"description": "Prometheus text", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    good, refusals = _ROUTES[(method, path)]
    answer: dict[str, Any] = {"description": "OK"}
    if good is not None:
        answer["content"] = {_JSON: {"schema": good}}
    if (method, path) in _STREAMED:
        answer["content"][_EVENTS] = {"schema": {"type": "string"}}
    content = {_JSON: {"schema": {"$ref": "#/components/schemas/Error"}}}
    told = {str(status): {"description": _MEANINGS[status], "content": content} for status in sorted(refusals)}
    return {"200": answer, **told}
