"""The OpenAI-compatible HTTP server."""

from octavo.api.app import create_app
from octavo.api.server import bind, serve, url

__all__ = ["bind", "create_app", "serve", "url"]
