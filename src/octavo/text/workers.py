"""Work on text that clients send, off the event loop: in pieces, fair between clients, given up when its client leaves.

A job is a generator that yields between pieces of work. Two threads take turns: the next client in the ring, its next
job, one piece, then that job goes to the back of its client's queue and the client to the back of the ring. So a short
text waits for one piece of each client and of each job before it, however long those are, and nobody waits for work
whose client has left.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import OrderedDict, deque
from typing import Any, TypeVar

from octavo.core.errors import EngineUnavailable, QueueFull
from octavo.core.limits import (
    MAX_TEXT_JOB_BYTES,
    MAX_TEXT_JOB_BYTES_PER_CLIENT,
    MAX_TEXT_JOBS,
    MAX_TEXT_JOBS_PER_CLIENT,
)
from octavo.core.steps import Steps

T = TypeVar("T")

NUM_TEXT_WORKERS = 2
#: CPU time until a job's turn ends, at its next yield; what lies between two yields should take less.
PIECE_S = 0.002


class _Job:
    __slots__ = ("client", "future", "gone", "loop", "size", "steps", "waits")

    def __init__(self, steps: Steps[Any], client: str, size: int) -> None:
        self.steps = steps
        self.client = client
        self.size = size  # bytes that it keeps in memory
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[Any] = self.loop.create_future()
        self.gone = False  # nobody waits for the result any more
        self.waits = False  # is in a queue, not under a worker's hands


class TextWorkers:
    """The threads and what waits for them. ``run`` from an event loop; ``stop`` ends it all.

    num_threads: 0 for a caller that works by hand, with ``run_piece``
    piece_s:     CPU time of one turn
    """

    def __init__(self, num_threads: int = NUM_TEXT_WORKERS, *, piece_s: float = PIECE_S) -> None:
        self._num_threads = num_threads
        self._piece_s = piece_s
        self._threads: list[threading.Thread] = []
        self._changed = threading.Condition()  # guards all below
        self._ring: OrderedDict[str, deque[_Job]] = OrderedDict()  # client -> its jobs; the first of each is next
        self._admitted: dict[str, list[_Job]] = {}  # client -> its jobs, waiting or not
        self.num_jobs = 0  # waiting or not
        self._num_bytes = 0
        self._stopped = False

    async def run(self, steps: Steps[T], *, client: str = "", size: int = 0) -> T:
        """The result of ``steps``, or what it raised. Cancelled, the job ends at its next piece, or never begins.

        client: whose share it takes; size: bytes that the job keeps in memory.
        Raises QueueFull past the limits of ``core.limits``, EngineUnavailable after ``stop``.
        """
        job = _Job(steps, client, size)
        try:
            self._admit(job)
        except BaseException:
            steps.close()
            raise
        try:
            result: T = await job.future
        finally:
            self._leave(job)
        return result

    def run_piece(self) -> bool:
        """Give the job whose turn it is one turn. False if none waits."""
        with self._changed:
            if not self._ring:
                return False
            client, queue = next(iter(self._ring.items()))
            job = queue.popleft()
            job.waits = False
            del self._ring[client]
            if queue:
                self._ring[client] = queue
        self._work(job)
        return True

    def stop(self) -> None:
        """Refuse what comes, fail what waits, and wait for the pieces under way. Safe to call twice."""
        with self._changed:
            self._stopped = True
            jobs = [job for jobs in self._admitted.values() for job in jobs]
            self._ring.clear()
            self._changed.notify_all()
        for job in jobs:
            _settle(job, None, EngineUnavailable("the server has stopped; retry on another"))
        for thread in self._threads:
            thread.join()

    def _admit(self, job: _Job) -> None:
        with self._changed:
            if self._stopped:
                raise EngineUnavailable("the server has stopped; retry on another")
            own = self._admitted.get(job.client, [])
            own_bytes = sum(other.size for other in own)
            for what, used, limit in (
                ("texts of this client are", len(own), MAX_TEXT_JOBS_PER_CLIENT - 1),
                ("texts are", self.num_jobs, MAX_TEXT_JOBS - 1),
                ("bytes of text of this client are", own_bytes, MAX_TEXT_JOB_BYTES_PER_CLIENT - job.size),
                ("bytes of text are", self._num_bytes, MAX_TEXT_JOB_BYTES - job.size),
            ):
                if used > limit and used:
                    raise QueueFull(f"{used} {what} being read, and the limit is reached; retry later")
            self._admitted.setdefault(job.client, []).append(job)
            self.num_jobs += 1
            self._num_bytes += job.size
            self._queue(job)
            if len(self._threads) < self._num_threads:
                thread = threading.Thread(target=self._run, name="octavo-text", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _queue(self, job: _Job) -> None:
        """To the back of its client's queue. The lock is held."""
        job.waits = True
        self._ring.setdefault(job.client, deque()).append(job)
        self._changed.notify()

    def _leave(self, job: _Job) -> None:
        """Whoever awaited the job has its result, or has left."""
        with self._changed:
            job.gone = True
            own = self._admitted[job.client]
            own.remove(job)
            if not own:
                del self._admitted[job.client]
            self.num_jobs -= 1
            self._num_bytes -= job.size
            if not job.waits:
                return  # has ended, or a worker will see that it is gone
            job.waits = False
            queue = self._ring.get(job.client)
            if queue is not None:
                queue.remove(job)
                if not queue:
                    del self._ring[job.client]
        job.steps.close()

    def _work(self, job: _Job) -> None:
        until = time.thread_time() + self._piece_s
        try:
            while not job.gone:
                next(job.steps)
                if time.thread_time() >= until:
                    break
        except StopIteration as end:
            _settle(job, end.value, None)
            return
        except BaseException as error:  # noqa: BLE001 - handed to the caller
            _settle(job, None, error)
            return
        with self._changed:
            if not job.gone and not self._stopped:
                self._queue(job)
                return
        job.steps.close()

    def _run(self) -> None:
        while not self._stopped:
            if not self.run_piece():
                with self._changed:
                    if not self._ring and not self._stopped:
                        self._changed.wait()


def _settle(job: _Job, result: Any, error: BaseException | None) -> None:
    def settle() -> None:
        if job.future.done():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits
        job.loop.call_soon_threadsafe(settle)
