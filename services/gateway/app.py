"""The ASGI application: routes, what stands around them, and the errors below them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from biphase import __version__
from services.gateway import http_errors, openapi
from services.gateway.gateway import Gateway
from services.gateway.middleware import Authentication, OpenRequests, RateLimiting, RequestIds, Tracing
from services.gateway.routes import drain, generate, models, operations, responses, tokens
from services.gateway.ui import routes as ui


def build_app(gateway: Gateway) -> FastAPI:
    """The application for one gateway; it starts and closes the gateway with itself."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    settings = gateway.settings
    docs = not settings.disable_docs
    app = FastAPI(
        title="biphase",
        version=__version__,
        lifespan=lifespan,
        openapi_url="/openapi.json" if docs else None,
        docs_url="/docs" if docs else None,
        redoc_url=None,
    )
    routers = [group.routes(gateway) for group in (generate, responses, models, tokens, operations, drain)]
    if not settings.disable_ui:
        routers.append(ui.routes())
    for router in routers:
        app.include_router(router)
    http_errors.install(app, [route for router in routers for route in router.routes])
    openapi.install(app)
    # The last one added stands outermost: every answer, refusals too, gets CORS headers and a request id.
    app.add_middleware(OpenRequests, recorder=gateway.recorder)
    app.add_middleware(RateLimiting, limits=gateway.rate_limits)
    app.add_middleware(Tracing)
    app.add_middleware(Authentication, keys=gateway.keys)
    app.add_middleware(RequestIds, metrics=gateway.metrics)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(settings.allowed_origins),
        allow_credentials=settings.allow_credentials,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id"],
    )
    return app
