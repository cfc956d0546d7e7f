"""What happens before a route: request id, Host check, key check. Plain ASGI, so that streams and disconnects pass."""

from __future__ import annotations

import ipaddress
import re
import secrets

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.api.auth import Keyring
from octavo.api.error_handlers import ApiError, error_response

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")
#: Routes for load balancers and readers, open even where keys are set.
OPEN_PATHS = frozenset({"/health", "/docs", "/redoc", "/openapi.json"})


def is_loopback(host: str) -> bool:
    """Whether a server bound to ``host`` can be reached from this machine alone."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class RequestIdMiddleware:
    """Echo the client's ``x-request-id`` if it is a sane one, else make one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        header = (b"x-request-id", request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start" and header not in message["headers"]:
                message["headers"] = [*message["headers"], header]
            await send(message)

        await self._app(scope, receive, send_with_id)


class HostMiddleware:
    """On a loopback bind, answer only to this machine's own names.

    A web page whose name has been rebound to 127.0.0.1 would otherwise be "same origin" and could use the server.
    """

    def __init__(self, app: ASGIApp, *, allowed: tuple[str, ...]) -> None:
        """allowed: further names, without port."""
        self._app = app
        self._allowed = frozenset(name.lower() for name in allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] in ("http", "websocket"):
            host = Headers(scope=scope).get("host")
            if host is not None and not self._is_ours(host):
                message = f"this server does not answer to host {host[:80]!r}; allow it with --allowed-host"
                await error_response(ApiError(421, message, code="wrong_host"))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_ours(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host).lower()
        return is_loopback(name) or name in self._allowed


class KeyMiddleware:
    """Put the ``Client`` of each request into its state, or answer 401."""

    def __init__(self, app: ASGIApp, *, keyring: Keyring) -> None:
        self._app = app
        self._keyring = keyring

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            try:
                client = self._keyring.identify(Headers(scope=scope).get("authorization"))
            except ApiError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["client"] = client
        await self._app(scope, receive, send)
