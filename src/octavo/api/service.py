"""What the routes share: the engine, the server's settings, the words of the vocabulary."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request

from octavo.api.auth import Client, Keyring, prefix_salt
from octavo.api.engine_protocol import OutputStream, ServedEngine
from octavo.api.inspections import SharedAnswers
from octavo.api.logprobs import TokenTexts
from octavo.api.middleware import is_loopback
from octavo.api.schemas import CommonFields
from octavo.api.schemas_completions import CompletionRequest
from octavo.core.config import ServerConfig
from octavo.core.errors import EngineUnavailable, InvalidRequest, ModelNotFound
from octavo.core.request import Submission
from octavo.core.sampling_params import AscendingIds, SamplingParams
from octavo.core.steps import Steps
from octavo.text.token_index import TokenIndex
from octavo.text.workers import TextWorkers

#: Sets of sequence breakers whose tokens are remembered; one with most of a large vocabulary in it takes 2 MB.
MAX_KNOWN_BREAKERS = 8


class Service:
    """One per app, in ``app.state.service``."""

    def __init__(self, engine: ServedEngine, config: ServerConfig) -> None:
        self.engine = engine
        self.config = config
        self.keyring = Keyring(config, is_loopback=is_loopback(config.host))
        self.created = int(time.time())
        self.shared_answers = SharedAnswers()
        self._token_texts: TokenTexts | None = None
        self._token_index: TokenIndex | None = None
        self._breakers: dict[frozenset[str], tuple[int, ...]] = {}  # DRY sequence breakers -> tokens that contain one

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

    @property
    def text_workers(self) -> TextWorkers:
        """Who reads large bodies and tokenises."""
        return self.engine.text_workers

    def parse_completion(self, body: Mapping[str, Any]) -> CompletionRequest:
        """The request in ``body``, whose prompts of token ids fit the context. Raises as ``CommonFields.parse``."""
        return CompletionRequest.parse(body, max_prompt_tokens=self.engine.config.max_model_len)

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
        client: Client,
    ) -> SamplingParams:
        """The request's sampling parameters, words turned into token ids. Raises InvalidRequest."""
        breakers: tuple[int, ...] = ()
        if fields.dry_multiplier > 0:
            breakers = await self._breaker_ids(fields.dry_sequence_breakers, client)
        return fields.sampling_params(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            bad_words=await self._bad_word_ids(fields.bad_words, client),
            breakers=breakers,
        )

    def submit(
        self, prompt: Sequence[int], sampling: SamplingParams, fields: CommonFields, client: Client, *, request_id: str
    ) -> OutputStream:
        """Hand one prompt to the engine. Raises what ``ServedEngine.submit`` raises."""
        share = self.engine.config.wish.share_prefix_cache
        return self.engine.submit(
            Submission(
                request_id=request_id,
                prompt_token_ids=prompt,
                sampling=sampling,
                n=fields.n,
                priority=self._priority(fields.priority, client),
                client=client.id,
                cache_salt=prefix_salt(client, fields.cache_salt, share=share),
            )
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

    async def _bad_word_ids(self, words: Sequence[str], client: Client) -> tuple[tuple[int, ...], ...]:
        """Each word's token ids at the start of a line and after a space, which are usually different tokens."""
        texts = dict.fromkeys(
            text for word in words for text in (word, " " + word.lstrip())
        )  # a set that keeps its order
        if not texts:
            return ()
        found = await self.engine.encode(list(texts), parse_special=False, add_bos=False, client=client.id)
        return tuple(dict.fromkeys(tuple(ids) for ids in found if ids))

    async def _breaker_ids(self, breakers: Sequence[str], client: Client) -> tuple[int, ...]:
        """Every token that contains one of ``breakers``. Raises InvalidRequest for one that no token contains."""
        wanted = frozenset(breakers)
        known = self._breakers.get(wanted)
        if known is None:
            known = await self.text_workers.run(self._find_breakers(wanted), client=client.id)
            if len(self._breakers) >= MAX_KNOWN_BREAKERS:
                self._breakers.clear()
            self._breakers[wanted] = known
        return known

    def _find_breakers(self, breakers: frozenset[str]) -> Steps[tuple[int, ...]]:
        if self._token_index is None:
            self._token_index = yield from TokenIndex.build(self.engine.tokenizer)
        index = self._token_index
        found = np.zeros(len(index.starts), bool)
        for breaker in sorted(breakers):
            tokens = index.containing(breaker.encode())
            if not len(tokens):
                raise InvalidRequest(
                    f"dry_sequence_breakers has {breaker!r}, which no single token of the vocabulary contains",
                    param="dry_sequence_breakers",
                )
            found[tokens] = True
            yield
        ids: list[int] = []
        for part in np.array_split(np.flatnonzero(found), 1 + len(found) // (1 << 14)):
            ids += part.tolist()
            yield
        return AscendingIds(ids)


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
