"""Which cases a round runs: what fits, what has its partner, who goes first."""

from __future__ import annotations

from pathlib import Path

from contenders import MAX_MODEL_LEN, Contender, Files, command_for, contenders_of, pairs_of
from in_process import Bench
from plan import Budget, Case, cases_of, guess_s
from workloads import WORKLOADS, Workload

OCTAVO, LLAMA, VLLM = Contender("octavo", "Q4_0"), Contender("llama.cpp", "Q4_0"), Contender("vllm", "bf16")
OCTAVO_BF16 = Contender("octavo", "bf16")
ONE, LONG = WORKLOADS[0], WORKLOADS[4]
PAIRS = pairs_of(["llama.cpp", "vllm"], ["Q4_0", "bf16"])
FAR = 1e9


def budget(seconds: dict[Contender, float]) -> Budget:
    cases = cases_of([OCTAVO, LLAMA, OCTAVO_BF16, VLLM], [ONE, LONG])
    return Budget(cases=cases, pairs=PAIRS, seconds_of={case: seconds[case.contender] for case in cases})


SECONDS = {OCTAVO: 1.0, OCTAVO_BF16: 1.0, LLAMA: 10.0, VLLM: 100.0}


def test_everything_runs_where_the_budget_is_enough_and_every_other_round_turns_contenders_round() -> None:
    made = budget(SECONDS)
    first, second = made.next_round(FAR, 9), made.next_round(FAR, 9)
    assert [case.contender for case in first] == [OCTAVO, LLAMA, OCTAVO_BF16, VLLM] * 2
    assert [case.contender for case in second] == [VLLM, OCTAVO_BF16, LLAMA, OCTAVO] * 2
    assert [case.task.name for case in first] == [case.task.name for case in second] == [ONE.name] * 4 + [LONG.name] * 4


def test_a_round_that_does_not_fit_leaves_out_what_is_dear_and_runs_it_first_later() -> None:
    made = budget(SECONDS)
    first = made.next_round(3 * 130, 9)
    assert sum(made.seconds_of[case] for case in first) <= 130
    assert sum(case.contender == VLLM for case in first) == 1
    (left_out,) = {case for case in made.cases if case.contender == VLLM} - set(first)
    assert left_out in made.next_round(2 * 102, 9)


def test_dear_cases_do_not_leave_the_others_with_one_round() -> None:
    """All of a first round would cost 224 of 270 seconds."""
    made = budget(SECONDS)
    left_s, rounds = 270.0, 0
    while chosen := made.next_round(left_s, 9):
        rounds += 1
        left_s -= sum(made.seconds_of[case] for case in chosen)
    assert left_s >= 0
    assert all(made.runs_of[Case(one, task)] >= 3 for one in (OCTAVO, LLAMA) for task in (ONE, LONG))
    assert sum(made.runs_of.get(Case(VLLM, task), 0) for task in (ONE, LONG)) >= 1


def test_a_peer_never_runs_without_the_octavo_that_it_is_compared_with() -> None:
    made = budget(SECONDS)
    for left_s in (5, 36, 90, 105, 115, 250, 500):
        chosen = set(made.next_round(left_s, 99))
        for case in chosen:
            if case.contender == VLLM:
                assert {Case(OCTAVO_BF16, case.task), Case(OCTAVO, case.task)} <= chosen


def test_octavo_alone_is_no_round() -> None:
    assert budget(SECONDS).next_round(10.9, 9) == []
    assert budget(SECONDS).next_round(0, 9) == []
    assert len(budget(SECONDS).next_round(11, 9)) == 2


def test_rounds_end_at_their_number_and_a_dropped_contender_does_not_come_back() -> None:
    made = budget(SECONDS)
    assert made.next_round(FAR, 2)
    made.drop(VLLM)
    assert {case.contender for case in made.next_round(FAR, 2)} == {OCTAVO, LLAMA}
    assert made.next_round(FAR, 2) == []


def test_only_those_that_have_a_program_for_it_run_without_a_server() -> None:
    assert {case.contender for case in cases_of([OCTAVO, LLAMA, VLLM], [Bench()])} == {OCTAVO, LLAMA}


def test_guesses_grow_with_the_model_and_with_the_work() -> None:
    for contender in (OCTAVO, LLAMA, VLLM):
        small = [guess_s(Case(contender, task), 1.0) for task in (*WORKLOADS, Bench())]
        large = [guess_s(Case(contender, task), 8.0) for task in (*WORKLOADS, Bench())]
        assert all(0 < one < other for one, other in zip(small, large, strict=True))
    assert guess_s(Case(OCTAVO, ONE), 1.0) < guess_s(Case(OCTAVO, LONG), 1.0)


def test_pairs_are_on_the_same_weights_and_then_each_in_its_fastest_format() -> None:
    every = pairs_of(["llama.cpp", "openvino", "vllm"], ["Q4_1", "Q4_0", "bf16"])
    same = [pair for pair in every if pair.group == "same weights"]
    assert all(pair.ours.format == pair.theirs.format for pair in same)
    fastest = {pair.label: (pair.ours.format, pair.theirs.format) for pair in every if pair.group == "fastest formats"}
    assert fastest == {"llama.cpp": ("Q4_0", "Q4_0"), "openvino": ("Q4_0", "Q4_1"), "vllm": ("Q4_0", "bf16")}
    assert len(contenders_of(every)) == 3 + 4
    assert pairs_of(["vllm"], ["Q4_0"]) == []


def words_of(contender: Contender, workload: Workload, tmp_path: Path) -> list[str]:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(10))
    files = Files(gguf={"Q4_0": model, "bf16": model}, folder=tmp_path)
    return list(command_for(contender, files, tmp_path, workload, port=4321, threads=2).argv)


def test_every_server_listens_on_the_loopback_alone_on_the_port_that_it_is_given(tmp_path: Path) -> None:
    for contender in (OCTAVO, LLAMA, VLLM, Contender("transformers", "bf16")):
        words = words_of(contender, ONE, tmp_path)
        assert words[words.index("--host") + 1] == "127.0.0.1"
        assert words[words.index("--port") + 1] == "4321"


def test_llama_server_has_a_slot_with_room_for_every_stream_of_a_workload(tmp_path: Path) -> None:
    for workload in WORKLOADS:
        words = words_of(LLAMA, workload, tmp_path)
        slots, size = (int(words[words.index(flag) + 1]) for flag in ("--parallel", "--ctx-size"))
        assert slots == workload.concurrency + workload.long_prompts
        assert size // slots >= max(workload.longest, 821)  # and for the client's probe, spelt in bytes


def test_the_longest_workload_fits_what_vllm_is_told(tmp_path: Path) -> None:
    assert max(workload.longest for workload in WORKLOADS) <= MAX_MODEL_LEN
