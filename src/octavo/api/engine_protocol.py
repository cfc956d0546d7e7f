"""What the HTTP layer asks of an engine. ``engine.async_engine.AsyncEngine`` is the one that is served."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from octavo.core.config import ResolvedConfig
from octavo.core.output import RequestOutput
from octavo.core.request import Submission
from octavo.observability.snapshots import LifecycleSnapshot, StatsSnapshot
from octavo.observability.trace import StepRecord
from octavo.text.workers import TextWorkers


class TokenTable(Protocol):
    """The part of ``text.tokenizer.Tokenizer`` that responses need."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def adds_space_prefix(self) -> bool:
        """Whether a text is encoded with a space before it, as SentencePiece does."""

    def token_bytes(self, token_id: int, /) -> bytes:
        """The bytes a token stands for; of a control token, those of its name."""

    def is_control(self, token_id: int, /) -> bool:
        """Whether a token is a marker such as end-of-sequence, without text of its own."""

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        """Token ids of ``text``."""

    def decode(self, token_ids: Sequence[int], /) -> str:
        """The text of ``token_ids``."""


class OutputStream(Protocol):
    """Outputs of one submission: lists of what is new, until every sequence of it has ended."""

    def __aiter__(self) -> OutputStream: ...

    async def __anext__(self) -> list[RequestOutput]: ...

    def abort(self) -> None:
        """End what still runs. Safe to call twice, and after the end."""


class ServedEngine(Protocol):
    """An engine on an event loop. Until ``state`` is "ready", ``config`` and ``tokenizer`` raise EngineUnavailable."""

    @property
    def state(self) -> str:
        """ "loading", "ready", "draining" or "dead"."""

    @property
    def dead_reason(self) -> str | None: ...

    @property
    def is_idle(self) -> bool:
        """Whether no request is in it and no text is being read."""

    @property
    def config(self) -> ResolvedConfig: ...

    @property
    def tokenizer(self) -> TokenTable: ...

    @property
    def text_workers(self) -> TextWorkers:
        """Does what takes long with what clients send."""

    @property
    def has_chat_template(self) -> bool: ...

    async def start(self) -> None:
        """Load; raises what loading raised."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for running ones, at most ``timeout_s``."""

    async def stop(self) -> None:
        """End what still runs and release the model."""

    async def encode(
        self, texts: Sequence[str], *, parse_special: bool = True, add_bos: bool | None = None, client: str = ""
    ) -> list[list[int]]:
        """Ids of each text, for this client's share of the work. Raises InvalidRequest, PromptTooLong or QueueFull."""

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, client: str = "", **template_kwargs: Any
    ) -> list[int]:
        """Ids of a rendered chat. Raises as ``encode``."""

    def submit(self, submission: Submission, /) -> OutputStream:
        """Queue a request. Raises InvalidRequest, PromptTooLong, QueueFull or EngineUnavailable before that."""

    async def stats(self) -> StatsSnapshot:
        """Latencies, throughput, load and cache use at this moment."""

    async def prefix_cache(self) -> dict[str, Any]:
        """The prefix tree in figures."""

    async def lifecycle(self, request_id: str, /) -> LifecycleSnapshot | None:
        """One live or recently ended request; None if it is not known (any more)."""

    async def steps(self, *, since: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Steps with an id above ``since``, oldest first, the newest ``limit`` of them."""
