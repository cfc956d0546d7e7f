"""What chat and completions answers have in common, as pieces of JSON text."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from octavo.api.logprobs import comma_joined, json_string
from octavo.api.service import Service
from octavo.core.output import RequestOutput
from octavo.core.plan import FinishReason


def new_id(prefix: str) -> str:
    """The id of an answer, unique, unguessable."""
    return f"{prefix}-{secrets.token_hex(16)}"


def head(service: Service, answer_id: str, kind: str) -> str:
    """The opening of a response or chunk, up to and without the comma before its next field."""
    return (
        f'{{"id":"{answer_id}","object":"{kind}","created":{int(time.time())},'
        f'"model":{json_string(service.model_name)},'
        f'"system_fingerprint":{json_string(service.engine.config.system_fingerprint)}'
    )


def id_list(token_ids: Sequence[int]) -> str:
    """Token ids as a JSON array."""
    return "".join(id_list_pieces(token_ids))


def id_list_pieces(token_ids: Sequence[int]) -> Iterator[str]:
    """The same in pieces."""
    yield "["
    yield from comma_joined(map(str, token_ids))
    yield "]"


#: Characters of an answer that are joined and encoded in one go: well under a millisecond.
BLOCK_CHARS = 1 << 16


async def encoded(pieces: Iterable[str]) -> list[bytes]:
    """``pieces``, maybe megabytes, as blocks of UTF-8, with a breath for the event loop after each."""
    blocks: list[bytes] = []
    block: list[str] = []
    num_chars = 0
    for piece in pieces:
        block.append(piece)
        num_chars += len(piece)
        if num_chars >= BLOCK_CHARS:
            blocks.append("".join(block).encode())
            block, num_chars = [], 0
            await asyncio.sleep(0)
    return [*blocks, "".join(block).encode()]


class JsonBlocks(Response):
    """A JSON answer that is sent block by block, from ``encoded``."""

    def __init__(self, blocks: Sequence[bytes]) -> None:
        super().__init__(media_type="application/json", headers={"content-length": str(sum(map(len, blocks)))})
        self._blocks = blocks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        for number, block in enumerate(self._blocks, 1):
            await send({"type": "http.response.body", "body": block, "more_body": number < len(self._blocks)})
            await asyncio.sleep(0)


def finish_fields(output: RequestOutput) -> str:
    """The fields ``finish_reason`` and ``stop_reason`` (the stop string or token id; null for the model's own end)."""
    reason = output.stop_reason
    stop = json_string(reason) if isinstance(reason, str) else "null" if reason is None else str(reason)
    return f'"finish_reason":"{output.finish_reason}","stop_reason":{stop}'


@dataclass(slots=True)
class Choice:
    """One choice of an answer that is not streamed, as it grows."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish: str = ""  # its finish_fields
    reason: FinishReason | None = None

    def add(self, output: RequestOutput) -> None:
        """Take what is new."""
        self.texts.append(output.text)
        self.token_ids.extend(output.token_ids)
        if output.finish_reason is not None:
            self.finish, self.reason = finish_fields(output), output.finish_reason
