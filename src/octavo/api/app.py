"""The HTTP application: routes, what runs before them, how their errors look."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

from octavo._version import __version__
from octavo.api import error_handlers, field_policy
from octavo.api.engine_protocol import ServedEngine
from octavo.api.middleware import HostMiddleware, KeyMiddleware, RequestIdMiddleware, is_loopback
from octavo.api.routes import chat, completions, debug, health, models, stats
from octavo.api.service import Service
from octavo.core.config import ServerConfig


def create_app(engine: ServedEngine, server_config: ServerConfig) -> FastAPI:
    """The application for one engine. It does not start or stop the engine; ``server.serve`` does."""
    service = Service(engine, server_config)
    middleware = [Middleware(RequestIdMiddleware)]  # outermost first
    if is_loopback(server_config.host):
        middleware.append(Middleware(HostMiddleware, allowed=server_config.allowed_host))
    if server_config.cors_origin:
        # before the keys: a browser's preflight carries none
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=server_config.cors_origin,
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", "retry-after"],
            )
        )
    middleware.append(Middleware(KeyMiddleware, keyring=service.keyring))
    app = FastAPI(
        title="octavo",
        version=__version__,
        summary="An OpenAI-compatible inference server",
        description=f"`null` means absent; a field is honoured or refused by name.\n\n{field_policy.as_markdown()}",
        middleware=middleware,
    )
    app.state.service = service
    for module in (chat, completions, models, health, stats, debug):
        app.include_router(module.router)
    error_handlers.install(app)
    return app
