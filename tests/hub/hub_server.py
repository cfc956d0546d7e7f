"""A Hugging Face hub small enough for a test: models on a loopback port, with hashes, ranges, tokens and accidents.

    with HubServer() as hub:
        hub.repos["org/name"] = HubRepo({"config.json": b"{}"})
        monkeypatch.setenv("HF_ENDPOINT", hub.url)

Answers ``/api/models/{id}[/revision/{rev}]`` and ``/{id}/resolve/{rev}/{file}`` (HEAD and GET, with ``Range``).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote


@dataclass
class HubRepo:
    """One model repository at one commit."""

    files: dict[str, bytes]
    branch: str = "main"
    token: str | None = None  # the only token that opens it
    gated: bool = False  # known to everybody, open to nobody without the token
    cut_after: dict[str, list[int]] = field(default_factory=dict)  # file -> bytes sent before each cut of the line
    corrupt: frozenset[str] = frozenset()  # files whose bytes do not fit their hash

    @property
    def commit(self) -> str:
        content = b"".join(name.encode() + data for name, data in sorted(self.files.items()))
        return hashlib.sha1(content).hexdigest()


def hub_hash(name: str, data: bytes) -> str:
    """As on the real hub: weights are stored by sha256, small text files by git's blob hash."""
    if name.endswith((".safetensors", ".gguf", ".bin")):
        return hashlib.sha256(data).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class SeenRequest:
    method: str
    path: str
    range: str | None
    authorization: str | None


class HubServer:
    """Runs in a thread of the test; ``requests`` lists what was asked."""

    def __init__(self) -> None:
        self.repos: dict[str, HubRepo] = {}
        self.requests: list[SeenRequest] = []
        hub = self

        class Handler(_Handler):
            server_hub = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> HubServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def downloads(self) -> list[str]:
        """Names of the files whose bytes were asked for, in order."""
        return [
            seen.path.rsplit("/", 1)[1] for seen in self.requests if seen.method == "GET" and "/resolve/" in seen.path
        ]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_hub: HubServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(self.path.split("?")[0])
        authorization = self.headers.get("Authorization")
        self.server_hub.requests.append(SeenRequest(self.command, path, self.headers.get("Range"), authorization))
        api = re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path)
        if api:
            repo = self._open(api[1], api[2] or "main")
            if repo is not None:
                siblings = [{"rfilename": name} for name in repo.files]
                self._send(
                    200,
                    json.dumps({"id": api[1], "modelId": api[1], "sha": repo.commit, "siblings": siblings}).encode(),
                )
            return
        resolve = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if not resolve:
            self._send(404, b"")
            return
        repo = self._open(resolve[1], resolve[2])
        if repo is not None and resolve[3] in repo.files:
            self._send_file(repo, resolve[3])
        elif repo is not None:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": repo.commit})

    def _open(self, name: str, revision: str) -> HubRepo | None:
        """The repository, or None after sending the reason why not."""
        repo = self.server_hub.repos.get(name)
        authorized = repo is not None and self.headers.get("Authorization") == f"Bearer {repo.token}"
        if repo is None or (repo.token and not repo.gated and not authorized):
            self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        elif repo.gated and not authorized and self.path.startswith("/api/") is False:
            self._send(403 if self.headers.get("Authorization") else 401, b"", {"X-Error-Code": "GatedRepo"})
        elif revision not in (repo.branch, repo.commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        else:
            return repo
        return None

    def _send_file(self, repo: HubRepo, name: str) -> None:
        data, total = repo.files[name], len(repo.files[name])
        headers = {"ETag": f'"{hub_hash(name, data)}"', "X-Repo-Commit": repo.commit, "Accept-Ranges": "bytes"}
        if name in repo.corrupt:
            data = data[:-1] + bytes([data[-1] ^ 1])
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        status = 200
        if wanted:
            start = int(wanted[1])
            end = int(wanted[2]) + 1 if wanted[2] else total
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{total}"
            status, data = 206, data[start:end]
        cuts = repo.cut_after.get(name, [])
        cut = cuts.pop(0) if self.command == "GET" and cuts else None
        self._send(status, data, headers, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, cut: int | None = None) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), "Connection": "close", **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:cut])
        self.close_connection = True  # always: no connection may outlive its test
