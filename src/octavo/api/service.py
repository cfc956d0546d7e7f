"""What the routes share: the engine, the server's settings, the words of the vocabulary."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from starlette.requests import Request

from octavo.api.auth import Client, Keyring, prefix_salt
from octavo.api.engine_protocol import OutputStream, ServedEngine, TokenTable
from octavo.api.inspections import SharedAnswers
from octavo.api.logprobs import TokenTexts
from octavo.api.middleware import is_loopback
from octavo.api.schemas import CommonFields
from octavo.core.config import ServerConfig
from octavo.core.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from octavo.core.sampling_params import SamplingParams


class Service:
    """One per app, in ``app.state.service``."""

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.keyring = Keyring(config, is_loopback=is_loopback(config.host))
        self.created = int(time.time())
        self.shared_answers = SharedAnswers()
        self._token_texts: TokenTexts | None = None
        self._breakers: dict[str, tuple[int, ...]] = {}  # DRY sequence breaker -> tokens that contain it

    @property
    def model_name(self) -> str:
        """The name that clients use. Raises EngineUnavailable while the model is loading."""
        return self.config.served_model_name or self.engine.config.model_name

    @property
    def token_texts(self) -> TokenTexts:
        """Tokens as they appear in logprobs."""
        if self._token_texts is None:
            self._token_texts = TokenTexts(self.engine.tokenizer)
        return self._token_texts

    def check_ready(self) -> None:
        """Raise EngineUnavailable unless new requests are taken."""
        engine = self.engine
        match engine.state:
            case "loading":
                raise EngineUnavailable("the model is still loading; try again in a moment", retry_after_s=2.0)
            case "draining":
                raise EngineUnavailable("the server is shutting down", retry_after_s=5.0)
            case "dead":
                raise EngineUnavailable(f"the engine is dead: {engine.dead_reason}", retry_after_s=30.0)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound unless ``name`` is the served model, or absent."""
        if name is not None and name != self.model_name:
            raise ModelNotFound(f"the model {name[:200]!r} does not exist; this server has {self.model_name!r}")

    async def sampling_params(
        self,
        fields: CommonFields,
        *,
        max_tokens: int | None,
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The request's sampling parameters, words turned into token ids. Raises InvalidRequest."""
        breakers: tuple[int, ...] = ()
        if fields.dry_multiplier > 0:
            breakers = await self._breaker_ids(fields.dry_sequence_breakers)
        return fields.sampling_params(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad_words=await self._bad_word_ids(fields.bad_words),
            breakers=breakers,
        )

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, fields: CommonFields, client: Client, *, request_id: str
    ) -> OutputStream:
        """Hand one prompt to the engine. Raises what ``ServedEngine.submit`` raises."""
        share = self.engine.config.wish.share_prefix_cache
        return self.engine.submit(
            prompt,
            sampling,
            n=fields.n,
            request_id=request_id,
            priority=self._priority(fields.priority, client),
            client=client.id,
            cache_salt=prefix_salt(client, fields.cache_salt, share=share),
        )

    def _priority(self, wanted: int | None, client: Client) -> int:
        """Raises InvalidRequest for more urgency than ``client`` may ask for: aging bounds waiting only by that."""
        most_urgent = self.config.most_urgent_priority
        if wanted is None:
            return max(0, most_urgent)
        if wanted < most_urgent and not client.is_admin:
            raise InvalidRequest(
                f"priority is {wanted} but must be {most_urgent} or more: lower runs first, and more urgency takes an "
                "admin key or a server started with --most-urgent-priority",
                param="priority",
            )
        return wanted

    async def _bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's token ids at the start of a line and after a space, which are usually different tokens."""
        found: dict[tuple[int, ...], None] = {}  # a set that keeps its order
        for word in words:
            for text in dict.fromkeys((word, " " + word.lstrip())):
                ids = await self.engine.encode(text, parse_special=False, add_bos=False)
                if ids:
                    found[tuple(ids)] = None
        return tuple(found)

    async def _breaker_ids(self, breakers: Sequence[str]) -> tuple[int, ...]:
        """Every token that contains one of ``breakers``. Raises InvalidRequest for one that no token contains."""
        unknown = [breaker for breaker in breakers if breaker not in self._breakers]
        if unknown:
            found = await asyncio.to_thread(_tokens_containing, self.engine.tokenizer, unknown)
            if len(self._breakers) + len(unknown) > 1024:
                self._breakers.clear()
            self._breakers |= found
        for breaker in breakers:
            if not self._breakers.get(breaker):
                raise InvalidRequest(
                    f"dry_sequence_breakers has {breaker!r}, which no single token of the vocabulary contains",
                    param="dry_sequence_breakers",
                )
        return tuple(sorted({token for breaker in breakers for token in self._breakers[breaker]}))


def _tokens_containing(tokenizer: TokenTable, texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Each text's tokens: those that contain it. One pass over the vocabulary, some 10 ms: for a worker thread."""
    vocabulary = [
        (token_id, tokenizer.token_bytes(token_id))
        for token_id in range(tokenizer.vocab_size)
        if not tokenizer.is_control(token_id)
    ]
    return {text: tuple(token for token, raw in vocabulary if text.encode() in raw) for text in texts}


def service_of(request: Request) -> Service:
    """The app's service."""
    service = request.app.state.service
    assert isinstance(service, Service)
    return service


def client_of(request: Request) -> Client:
    """Who is calling, as the key middleware found."""
    client = request.state.client
    assert isinstance(client, Client)
    return client
