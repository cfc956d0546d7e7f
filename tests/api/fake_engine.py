"""An engine without a model, with the real one's interface: tokens are bytes, the answer is known beforehand."""

from __future__ import annotations

import asyncio
import codecs
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from octavo.core.config import EngineConfig, ResolvedConfig
from octavo.core.errors import EngineUnavailable, InvalidRequest, QueueFull
from octavo.core.output import RequestOutput, Usage
from octavo.core.plan import SampledToken
from octavo.core.request import Request, Submission
from octavo.engine.request_stream import RequestStream, Unread
from octavo.engine.requests import make_requests
from octavo.text.chat_template import content_texts
from octavo.text.workers import TextWorkers

EOS, START = 256, 257
CONTROL = {EOS: b"<|eos|>", START: b"<|start|>"}
VOCAB_SIZE = 260  # two ids beyond the tokenizer's, as in models with a padded embedding


class ByteTokenizer:
    """Token id = byte; 256 and 257 are control tokens."""

    vocab_size = 258
    adds_space_prefix = False
    eos_token_ids = frozenset({EOS})

    def token_bytes(self, token_id: int) -> bytes:
        return CONTROL.get(token_id, bytes([token_id]) if token_id < 256 else b"")

    def is_control(self, token_id: int) -> bool:
        return token_id in CONTROL

    def encode(self, text: str, *, parse_special: bool = False, add_bos: bool | None = None) -> list[int]:
        if not parse_special:
            return list(text.encode())
        pieces = re.split(b"(<\\|eos\\|>|<\\|start\\|>)", text.encode())
        ids_by_name = {name: token_id for token_id, name in CONTROL.items()}
        return [i for piece in pieces for i in ([ids_by_name[piece]] if piece in ids_by_name else piece)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", "replace")


class FakeStream(RequestStream):
    """Outputs of one submission: the real stream around a task that answers."""

    def __init__(self, engine: FakeEngine, request_id: str, requests: Sequence[Request]) -> None:
        super().__init__([request.request_id for request in requests], abort=self._abort_one, unread=engine.unread)
        self._engine = engine
        self.request_id = request_id
        self.task = asyncio.create_task(self._run(requests))

    def _abort_one(self, request_id: str) -> None:
        self._engine.aborted.append(request_id)
        self.task.cancel()
        self._engine.streams.discard(self)

    def fail(self, error: BaseException) -> None:
        super().fail(error)
        self.task.cancel()

    async def _run(self, requests: Sequence[Request]) -> None:
        live = [_Sequence(request, self._engine) for request in requests]
        while live:
            await asyncio.sleep(self._engine.step_s)
            self._engine.num_steps += 1
            for sequence in list(live):
                output = sequence.step()
                if output.finish_reason is not None:
                    live.remove(sequence)
                if output.text or output.token_ids or output.finish_reason:
                    self.deliver(output)
        self._engine.streams.discard(self)


class _Sequence:
    """One choice: draws the known answer's bytes one by one."""

    def __init__(self, request: Request, engine: FakeEngine) -> None:
        self.request, self.engine = request, engine
        answer = engine.answer(request)
        ends = EOS if not request.sampling.ignore_eos else 0x2E
        self.planned = [*answer.encode(), *([ends] if not request.sampling.ignore_eos else [ends] * request.max_tokens)]
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.text, self.sent, self.num_tokens = "", 0, 0

    def _logprobs(self, token: int, num_top: int) -> SampledToken:
        others = [(token + step) % VOCAB_SIZE for step in range(num_top)]
        return SampledToken(
            token_id=token, logprob=-0.5, top=tuple((other, -0.5 - 0.25 * rank) for rank, other in enumerate(others))
        )

    def step(self) -> RequestOutput:
        sampling, first = self.request.sampling, self.num_tokens == 0
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and first:
            prompt_logprobs = tuple(
                self._logprobs(token, sampling.prompt_logprobs) for token in self.request.prompt_token_ids[1:]
            )
        if self.request.max_tokens == 0:
            return self._output("", (), "length", None, prompt_logprobs)
        if self.num_tokens == self.engine.fail_after:
            return self._output("", (), "error", "logits were not finite", prompt_logprobs)
        token = self.planned[self.num_tokens]
        self.num_tokens += 1
        finish, stop = None, None
        if token in self.request.stop_token_ids:
            finish, stop = "stop", None if token == EOS else token
        else:
            self.text += self.decoder.decode(bytes([token]))
            for string in sampling.stop:
                if (at := self.text.find(string)) >= 0:
                    self.text = self.text[: at + len(string) * sampling.include_stop_str_in_output]
                    finish, stop = "stop", string
        if finish is None and self.num_tokens == self.request.max_tokens:
            finish = "length"
            self.text += self.decoder.decode(b"", final=True)
        held = 0 if finish else max(map(len, sampling.stop), default=1) - 1
        news = self.text[self.sent : len(self.text) - held]
        self.sent += len(news)
        return self._output(news, (token,), finish, stop, prompt_logprobs)

    def _output(
        self,
        text: str,
        tokens: tuple[int, ...],
        finish: Any,
        stop: int | str | None,
        prompt_logprobs: tuple[SampledToken, ...] | None,
    ) -> RequestOutput:
        request, wanted = self.request, self.request.sampling.logprobs
        return RequestOutput(
            request_id=request.request_id,
            choice_index=request.choice_index,
            text=text,
            token_ids=tokens,
            logprobs=None if wanted is None else tuple(self._logprobs(token, wanted) for token in tokens),
            prompt_logprobs=prompt_logprobs,
            finish_reason=finish,
            stop_reason=stop,
            usage=None
            if finish is None
            else Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=self.num_tokens,
                cached_tokens=self.engine.cached_tokens,
            ),
        )


class FakeEngine:
    """Knobs are plain attributes; ``reset`` restores them."""

    def __init__(self, *, max_model_len: int = 512, **wish: Any) -> None:
        self.state, self.dead_reason = "loading", None
        self.load_error: Exception | None = None
        self.holds_loading = False
        self._config = ResolvedConfig(
            wish=EngineConfig(**wish),
            model_path="/nowhere/fake.gguf",
            model_name="fake",
            backend="fake",
            device="cpu",
            dtype="float32",
            kv_dtype="float32",
            threads=1,
            max_model_len=max_model_len,
            max_num_seqs=64,
            block_size=16,
            cache_groups=(("full", 64),),
            kv_cache_bytes=1,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=frozenset({EOS}),
            system_fingerprint="fp_fake",
        )
        self._tokenizer = ByteTokenizer()
        self.text_workers = TextWorkers()
        self.has_chat_template = True
        self.reset()

    def reset(self) -> None:
        self.answer: Callable[[Request], str] = lambda request: f"Grüße, 世界 {request.choice_index}"
        self.step_s = 0.0
        self.fail_after: int | None = None
        self.encode_s = 0.0
        self.encoding_for: list[str] = []  # clients, one per job
        self.num_left_encoding = 0  # jobs that were cancelled
        self.queue_full = False
        self.cached_tokens = 0
        self.num_steps = 0
        self.requests: list[Request] = []
        self.chats: list[tuple[Any, dict[str, Any]]] = []
        self.aborted: list[str] = []  # sequences, of n > 1 each
        self.streams: set[FakeStream] = set()
        self.unread = Unread()

    def _check_loaded(self) -> None:
        if self.state == "loading":
            raise EngineUnavailable("the model is still loading")

    @property
    def config(self) -> ResolvedConfig:
        self._check_loaded()
        return self._config

    @property
    def tokenizer(self) -> ByteTokenizer:
        self._check_loaded()
        return self._tokenizer

    @property
    def is_idle(self) -> bool:
        return not self.streams and not self.text_workers.num_jobs

    async def start(self) -> None:
        while self.holds_loading:  # noqa: ASYNC110 - another thread lets go
            await asyncio.sleep(0.002)
        if self.load_error is not None:
            self.state = "dead"
            raise self.load_error
        self.state = "ready"

    async def drain(self, timeout_s: float) -> None:
        self.state = "draining"
        tasks = [stream.task for stream in self.streams]
        if tasks:
            await asyncio.wait(tasks, timeout=timeout_s)

    async def stop(self) -> None:
        self.die("stopped")
        await asyncio.to_thread(self.text_workers.stop)

    def die(self, reason: str) -> None:
        self.state, self.dead_reason = "dead", reason
        for stream in tuple(self.streams):
            stream.fail(EngineUnavailable(f"the engine is dead: {reason}"))
        self.streams.clear()

    async def encode(
        self, texts: Sequence[str], *, parse_special: bool = True, add_bos: bool | None = None, client: str = ""
    ) -> list[list[int]]:
        await self._encoding(client)
        return [self.tokenizer.encode(text, parse_special=parse_special, add_bos=add_bos) for text in texts]

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, client: str = "", **template_kwargs: Any
    ) -> list[int]:
        await self._encoding(client)
        if not self.has_chat_template:
            raise InvalidRequest("fake cannot chat: its chat template is missing", param="messages")
        self.chats.append((messages, template_kwargs))
        texts = ("\n".join(content_texts(message["content"])) for message in messages)
        return [START, *"".join(f"{m['role']}:{text}\n" for m, text in zip(messages, texts, strict=True)).encode()]

    async def _encoding(self, client: str) -> None:
        self.encoding_for.append(client)
        try:
            await asyncio.sleep(self.encode_s)
        except asyncio.CancelledError:
            self.num_left_encoding += 1
            raise

    def submit(self, submission: Submission) -> FakeStream:
        if self.state != "ready":
            raise EngineUnavailable(f"the engine is {self.state}")
        if self.queue_full:
            raise QueueFull("1024 requests wait; the limit is 1024", retry_after_s=2.5)
        requests = make_requests(self.config, submission, arrival_s=time.monotonic())
        self.requests += requests
        stream = FakeStream(self, submission.request_id, requests)
        self.streams.add(stream)
        return stream
