"""The server under attack: ``python attacked_server.py MODEL_OR_STUB MAX_CONNECTIONS``; prints its URL when ready.

Its deadlines are short, so that a test sees it mend itself, and the buffers of its sockets small, so that a reader that
is slow is so at once.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from octavo.api import bind, connections, json_body, serve
from octavo.cli.serve import set_up_logging
from octavo.core.config import EngineConfig, ServerConfig

#: Of the KV cache.
POOL_BYTES = 64 << 20


def main(model: str, max_connections: int) -> None:
    connections.HEADER_TIMEOUT_S = connections.WRITE_TIMEOUT_S = json_body.BODY_TIMEOUT_S = 3.0
    connections.WRITE_CHECK_S = 0.5
    set_up_logging("info")
    if model == "stub":
        sys.path.insert(0, str(Path(__file__).parents[1] / "api"))
        from fake_engine import FakeEngine

        engine = FakeEngine(max_model_len=2048)
        engine.step_s = 0.01
    else:
        from octavo.engine.async_engine import AsyncEngine

        engine = AsyncEngine(EngineConfig(model=model, max_model_len=2048, max_queue=256, kv_cache_memory=POOL_BYTES))
    config = ServerConfig(port=0, max_connections=max_connections, keep_alive_s=2.0)
    sock = bind(config)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    serve(engine, config, sock=sock, on_ready=lambda url: print(url, flush=True))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
