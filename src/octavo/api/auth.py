"""Who is calling, and what they may see.

Keys are compared by digest, in constant time, all of them each time. A client is known inside the engine by the head of
its key's digest, never by the key.

| keys set            | ordinary routes        | debug routes                                   |
|---------------------|------------------------|------------------------------------------------|
| none, loopback bind | anyone                 | anyone                                         |
| none, other bind    | anyone                 | nobody: set an admin key                       |
| api keys            | an api or admin key    | an admin key; an api key sees its own requests |
| admin keys alone    | anyone                 | an admin key                                   |
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from dataclasses import dataclass

from octavo.api.error_handlers import ApiError
from octavo.core.config import ServerConfig


@dataclass(frozen=True, slots=True)
class Client:
    """The caller of one HTTP request."""

    id: str  # "" where no API keys are set
    is_admin: bool  # may see everybody's requests


class Keyring:
    """The server's keys."""

    def __init__(self, config: ServerConfig, *, is_loopback: bool) -> None:
        """is_loopback: the server can be reached from this machine alone."""
        self._api = _digests(config.api_key)
        self._admin = _digests(config.admin_key)
        self._open_debug = is_loopback and not self._api and not self._admin

    @property
    def requires_key(self) -> bool:
        """Whether ordinary routes ask for a key."""
        return bool(self._api)

    def identify(self, authorization: str | None) -> Client:
        """The client behind an ``Authorization`` header. Raises a 401 if a key is needed and this is none."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = _digest(key.strip()) if scheme.lower() == "bearer" and key.strip() else None
        is_admin, is_api = _is_among(digest, self._admin), _is_among(digest, self._api)
        if self.requires_key and not (is_api or is_admin):
            raise _unauthorized(given=digest is not None)
        client_id = digest.hex()[:16] if digest is not None and (is_api or is_admin) else ""
        return Client(id=client_id, is_admin=is_admin or self._open_debug)

    def require_admin(self, client: Client) -> None:
        """Raise a 403 unless ``client`` may see everybody's requests."""
        if not client.is_admin:
            how = "send one as a bearer token" if self._admin else "start the server with --admin-key"
            raise ApiError(403, f"this needs an admin key; {how}", code="admin_key_required", kind="permission_error")


def prefix_salt(client: Client, requested: str | None, *, share: bool) -> bytes:
    """The salt under which a request's prefix is cached: what it asks for, added to who its client is.

    Without the client's part, ``cached_tokens`` would let one client guess another's prompt. ``share`` leaves it out.
    """
    owner = "" if share else client.id
    if not owner and requested is None:
        return b""
    # The length keeps ("ab", "c") and ("a", "bc") apart.
    return hashlib.sha256(f"{len(owner)}:{owner}{requested or ''}".encode()).digest()


def _unauthorized(*, given: bool) -> ApiError:
    message = "incorrect API key provided" if given else "no API key provided; send 'Authorization: Bearer KEY'"
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(_digest(key) for key in keys)


def _is_among(digest: bytes | None, known: tuple[bytes, ...]) -> bool:
    """Whether ``digest`` is one of ``known``, in a time that does not depend on which."""
    found = False
    for other in known:
        found |= hmac.compare_digest(digest or b"", other)
    return found
