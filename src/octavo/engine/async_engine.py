"""The engine on a thread of its own, for an asyncio program.

The event loop's thread submits and reads; the engine's thread steps. They meet in an inbox (loop to engine) and an
outbox (engine to loop), which the loop empties once per step, while the next step's kernels run without the GIL.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from octavo.core.config import EngineConfig, ResolvedConfig
from octavo.core.errors import EngineUnavailable, InvalidRequest, QueueFull, RequestFailed
from octavo.core.output import RequestOutput
from octavo.core.request import Request, Submission
from octavo.core.steps import Steps
from octavo.engine.engine import Engine
from octavo.engine.inspection import take_lifecycle, take_stats
from octavo.engine.load import load_engine
from octavo.engine.request_stream import RequestStream, Unread
from octavo.engine.requests import make_requests
from octavo.observability.snapshots import LifecycleSnapshot, StatsSnapshot, prefix_cache_dict
from octavo.observability.trace import StepRecord
from octavo.text.chat_template import content_texts
from octavo.text.tokenizer import Tokenizer
from octavo.text.workers import TextWorkers

logger = logging.getLogger(__name__)
T = TypeVar("T")
State = Literal["loading", "ready", "draining", "dead"]

#: CPython hands the GIL over after this long (default 5 ms). Coming back from a GIL-free kernel call waits for it while
#: the event loop runs Python, so it has to be far below a decode step.
SWITCH_INTERVAL_S = 0.0002
#: After this long without work the engine checks its own bookkeeping, once, and sleeps.
IDLE_CHECK_S = 1.0
#: So many turns of the engine thread may raise one after the other, each ending all requests, before it gives up.
MAX_FAILURES = 3
#: CPU time for the inbox before the next step: running sequences do not wait longer for those that are new.
INBOX_S = 0.001


class AsyncEngine:
    """Loads a model and serves it to one event loop. ``start`` it, ``submit`` to it, ``stop`` it."""

    def __init__(self, wish: EngineConfig, *, load: Callable[[EngineConfig], Engine] = load_engine) -> None:
        self.state: State = "loading"
        self.dead_reason: str | None = None
        self._wish = wish
        self._load = load
        self._loaded: Engine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._inbox: deque[Callable[[Engine], None]] = deque()
        self._questions: deque[Callable[[Engine], None]] = deque()  # inspections
        self._wake = threading.Event()
        self._stopping = False
        self._streams: dict[str, RequestStream] = {}  # by request_id of each sequence
        self._unread = Unread()
        self._inspections: set[asyncio.Future[Any]] = set()  # not answered yet
        self._all_ended = asyncio.Event()  # awaited by drain()
        self._outbox: deque[list[RequestOutput]] = deque()  # engine to loop
        self._notify_fds: tuple[int, int] | None = None  # pipe (read, write): a step has begun to compute
        self.text_workers = TextWorkers()

    # what it is

    @property
    def loaded(self) -> Engine:
        """The loaded parts; raises EngineUnavailable before that. Engine state itself: only inside ``inspect``."""
        if self._loaded is None:
            raise EngineUnavailable("the model is still loading; try again in a moment")
        return self._loaded

    @property
    def config(self) -> ResolvedConfig:
        return self.loaded.config

    @property
    def tokenizer(self) -> Tokenizer:
        return self.loaded.tokenizer

    @property
    def is_idle(self) -> bool:
        """Whether no request is in it and no text is being read."""
        return not self._streams and not self.text_workers.num_jobs

    @property
    def has_chat_template(self) -> bool:
        return self.loaded.chat_template is not None

    # life

    async def start(self) -> None:
        """Load the model on a worker thread, then start stepping. Raises what loading raised."""
        self._loop = asyncio.get_running_loop()
        try:
            self._loaded = await asyncio.to_thread(self._load, self._wish)
        except BaseException as error:
            self._die(f"loading failed: {error}")
            raise
        if self._stopping:
            self._loaded.close()
            return
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._listen_for_steps(self._loaded)
        self.state = "ready"
        self._thread = threading.Thread(target=self._run, args=(self._loaded,), name="octavo-engine", daemon=True)
        self._thread.start()

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests and wait for the running ones, at most ``timeout_s``."""
        if self.state == "ready":
            self.state = "draining"
        if self._streams:
            self._all_ended.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._all_ended.wait(), timeout_s)

    async def stop(self) -> None:
        """End everything that still runs and release the model. Safe to call twice."""
        self._stopping = True
        self._wake.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._thread = None
        self._empty_outbox()
        if self._notify_fds is not None and self._loop is not None:
            self._loop.remove_reader(self._notify_fds[0])
            for fd in self._notify_fds:
                os.close(fd)
            self._notify_fds = None
        self._die("stopped")
        if self._loaded is not None:
            self._loaded.close()
        await asyncio.to_thread(self.text_workers.stop)

    # requests

    async def encode(
        self, texts: Sequence[str], *, parse_special: bool = True, add_bos: bool | None = None, client: str = ""
    ) -> list[list[int]]:
        """Token ids of each text, computed off the event loop as one job; cancelled, that ends.

        client: whose share of the text workers it takes
        Raises InvalidRequest, PromptTooLong for a text that cannot fit (often before it is tokenised), QueueFull.
        """
        tokenizer, limit = self.tokenizer, self.config.max_model_len

        def steps() -> Steps[list[list[int]]]:
            found: list[list[int]] = []
            for text in texts:
                ids = yield from tokenizer.encode_steps(
                    text, parse_special=parse_special, add_bos=add_bos, max_tokens=limit
                )
                found.append(ids)
            return found

        return await self.text_workers.run(steps(), client=client, size=sum(map(len, texts)))

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, client: str = "", **template_kwargs: Any
    ) -> list[int]:
        """Token ids of a rendered chat. Raises as ``encode``, and where there is no template or it refuses."""
        template = self.loaded.require_chat_template()
        steps = template.encode_steps(messages, max_tokens=self.config.max_model_len, **template_kwargs)
        size = sum(len(text) for message in messages for text in content_texts(message.get("content")))
        return await self.text_workers.run(steps, client=client, size=size)

    def submit(self, submission: Submission) -> RequestStream:
        """Queue a request and return its stream.

        Raises before anything is queued: InvalidRequest, PromptTooLong, QueueFull, EngineUnavailable.
        """
        if self.state != "ready":
            why = f": {self.dead_reason}" if self.state == "dead" else ""
            raise EngineUnavailable(f"the engine is {self.state}{why}")
        requests = make_requests(self.config, submission, arrival_s=time.monotonic())
        # Streams beyond max_num_seqs cannot be running, so they are waiting.
        limit = self.config.max_num_seqs + self.config.wish.max_queue
        if len(self._streams) + submission.n > limit:
            raise QueueFull(f"{len(self._streams)} sequences are in the engine; the limit is {limit}; retry later")
        for request in requests:
            if request.request_id in self._streams:
                raise InvalidRequest(f"request id {request.request_id!r} is in use", param="request_id")
        request_ids = [request.request_id for request in requests]
        stream = RequestStream(request_ids, abort=self._abort, unread=self._unread)
        for request in requests:
            self._streams[request.request_id] = stream
        self._post(lambda engine: self._queue(engine, requests, stream))
        return stream

    # questions, each answered between two steps with data that does not change any more

    async def stats(self) -> StatsSnapshot:
        """Latencies, throughput, load and cache use at this moment."""
        return await self.inspect(take_stats)

    async def prefix_cache(self) -> dict[str, Any]:
        """The prefix tree in figures."""
        return await self.inspect(lambda engine: prefix_cache_dict(engine.scheduler.manager.stats()))

    async def lifecycle(self, request_id: str) -> LifecycleSnapshot | None:
        """One live or recently ended request; None if it is not known (any more)."""
        return await self.inspect(lambda engine: take_lifecycle(engine, request_id))

    async def steps(self, *, since: int = -1, limit: int | None = None) -> list[StepRecord]:
        """Steps with an id above ``since``, oldest first, the newest ``limit`` of them."""
        return await self.inspect(lambda engine: engine.tracer.steps(since, limit))

    async def inspect(self, fn: Callable[[Engine], T]) -> T:
        """Run ``fn`` on the engine thread between two steps and return what it returns.

        It should take under 1 ms. Between two steps comes one at most; the others wait.
        """
        if self.state == "dead" or self._thread is None or self._loop is None:
            raise EngineUnavailable(f"the engine is {self.state}")
        future: asyncio.Future[T] = self._loop.create_future()
        self._inspections.add(future)
        future.add_done_callback(self._inspections.discard)

        def call(engine: Engine) -> None:
            if future.done():
                return  # nobody waits for it any more
            try:
                result = fn(engine)
            except BaseException as error:  # noqa: BLE001 - handed to the caller
                self._tell(_settle, future, None, error)
            else:
                self._tell(_settle, future, result, None)

        self._questions.append(call)
        self._wake.set()
        return await future

    # the loop's side

    def _post(self, command: Callable[[Engine], None]) -> None:
        self._inbox.append(command)
        self._wake.set()

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._post(lambda engine: _discard(engine.abort(request_id)))
            self._note_if_all_ended()

    def _fail(self, stream: RequestStream, error: Exception) -> None:
        """What a stream asked for will not come."""
        stream.abort()
        stream.fail(error)

    def _fail_all(self, error: Exception) -> None:
        for stream in set(self._streams.values()):
            self._fail(stream, error)

    def _listen_for_steps(self, loaded: Engine) -> None:
        """Have each step's kernels ring when they begin, to deliver the outputs of the step before.

        Delivering is Python, and so are the plan and the batch that the engine prepares between two steps. Side by side
        they would take turns at the GIL; under the kernels, which run without it, delivering costs the engine nothing.
        """
        assert self._loop is not None
        if os.name == "nt":  # its event loop cannot wait for a pipe: the engine delivers after each step
            return
        read_fd, write_fd = os.pipe()
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        self._loop.add_reader(read_fd, self._step_has_begun, read_fd)
        self._notify_fds = read_fd, write_fd
        loaded.runner.notify_fd = write_fd

    def _step_has_begun(self, read_fd: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(read_fd, 4096)
        self._empty_outbox()

    def _empty_outbox(self) -> None:
        while self._outbox:
            self._deliver(self._outbox.popleft())

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue  # aborted meanwhile
            stream.deliver(output)
            if output.finish_reason is not None:
                self._streams.pop(output.request_id, None)
        self._note_if_all_ended()

    def _note_if_all_ended(self) -> None:
        if not self._streams:
            self._all_ended.set()

    def _die(self, reason: str) -> None:
        """Nothing runs any more: every open stream, and who waits to inspect, ends with an error."""
        self.state, self.dead_reason = "dead", self.dead_reason or reason
        streams, self._streams = set(self._streams.values()), {}
        self._all_ended.set()
        for stream in streams:
            stream.fail(self._dead())
        for future in tuple(self._inspections):
            _settle(future, None, self._dead())

    def _dead(self) -> EngineUnavailable:
        if self._stopping:
            return EngineUnavailable("the server has stopped before the end of this request; retry on another")
        return EngineUnavailable(f"the engine is dead: {self.dead_reason}")

    # the engine's side

    def _run(self, engine: Engine) -> None:
        """The engine thread. What raises ends requests; the thread only if that raises too, or if it goes on and on."""
        failures = 0  # one after the other
        try:
            while not self._stopping:
                try:
                    self._turn(engine)
                    failures = 0
                except Exception as error:
                    failures += 1
                    if failures == MAX_FAILURES:
                        raise
                    logger.exception("the engine thread goes on without the requests that it has")
                    engine.end_all()
                    self._tell(self._fail_all, RequestFailed(f"the engine failed: {type(error).__name__}: {error}"))
        except BaseException as error:
            logger.exception("the engine thread died")
            self._tell(self._die, f"{type(error).__name__}: {error}")

    def _turn(self, engine: Engine) -> None:
        """Inbox, one inspection, one step; sleeps when there is nothing to do."""
        assert self._loop is not None
        self._wake.clear()
        self._empty_inbox(engine)
        if self._questions:
            self._questions.popleft()(engine)
        if engine.has_unfinished:
            outputs = engine.step()
            late = bool(self._outbox)  # no kernels have rung meanwhile, or the loop was busy
            if outputs:
                self._outbox.append(outputs)
            ringing = self._notify_fds is not None and engine.has_unfinished
            if self._outbox and (late or not ringing):
                self._loop.call_soon_threadsafe(self._empty_outbox)
            return
        if self._outbox:  # the step that would have rung is not coming: its requests were aborted
            self._loop.call_soon_threadsafe(self._empty_outbox)
        if not self._inbox and not self._questions and not self._wake.wait(IDLE_CHECK_S):
            engine.idle()
            self._wake.wait()

    def _empty_inbox(self, engine: Engine) -> None:
        """Do what has been asked, in order, for ``INBOX_S`` at most: a thousand sequences come over several steps."""
        if not self._inbox:  # nearly always
            return
        until = time.thread_time() + INBOX_S
        while self._inbox:
            self._inbox.popleft()(engine)
            if time.thread_time() >= until:
                break

    def _queue(self, engine: Engine, requests: Sequence[Request], stream: RequestStream) -> None:
        """Hand a call over to the engine; if that raises, the call has failed."""
        try:
            engine.submit(requests)
        except Exception as error:
            logger.exception("request %s could not be queued", requests[0].request_id)
            why = f"the request could not be queued: {type(error).__name__}: {error}"
            self._tell(self._fail, stream, RequestFailed(why))

    def _tell(self, call: Callable[..., None], *args: Any) -> None:
        """Have the event loop call something, even if memory is short for a moment."""
        assert self._loop is not None
        for pause_s in (0.01, 0.1, 0.5, None):
            try:
                self._loop.call_soon_threadsafe(call, *args)
                return
            except MemoryError:
                if pause_s is None:
                    raise
                time.sleep(pause_s)
            except RuntimeError:
                logger.debug("the event loop had closed before")
                return


def _settle(future: asyncio.Future[T], result: T | None, error: BaseException | None) -> None:
    if future.done():  # its waiter has left, or the engine has died
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)  # type: ignore[arg-type]


def _discard(outputs: list[RequestOutput]) -> None:
    """An aborted request's last output has no reader."""
