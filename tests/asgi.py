"""One POST to an ASGI application, without a client."""

from __future__ import annotations

from typing import Any


def post_scope(path: str) -> dict[str, Any]:
    """What a server says of a POST of JSON."""
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    return {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "query_string": b"", "root_path": "", "headers": headers,
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80),
    }  # fmt: skip
