"""Running the application: socket, signals, draining."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from octavo.api.app import create_app
from octavo.api.connections import Connection, Connections, Gate, Listener, connection_limit
from octavo.api.engine_protocol import ServedEngine
from octavo.api.garbage import QuietCollector
from octavo.api.log_filter import seldom
from octavo.api.middleware import is_loopback
from octavo.core.config import ServerConfig
from octavo.core.errors import ConfigError, EngineUnavailable

logger = logging.getLogger(__name__)

BACKLOG = 2048
#: After draining, responses get this long to reach their readers.
FLUSH_S = 2


def bind(config: ServerConfig) -> socket.socket:
    """A socket that listens where ``config`` says; port 0 takes a free one. Raises ConfigError."""
    where = f"{config.host}:{config.port}"
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {where}: {error.strerror or error}; choose another --host") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # or the port stays taken for a minute after a stop
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {config.port} on {config.host} is in use; stop what listens there or choose another --port"
            ) from error
        raise ConfigError(f"cannot listen on {where}: {error.strerror}; choose another --host or --port") from error
    return sock


def url(sock: socket.socket, config: ServerConfig) -> str:
    """Where a client on this machine finds the server."""
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "": "127.0.0.1"}.get(config.host, config.host)
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"http://{host}:{sock.getsockname()[1]}"


def serve(
    engine: ServedEngine,
    server_config: ServerConfig,
    *,
    sock: socket.socket | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Load the engine and serve it until a signal says stop. Returns after a clean stop.

    Listens at once: while the model loads, requests get 503 and ``Retry-After``. The first SIGINT or SIGTERM drains
    (running requests finish, at most ``drain_s``; new ones get 503), the second stops at once.

    sock: from ``bind``, if the caller wants to know about the port before all else; on_ready: called with the URL once
    the model is loaded. Raises ConfigError if the address cannot be had, or what loading raised.
    """
    sock = bind(server_config) if sock is None else sock
    if not is_loopback(server_config.host) and not server_config.api_key:
        logger.warning(
            "listening on %s without an API key: whoever reaches this machine can use the model; set --api-key",
            server_config.host,
        )
    server = Server(create_app(engine, server_config), engine, server_config)
    asyncio.run(server.run_until_stopped(sock, on_ready))


class Server(uvicorn.Server):
    """uvicorn's server, with an engine that loads behind it and drains before it stops."""

    def __init__(self, app: FastAPI, engine: ServedEngine, config: ServerConfig) -> None:
        self.connections = Connections(connection_limit(config.max_connections))
        super().__init__(
            uvicorn.Config(
                Gate(app, self.connections),
                http="h11",  # what Connection is; httptools reads headers of any length into memory
                ws="none",
                log_config=None,  # the program's logging, not uvicorn's
                log_level=config.log_level,
                access_log=config.log_level == "debug",
                lifespan="off",
                server_header=False,
                timeout_keep_alive=config.keep_alive_s,  # type: ignore[arg-type]  # goes to call_later as it is
                timeout_graceful_shutdown=FLUSH_S,
            )
        )
        self._engine = engine
        self._collector = QuietCollector()
        self._drain_s = config.drain_s
        self._server_config = config
        self._num_signals = 0
        self._stopping: asyncio.Task[None] | None = None
        self._serving = False  # loaded, and not asked to stop
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run_until_stopped(self, sock: socket.socket, on_ready: Callable[[str], None] | None) -> None:
        """Serve on ``sock``. Raises what loading the engine raised."""
        self._loop = asyncio.get_running_loop()
        loading = asyncio.create_task(self._load(url(sock, self._server_config), on_ready))
        try:
            with seldom("uvicorn.error", "asyncio", "octavo.api.connections", "octavo.api.sse"):
                await self.serve(sockets=[sock])
        finally:
            died = self._engine_died
            await self._engine.stop()
        if loading.done():
            loading.result()
        else:
            loading.cancel()
        if died and self._server_config.exit_on_engine_death:
            raise EngineUnavailable(f"the engine died: {self._engine.dead_reason}")

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's, with our own way to accept connections."""
        await super().startup(sockets=[])

        def make() -> Connection:
            return Connection(self.connections, self.config, self.server_state)

        self.servers = [Listener(sock, self.connections, make) for sock in sockets or ()]  # type: ignore[misc]

    async def _load(self, address: str, on_ready: Callable[[str], None] | None) -> None:
        try:
            await self._engine.start()
        except BaseException:
            self.should_exit = True
            raise
        self._serving = self._engine.state == "ready"
        if on_ready is not None and self._serving:
            on_ready(address)

    async def on_tick(self, counter: int) -> bool:
        """Whether to stop, asked ten times a second: an engine whose thread has ended does not come back.

        Its streams have been told by then; what they were told is sent within ``FLUSH_S``.
        """
        self._collector.tick(is_idle=self._serving and self._engine.is_idle)
        if self._engine_died and self._server_config.exit_on_engine_death:
            logger.critical("the engine died, and the server ends with it; --no-exit-on-engine-death keeps it up")
            return True
        return await super().on_tick(counter)

    @property
    def _engine_died(self) -> bool:
        return self._serving and self._engine.state == "dead"

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGINT and SIGTERM: the first drains, the second stops at once, a third does not even wait for that."""
        assert self._loop is not None
        self._num_signals += 1
        if self._num_signals == 1:
            self._loop.call_soon_threadsafe(self._begin, self._drain_s)
        elif self._num_signals == 2:
            self._loop.call_soon_threadsafe(self._begin, 0.0)
        else:
            self.force_exit = self.should_exit = True

    def _begin(self, drain_s: float) -> None:
        """Begin to stop, or to stop faster."""
        self._serving = False
        if self._stopping is not None:
            self._stopping.cancel()
        self._stopping = asyncio.create_task(self._drain_and_stop(drain_s))

    async def _drain_and_stop(self, drain_s: float) -> None:
        if drain_s > 0 and self._engine.state == "ready":
            logger.info("draining for up to %s s; a second signal stops at once", drain_s)
            await self._engine.drain(drain_s)
        await self._engine.stop()  # what still runs ends with an error, which its reader sees
        self.should_exit = True
