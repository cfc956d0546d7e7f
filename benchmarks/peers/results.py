"""A run's samples: kept, stored, read back, and asked for ratios."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases import CaseResult
from contenders import Contender, Pair
from in_process import Bench
from ratios import Ratio, ratio_of
from workloads import Figure, Workload

from octavo.cli.console import remark


class NotAResult(Exception):
    """A file that ``run.py`` did not write."""


@dataclass(slots=True)
class Results:
    """``facts``: the host and what was run; ``pairs``: columns; ``tasks``: rows; ``cases``: what was measured."""

    facts: dict[str, Any]
    pairs: Sequence[Pair]
    tasks: Sequence[Workload | Bench]
    cases: list[CaseResult] = field(default_factory=list)

    def figures(self, contender: Contender, task: str, figure: str) -> dict[int, float]:
        """A figure by round."""
        return {
            case.round: case.figures[figure]
            for case in self.cases
            if (case.contender, case.workload) == (contender.name, task) and figure in case.figures
        }

    def ratio(self, pair: Pair, task: str, figure: Figure) -> Ratio | None:
        """How many times as fast octavo is; None if no round has both."""
        ours, theirs = (self.figures(one, task, figure.name) for one in (pair.ours, pair.theirs))
        return ratio_of(ours, theirs, more_is_better=figure.more_is_better)

    def failures(self, contender: Contender, task: str) -> tuple[int, int]:
        """(failed, asked) requests over all rounds."""
        found = [case for case in self.cases if (case.contender, case.workload) == (contender.name, task)]
        return sum(case.failed for case in found), sum(case.asked for case in found)

    def messages(self, contender: Contender) -> Counter[str]:
        """Why requests failed, and how often."""
        found: Counter[str] = Counter()
        for case in self.cases:
            if case.contender == contender.name:
                found.update(case.messages)
        return found

    def save(self, path: Path) -> None:
        """Facts, then one case per line."""
        head = {**self.facts, "pairs": [dataclasses.asdict(pair) for pair in self.pairs]}
        head["tasks"] = [dataclasses.asdict(task) for task in self.tasks]
        text = json.dumps(head, indent=1)
        lines = ",\n".join(json.dumps(dataclasses.asdict(case)) for case in self.cases)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        partial.write_text(f'{text[:-2]},\n "cases": [\n{lines}\n ]\n}}\n', encoding="utf-8")
        partial.rename(path)
        remark(f"samples: {path}")


def load(path: Path) -> Results:
    """Raises NotAResult."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        pairs = [_pair(entry) for entry in facts.pop("pairs")]
        tasks = [_task(entry) for entry in facts.pop("tasks")]
        cases = [_case(entry) for entry in facts.pop("cases")]
    except OSError as error:
        raise NotAResult(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise NotAResult(f"{path} is no result of benchmarks/peers/run.py: {error!r}") from error
    return Results(facts=facts, pairs=pairs, tasks=tasks, cases=cases)


def _pair(entry: Mapping[str, Any]) -> Pair:
    sides = {side: Contender(**entry[side]) for side in ("ours", "theirs")}
    return Pair(label=entry["label"], group=entry["group"], **sides)


def _task(entry: Mapping[str, Any]) -> Workload | Bench:
    if "steps" in entry:
        return Bench(**{**entry, "streams": tuple(entry["streams"]), "prefills": tuple(entry["prefills"])})
    return Workload(**{**entry, "figures": tuple(Figure(**figure) for figure in entry["figures"])})


def _case(entry: Mapping[str, Any]) -> CaseResult:
    bounds = {name: (share, limit) for name, (share, limit) in entry["bounds"].items()}
    return CaseResult(**{**entry, "notes": tuple(entry["notes"]), "bounds": bounds})
