"""``octavo serve``: one model over HTTP."""

from __future__ import annotations

import gc
import json
import logging
import shlex

from octavo._version import __version__
from octavo.cli.console import remark
from octavo.cli.flags import with_config
from octavo.cli.summary import Rows, resolved_rows
from octavo.cli.tables import facts_table, show
from octavo.core.config import EngineConfig, ResolvedConfig, ServerConfig

LOG_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"


@with_config()
def serve(engine: EngineConfig, server: ServerConfig) -> None:
    """Serve a model over an OpenAI-compatible API.

    The port answers at once: /health says 503 until the model is loaded. Ctrl-C lets running requests finish
    (--drain-s), a second Ctrl-C does not.
    """
    set_up_logging(server.log_level)
    gc.disable()  # what is made while loading stays; looking through it again and again took 3 % of the start
    threshold = gc.get_threshold()
    try:
        _serve(engine, server)
    finally:
        gc.set_threshold(*threshold)
        gc.unfreeze()
        gc.enable()


def _serve(engine: EngineConfig, server: ServerConfig) -> None:
    from octavo.api.garbage import collect_seldom
    from octavo.api.server import bind
    from octavo.api.server import serve as run
    from octavo.engine.async_engine import AsyncEngine

    sock = bind(server)  # before anything slow: a port in use is the commonest mistake
    remark(f"octavo {__version__}: loading {engine.model} ...")
    async_engine = AsyncEngine(engine)

    def announce(url: str) -> None:
        collect_seldom()
        rows = resolved_rows(async_engine.config) + server_rows(server, url)
        title = f"Ready after {async_engine.loaded.load_s:.1f} s"
        show(facts_table(title, rows, alarming=("access",) if is_open_to_all(server) else ()))
        # outside the table and unwrapped, so that it can be copied
        print(f"Try it:  {curl_line(async_engine.config, server, url)}", flush=True)

    run(async_engine, server, sock=sock, on_ready=announce)


def set_up_logging(level: str) -> None:
    """Log to standard error: octavo from ``level`` on, other packages from warnings on.

    What uvicorn says of its starting and stopping is kept for "debug"; the table says it better.
    """
    handler = logging.StreamHandler()
    if level != "debug":
        handler.addFilter(lambda record: record.name.startswith("octavo") or record.levelno >= logging.WARNING)
    logging.basicConfig(level=logging.WARNING, handlers=[handler], format=LOG_FORMAT, datefmt="%H:%M:%S")
    if not logging.getLogger("octavo").isEnabledFor(logging.DEBUG):  # octavo --debug
        logging.getLogger("octavo").setLevel(level.upper())


def server_rows(server: ServerConfig, url: str) -> Rows:
    """Where a client connects and who may."""
    return [("base URL", f"{url}/v1"), ("access", access(server))]


def is_open_to_all(server: ServerConfig) -> bool:
    """Whether strangers on the network can use the model."""
    from octavo.api.middleware import is_loopback

    return not server.api_key and not is_loopback(server.host)


def access(server: ServerConfig) -> str:
    """Who can use this server, in words."""
    from octavo.api.middleware import is_loopback

    where = "programs on this machine" if is_loopback(server.host) else f"whoever reaches {server.host}"
    if server.api_key:
        count = len(server.api_key)
        return f"{where}, with {'the API key' if count == 1 else f'one of {count} API keys'}"
    return f"{where}, WITHOUT A KEY: set --api-key" if is_open_to_all(server) else where


def curl_line(config: ResolvedConfig, server: ServerConfig, url: str) -> str:
    """A first request to paste into a shell: of a chat if the model can hold one."""
    body: dict[str, object] = {"model": server.served_model_name or config.model_name}
    if config.serves_chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "What is a hawk?"}]
    else:
        path, body["prompt"] = "completions", "A hawk is"
    key = ' -H "Authorization: Bearer $KEY"' if server.api_key else ""
    content_type = "-H 'Content-Type: application/json'"
    return f"curl {url}/v1/{path} {content_type}{key} -d {shlex.quote(json.dumps(body))}"
