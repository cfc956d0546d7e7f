"""An OpenAI-compatible server without a model, as a process: streams as many tokens as are asked for.

    fake_server.py PORT DELAY_S FAIL_EVERY

Every token takes DELAY_S; every FAIL_EVERY-th answer breaks off after its first token (0: none).
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PORT, DELAY_S, FAIL_EVERY = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
numbers = itertools.count(1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "fake"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        breaks = FAIL_EVERY and asked["max_tokens"] > 2 and next(numbers) % FAIL_EVERY == 0  # probes ask for two
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        for index in range(1 if breaks else asked["max_tokens"]):
            time.sleep(DELAY_S)
            self.event({"choices": [{"index": 0, "text": f" {index}", "finish_reason": None}]})
        if not breaks:
            usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": asked["max_tokens"]}
            self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
            self.event({"choices": [], "usage": usage})
            self.wfile.write(b"data: [DONE]\n\n")

    def event(self, chunk: object) -> None:
        self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.flush()

    def log_message(self, format: str, *args: object) -> None:
        pass


class Server(ThreadingHTTPServer):
    request_queue_size = 128


Server(("127.0.0.1", PORT), Handler).serve_forever()
