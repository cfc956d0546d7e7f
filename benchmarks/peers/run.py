"""octavo beside what people would use instead: the same weights, the same load client, in turns; a table of ratios.

    python benchmarks/peers/install.py                    # once: whichever peers can be had
    python benchmarks/peers/run.py                        # what is installed, 25 minutes
    python benchmarks/peers/run.py --quick                # does everything run? a few minutes
    python benchmarks/peers/run.py --model 1.1b --peers llama.cpp,vllm --budget-minutes 40

Rounds alternate over all of them until the budget is spent; cases that do not fit are run less often, and the table
says how often. Every sample goes to a JSON file, from which the tables, the plots and docs/benchmarks.md are made:

    python benchmarks/peers/page.py                       # writes docs/benchmarks.md and its plots
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # benchmarks/, for the scripts that are shared

from cases import CaseResult, failed_case, run_workload
from contenders import Contender, Format, command_for, contenders_of, pairs_of
from fleet import Fleet, StartFailed
from in_process import Bench, run_bench
from install import DEFAULT_ROOT, installed_version, peers_of
from plan import START_S, Budget, Case, Task, cases_of, guess_s
from recipes import PEERS, Peer, recipe
from results import Results
from tables import report
from weight_files import MODELS, SLOWNESS, TITLES, prepare
from workloads import Workload, workloads_of

from octavo.cli.console import remark
from octavo.cli.host import probe_host
from octavo.cli.load.run_report import width
from octavo.cli.report import host_facts
from octavo.kernels.machine import probe_machine

RESULTS = Path(__file__).resolve().parents[1] / "results"
ALL_FORMATS: tuple[Format, ...] = ("Q4_1", "Q4_0", "bf16")


def installed(root: Path, peers: Sequence[Peer]) -> dict[Peer, str]:
    """Peers that are there, with their versions; for those that are not, why is said."""
    isa, found = probe_host().isa, dict[Peer, str]()
    for peer in peers:
        version = installed_version(recipe(peer, root, python=sys.executable, isa=isa, jobs=1))
        if version is None:
            remark(
                f"{peer} is not in {root / peer}; install it with: python benchmarks/peers/install.py --peers {peer}"
            )
        else:
            found[peer] = version
    return found


class Run:
    """One run: what it measures with, and what it has measured."""

    def __init__(self, args: argparse.Namespace, versions: dict[Peer, str]) -> None:
        self._root: Path = args.root.absolute()
        self._threads = args.threads or probe_machine().num_cores
        self._seed: int = args.seed
        self._deadline: float = time.monotonic() + 60 * args.budget_minutes
        self._max_rounds = 1 if args.quick else args.max_rounds
        pairs = pairs_of(list(versions), args.formats)
        self._files, left_out = prepare(args.model, contenders_of(pairs), self._root)
        for contender, reason in left_out.items():
            remark(f"{contender.name} is left out: {reason}")
        self.pairs = [pair for pair in pairs if pair.ours not in left_out and pair.theirs not in left_out]
        tasks: list[Task] = list(workloads_of(args.workloads, quick=args.quick))
        if args.workloads == "all":
            tasks.insert(0, Bench().quick() if args.quick else Bench())
        cases = cases_of(contenders_of(self.pairs), tasks)
        slowness = SLOWNESS[args.model]
        guesses = {case: guess_s(case, slowness) for case in cases}
        self.budget = Budget(cases=cases, pairs=self.pairs, seconds_of=guesses)
        self.results = Results(
            facts={
                "kind": "octavo beside its peers",
                "model": TITLES[args.model],
                "is_quick": args.quick,
                "budget_minutes": args.budget_minutes,
                "threads": self._threads,
                "host": host_facts(),
                "peers": versions,
                "weights_bytes": {c.name: self._files.bytes_of(c) for c in contenders_of(self.pairs)},
            },
            pairs=self.pairs,
            tasks=tasks,
        )

    def tell_plan(self) -> None:
        """What is ahead, and how long it takes, about."""
        contenders = contenders_of(self.pairs)
        round_s = sum(self.budget.seconds_of.values())
        start_s = sum(START_S[contender.peer] for contender in contenders)
        left_s = self._left_s()
        remark(f"{', '.join(contender.name for contender in contenders)}: {len(self.budget.cases)} cases a round")
        remark(
            f"a round takes about {round_s / 60:.0f} minutes, starting the servers {start_s / 60:.0f} (guessed); "
            f"the budget of {left_s / 60:.0f} is enough for about {max(0.0, (left_s - start_s) / round_s):.1f} rounds"
        )

    def rounds(self, json_file: Path) -> None:
        """Until the budget is spent. What has been measured is on disk after every round, and after Ctrl-C."""
        with Fleet(make=self._command, logs=self._root / "logs") as fleet:
            self.results.facts["starts"] = fleet.starts
            starts_s = sum(START_S[contender.peer] for contender in contenders_of(self.pairs))
            while cases := self.budget.next_round(self._left_s() - starts_s, self._max_rounds):
                remark(f"round {self.budget.rounds}: {len(cases)} cases, {self._left_s():.0f} s left")
                starts_s = 0.0
                try:
                    for case in cases:
                        self._measure_if_time(case, fleet)
                finally:
                    self.results.save(json_file)

    def _left_s(self) -> float:
        return self._deadline - time.monotonic()

    def _measure_if_time(self, case: Case, fleet: Fleet) -> None:
        if case not in self.budget.cases:  # dropped since: its server does not start
            return
        if self._left_s() < 0:  # cases took longer than thought
            remark(f"  {case.contender.name}, {case.task.name}: no time is left")
            self.budget.runs_of[case] -= 1
            return
        self._measure(case, fleet)

    def _command(self, contender: Contender, workload: Workload, port: int) -> Any:
        return command_for(contender, self._files, self._root, workload, port=port, threads=self._threads)

    def _measure(self, case: Case, fleet: Fleet) -> None:
        round_, task, contender = self.budget.rounds, case.task, case.contender
        if isinstance(task, Bench):
            result = run_bench(contender, task, self._files, self._root, self._threads, round_)
        else:
            # every workload has prompts of its own, or a prefix cache would know them from the last one
            seed = self._seed + 1000 * round_ + [other.name for other in self.results.tasks].index(task.name)
            started = time.perf_counter()
            try:
                with fleet.awake(contender, task) as running:
                    result = run_workload(running, task, round_, seed)
            except StartFailed as error:
                remark(str(error))
                result = failed_case(contender, task.name, round_, str(error), time.perf_counter() - started)
                self.budget.drop(contender)
        self.budget.seconds_of[case] = result.wall_s
        self.results.cases.append(result)
        remark(f"  {_line(result)}")


def _line(result: CaseResult) -> str:
    shown = "  ".join(f"{name} {value:.4g}" for name, value in result.figures.items())
    failed = f"  {result.failed} of {result.asked} failed: {next(iter(result.messages), '')}" if result.failed else ""
    return f"{result.contender}, {result.workload}: {result.wall_s:.1f} s  {shown}{failed}"


def _formats(text: str) -> list[Format]:
    found = [kind for kind in ALL_FORMATS if kind.lower() in text.lower().split(",")]
    if len(found) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of {', '.join(ALL_FORMATS)}")
    return found


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--root", type=Path, default=DEFAULT_ROOT, metavar="DIR", help="of install.py; %(default)s")
    made.add_argument("--peers", type=peers_of, default=list(PEERS), metavar="NAME,...", help=", ".join(PEERS))
    made.add_argument("--model", choices=MODELS, default="135m")
    made.add_argument("--formats", type=_formats, default=list(ALL_FORMATS), metavar="NAME,...", help="all")
    made.add_argument("--workloads", default="all", metavar="WORD,...", help="those with such a word in their name")
    made.add_argument("--budget-minutes", type=float, default=25.0, metavar="X", help="%(default)s")
    made.add_argument("--max-rounds", type=int, default=12, metavar="N", help="%(default)s")
    made.add_argument("--threads", type=int, metavar="N", help="of every contender that can be told; all cores")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--quick", action="store_true", help="one round of small cases: does everything run?")
    made.add_argument("--json", type=Path, metavar="FILE", help="benchmarks/results/peers-MODEL[-quick].json")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    args = parser().parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are ended then too
    versions = installed(args.root.absolute(), args.peers)
    if not versions:
        remark("no peer is installed: nothing to compare with")
        return 1
    json_file = args.json or RESULTS / f"peers-{args.model}{'-quick' if args.quick else ''}.json"
    run = Run(args, versions)
    if not run.pairs:
        remark("no pair is left to compare")
        return 1
    run.tell_plan()
    run.rounds(json_file)
    print(report(run.results, width()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
