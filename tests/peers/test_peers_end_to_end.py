"""A run from the command line to the table, with servers that have no model; and who is awake meanwhile."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import run as script
from contenders import Command, Contender, Files
from fleet import Fleet, StartFailed
from in_process import Bench, run_bench
from results import load
from workloads import WORKLOADS, Workload

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="states of processes are read from /proc"),
]
FAKE = Path(__file__).with_name("fake_server.py")
OCTAVO, LLAMA, VLLM = Contender("octavo", "Q4_0"), Contender("llama.cpp", "Q4_0"), Contender("vllm", "bf16")
ONE = WORKLOADS[0]


def fake_command(
    contender: Contender, port: int, *, delay_s: float = 0.001, fail_every: int = 0, **fields: Any
) -> Command:
    argv = (sys.executable, str(FAKE), str(port), str(delay_s), str(fail_every))
    return Command(argv=argv, ready_path="/v1/models", memory_bytes=1 << 20, **fields)


def state_of(pid: int) -> str | None:
    """R, S, T (stopped), ...; None if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0]
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """A signal is taken when the process is next scheduled, which on a busy machine may be in a while."""
    for _ in range(3000):
        if state_of(pid) == "T":
            return True
        time.sleep(0.01)
    return False


def fleet(tmp_path: Path, free_bytes: Callable[[], int] = lambda: 1 << 40) -> Fleet:
    def make(contender: Contender, workload: Workload, port: int) -> Command:
        return fake_command(contender, port, starts_quickly=contender == LLAMA)

    return Fleet(make=make, logs=tmp_path, free_bytes=free_bytes)


def test_only_the_server_whose_turn_it_is_is_awake_and_none_is_left(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        with servers.awake(OCTAVO, ONE) as octavo:
            assert state_of(octavo.process.pid) in ("R", "S")
            assert octavo.memory_bytes()
        with servers.awake(VLLM, ONE) as vllm:
            assert is_stopped(octavo.process.pid)
            assert state_of(vllm.process.pid) in ("R", "S")
        with servers.awake(OCTAVO, ONE) as again:
            assert again is octavo
            assert is_stopped(vllm.process.pid)
        assert [start["contender"] for start in servers.starts] == [OCTAVO.name, VLLM.name]
    assert state_of(octavo.process.pid) is None
    assert state_of(vllm.process.pid) is None


def test_a_server_that_starts_quickly_is_started_for_each_workload(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        with servers.awake(LLAMA, ONE) as first:
            pass
        assert state_of(first.process.pid) is None
        with servers.awake(LLAMA, ONE) as second:
            assert second.process.pid != first.process.pid


def test_a_server_that_died_in_its_sleep_is_started_again(tmp_path: Path) -> None:
    with fleet(tmp_path) as servers:
        with servers.awake(OCTAVO, ONE) as first:
            pass
        first.process.kill()
        first.process.wait()
        with servers.awake(OCTAVO, ONE) as second:
            assert second.process.pid != first.process.pid
            assert state_of(second.process.pid) in ("R", "S")


def test_where_memory_is_short_the_server_used_longest_ago_makes_room(tmp_path: Path) -> None:
    frees = iter([0, 1 << 40, 1 << 40, 1 << 40, 0, 1 << 40])  # each start asks until there is room
    with fleet(tmp_path, lambda: next(frees)) as servers:
        with servers.awake(OCTAVO, ONE) as octavo:  # nobody to end: it is not even asked
            pass
        with servers.awake(VLLM, ONE) as vllm:
            pass
        assert state_of(octavo.process.pid) is None
        assert is_stopped(vllm.process.pid)


def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    def make(contender: Contender, workload: Workload, port: int) -> Command:
        argv = (sys.executable, "-c", "raise SystemExit('no AVX-512 here')")
        return Command(argv=argv, memory_bytes=0)

    with (
        Fleet(make=make, logs=tmp_path) as servers,
        pytest.raises(StartFailed, match=r"(?s)vllm bf16: it ended with status 1 .*no AVX-512 here"),
        servers.awake(VLLM, ONE),
    ):
        raise AssertionError("it never became ready")


def test_a_run_from_the_command_line_to_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(100))

    def command(
        contender: Contender, files: Files, root: Path, workload: Workload, *, port: int, threads: int
    ) -> Command:
        if contender.peer == "vllm":
            return Command(argv=(sys.executable, "-c", "raise SystemExit('no AVX-512 here')"), memory_bytes=0)
        if contender.peer == "llama.cpp":
            return fake_command(contender, port, delay_s=0.02, fail_every=5, starts_quickly=True)
        return fake_command(contender, port)

    every = Files(gguf=dict.fromkeys(("Q4_1", "Q4_0", "bf16"), model), folder=tmp_path)  # type: ignore[arg-type]
    monkeypatch.setattr(script, "installed", lambda root, peers: {"llama.cpp": "b1", "vllm": "0"})
    monkeypatch.setattr(script, "prepare", lambda model, contenders, root: (every, {}))
    monkeypatch.setattr(script, "command_for", command)
    stored = tmp_path / "out" / "run.json"
    arguments = ["--root", str(tmp_path), "--workloads", "8x128,amid", "--formats", "Q4_0,bf16", "--max-rounds", "2"]
    assert script.main([*arguments, "--budget-minutes", "5", "--json", str(stored)]) == 0

    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    assert "vllm bf16: 1 x" in out
    results = load(stored)
    assert {case.round for case in results.cases} == {1, 2}
    done = results.figures(LLAMA, "8x128/64", "output_tokens_per_s")
    assert set(done) == {1, 2}
    (pair,) = [pair for pair in results.pairs if pair.theirs == LLAMA and pair.group == "same weights"]
    ratio = results.ratio(pair, "8x128/64", WORKLOADS[1].figures[0])
    assert ratio is not None
    assert ratio.value > 1
    assert ratio.rounds == 2
    assert results.failures(LLAMA, "8x128/64") == (2 * 1, 2 * 8)  # the fifth of eight, in each round
    assert results.failures(OCTAVO, "8x128/64") == (0, 2 * 8)
    assert results.failures(VLLM, "8x128/64")[0] == 1  # given up after the first start
    asked = [case for case in results.cases if case.contender == LLAMA.name and case.workload == "8 chats amid 4000"]
    groups = [request["group"] for request in asked[0].requests]
    assert groups.count("long") == 2
    assert groups.count("chat") >= 8
    assert all("itl_ms" in request for request in asked[0].requests)
    seeds = {case.contender: case.requests[0]["prompt_tokens"] for case in results.cases if case.requests}
    assert set(seeds.values()) == {128}


def test_the_programs_without_a_server_are_run_as_they_want_to_be(tmp_path: Path) -> None:
    program = tmp_path / "llama.cpp" / "build" / "bin" / "llama-batched-bench"
    program.parent.mkdir(parents=True)
    program.write_text(
        f"#!{sys.executable}\nimport sys\nwords = dict(zip(sys.argv[1::1], sys.argv[2::1]))\n"
        "for pp in words['-npp'].split(','):\n    for pl in words['-npl'].split(','):\n"
        "        assert int(words['--ctx-size']) >= int(pl) * (int(pp) + int(words['-ntg']))\n"
        '        print(\'I {"pp": %s, "pl": %s, "speed_pp": %s, "speed_tg": 1%s}\' % (pp, pl, pp, pl))\n'
    )
    program.chmod(0o755)
    files = Files(gguf={"Q4_0": tmp_path / "model.gguf"}, folder=None)
    found = run_bench(LLAMA, Bench(), files, tmp_path, 2, 1)
    assert found.messages == {}
    assert found.figures == {"decode_1": 11, "decode_8": 18, "decode_32": 132, "prefill_512": 512, "prefill_4096": 4096}
    program.write_text(f"#!{sys.executable}\nraise SystemExit('unable to load model')\n")
    failed = run_bench(LLAMA, Bench(), files, tmp_path, 2, 1)
    assert failed.figures == {}
    assert "unable to load model" in next(iter(failed.messages))
