"""Whose text is worked on when: counted in pieces, by a worker that works by hand."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator

import pytest

from octavo.core.errors import EngineUnavailable, InvalidRequest, PromptTooLong, QueueFull
from octavo.core.limits import (
    MAX_TEXT_JOB_BYTES,
    MAX_TEXT_JOB_BYTES_PER_CLIENT,
    MAX_TEXT_JOBS_PER_CLIENT,
)
from octavo.text.tokenizer import Tokenizer
from octavo.text.workers import TextWorkers


class Log:
    """Pieces that were done, by the name of their job; and the jobs that were ended early."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.ended: list[str] = []

    def job(self, name: str, num_pieces: int) -> Generator[None, None, str]:
        try:
            for piece in range(num_pieces):
                self.pieces.append(name)
                if piece < num_pieces - 1:
                    yield
        except GeneratorExit:
            self.ended.append(name)
            raise
        return name


def by_hand(test: Callable[[TextWorkers, Log], Awaitable[None]]) -> None:
    async def run() -> None:
        workers = TextWorkers(0, piece_s=0.0)  # a turn is one piece
        await test(workers, Log())
        assert not workers._ring
        assert not workers._admitted
        assert (workers.num_jobs, workers._num_bytes) == (0, 0)

    asyncio.run(run())


async def begin(workers: TextWorkers, steps: Generator[None, None, str], client: str = "") -> asyncio.Task[str]:
    task = asyncio.create_task(workers.run(steps, client=client))
    await asyncio.sleep(0)
    return task


async def work(workers: TextWorkers, num_pieces: int = 10**6) -> None:
    while num_pieces and workers.run_piece():
        num_pieces -= 1
    await breathe()


async def breathe() -> None:
    """Let what a worker has posted reach those who wait for it."""
    for _ in range(5):
        await asyncio.sleep(0)


def test_clients_take_turns_and_so_do_the_jobs_of_one() -> None:
    async def test(workers: TextWorkers, log: Log) -> None:
        jobs = [("a1", "a"), ("a2", "a"), ("b", "b")]
        tasks = [await begin(workers, log.job(name, 3), client) for name, client in jobs]
        await work(workers)
        assert log.pieces == ["a1", "b", "a2", "b", "a1", "b", "a2", "a1", "a2"]
        assert await asyncio.gather(*tasks) == ["a1", "a2", "b"]

    by_hand(test)


@pytest.mark.parametrize("client", ["", "other"])
def test_a_short_text_waits_for_one_piece_of_each_long_one(client: str) -> None:
    async def test(workers: TextWorkers, log: Log) -> None:
        long = [await begin(workers, log.job(f"long {i}", 1000)) for i in range(5)]
        await work(workers, 23)
        hi = await begin(workers, log.job("hi", 1), client)
        log.pieces.clear()
        await work(workers, 6)
        assert hi.done()
        assert log.pieces.index("hi") <= (5 if client == "" else 1)
        for task in long:
            task.cancel()
        await asyncio.gather(*long, return_exceptions=True)

    by_hand(test)


def test_work_ends_with_its_client_and_what_waits_is_never_begun() -> None:
    async def test(workers: TextWorkers, log: Log) -> None:
        begun, waiting = await begin(workers, log.job("begun", 1000)), await begin(workers, log.job("waiting", 1000))
        await work(workers, 1)
        begun.cancel()
        waiting.cancel()
        await asyncio.gather(begun, waiting, return_exceptions=True)
        assert not workers.run_piece()
        assert log.pieces == ["begun"]
        assert log.ended == ["begun"]

    by_hand(test)


def test_a_client_that_leaves_in_the_middle_of_a_piece_costs_no_other() -> None:
    async def test(workers: TextWorkers, log: Log) -> None:
        loop = asyncio.get_running_loop()
        inside, go_on = threading.Event(), threading.Event()

        def job() -> Generator[None, None, str]:
            inside.set()
            go_on.wait(10)
            yield
            raise AssertionError("a second piece")

        task = await begin(workers, job())
        piece = loop.run_in_executor(None, workers.run_piece)
        await asyncio.to_thread(inside.wait, 10)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        go_on.set()
        assert await piece
        assert not workers.run_piece()

    by_hand(test)


def test_errors_reach_the_caller_and_nobody_else() -> None:
    async def test(workers: TextWorkers, log: Log) -> None:
        def bad() -> Generator[None, None, str]:
            yield
            raise InvalidRequest("no")

        failing, fine = await begin(workers, bad()), await begin(workers, log.job("fine", 2))
        await work(workers)
        with pytest.raises(InvalidRequest, match="no"):
            await failing
        assert await fine == "fine"

    by_hand(test)


def test_jobs_and_bytes_that_wait_are_bounded_per_client_and_in_all() -> None:
    async def test(workers: TextWorkers, log: Log) -> None:
        async def fill(client: str, size: int) -> asyncio.Task[str]:
            task = asyncio.create_task(workers.run(log.job(client, 1), client=client, size=size))
            await asyncio.sleep(0)
            return task

        own = MAX_TEXT_JOB_BYTES_PER_CLIENT
        tasks = [await fill(f"client {i}", own) for i in range(MAX_TEXT_JOB_BYTES // own)]
        with pytest.raises(QueueFull, match="of this client"):
            await workers.run(log.job("more", 1), client="client 0", size=1)
        with pytest.raises(QueueFull, match="bytes of text are being read"):
            await workers.run(log.job("more", 1), client="new", size=1)
        await work(workers)
        await asyncio.gather(*tasks)
        tasks = [await fill("a", 0) for _ in range(MAX_TEXT_JOBS_PER_CLIENT)]
        with pytest.raises(QueueFull, match="texts of this client"):
            await workers.run(log.job("more", 1), client="a")
        tasks.append(await fill("b", 0))
        await work(workers)
        await asyncio.gather(*tasks)
        assert "more" not in log.pieces

    by_hand(test)


def test_threads_work_and_stop_ends_what_waits() -> None:
    async def test() -> None:
        workers, log = TextWorkers(), Log()
        assert await asyncio.gather(*(workers.run(log.job(str(i), 50), client=str(i % 3)) for i in range(20))) == [
            str(i) for i in range(20)
        ]
        go_on = threading.Event()

        def endless() -> Generator[None, None, str]:
            while True:
                go_on.wait(0.001)
                yield

        task = asyncio.create_task(workers.run(endless()))
        await asyncio.sleep(0.01)
        await asyncio.to_thread(workers.stop)
        with pytest.raises(EngineUnavailable):
            await task
        with pytest.raises(EngineUnavailable):
            await workers.run(log.job("late", 1))
        assert not any(thread.is_alive() for thread in workers._threads)

    asyncio.run(test())


def test_two_clients_that_hang_up_do_not_delay_a_third(small_tokenizer: Tokenizer) -> None:
    text = "hello world, said the fox. " * (1 << 18)  # 7 MB

    async def test(workers: TextWorkers, log: Log) -> None:
        def encode(text: str) -> Generator[None, None, str]:
            return (yield from small_tokenizer.encode_steps(text, max_tokens=10**9))  # type: ignore[return-value]

        rude = [await begin(workers, encode(text)) for _ in range(2)]
        await work(workers, 300)  # they are being encoded
        for task in rude:
            task.cancel()
        hi = await begin(workers, encode("hi"))
        num_pieces = 0
        while workers.run_piece():
            num_pieces += 1
        assert num_pieces <= 5  # its own
        assert await hi == small_tokenizer.encode("hi")  # type: ignore[comparison-overlap]
        await asyncio.gather(*rude, return_exceptions=True)
        assert not workers.run_piece()

        refused = await begin(workers, small_tokenizer.encode_steps(text, max_tokens=8192))  # type: ignore[arg-type]
        assert workers.run_piece()
        assert not workers.run_piece()  # 7 MB are more than 8192 of the longest token
        with pytest.raises(PromptTooLong, match="maximum context length"):
            await refused

    by_hand(test)
