"""A run as JSON: facts, figures, and every sample they follow from. ``docs/benchmarking.md`` has the format."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from octavo.cli.distributions import distribution
from octavo.cli.load.measures import Target, failures, interference, latencies, totals
from octavo.cli.load.plan import Plan
from octavo.cli.load.runner import Run
from octavo.cli.load.sample import Sample
from octavo.cli.load.server import Server
from octavo.cli.report import host_facts
from octavo.core.errors import ConfigError

KIND = "octavo bench serve"
_HIDDEN = "(hidden)"


def record(server: Server, run: Run, plan: Plan, target: Target, api_key: str | None) -> dict[str, Any]:
    """Everything but the key and the prompts, which follow from the seed."""
    host = host_facts()
    if api_key:
        as_quoted = api_key.replace("'", "'\"'\"'")  # by shlex.join
        host["command"] = host["command"].replace(as_quoted, _HIDDEN)
    groups = sorted({sample.group for sample in run.samples})
    return {
        "kind": KIND,
        "host": host,
        "server": {
            "url": str(server.client.url),
            "model": server.model,
            **{key: value for key, value in dataclasses.asdict(server.wishes).items() if key != "model"},
            "optional_fields": server.optional,
            "prompt_maker": dataclasses.asdict(server.asker.maker),
            "notes": server.notes,
        },
        "plan": {**dataclasses.asdict(dataclasses.replace(plan, trace=())), "trace_requests": len(plan.trace)},
        "totals": totals(run.samples, run.duration_s, target),
        "latencies": {group: latencies(s for s in run.samples if s.group == group) for group in groups},
        "interference": interference(run.samples) if plan.long_prompt is not None else None,
        "failures": failures(run.samples),
        "client": {
            "cpu_s": run.cost.cpu_s,
            "cpu_share_of_a_core": run.cost.cpu_s / run.duration_s if run.duration_s else None,
            "loop_lag_s": distribution(run.cost.lag_s),
        },
        "was_interrupted": run.was_interrupted,
        "requests": [_shown(sample) for sample in sorted(run.samples, key=lambda s: (s.arrival_s, s.index))],
    }


def _shown(sample: Sample) -> dict[str, Any]:
    """Times to the microsecond."""
    fields = dataclasses.asdict(sample)
    for name in ("arrival_s", "sent_s", "end_s"):
        fields[name] = None if fields[name] is None else round(fields[name], 6)
    fields["event_times_s"] = [round(time_s, 6) for time_s in sample.event_times_s]
    return fields


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run read back."""

    path: Path
    facts: Mapping[str, Any]
    samples: list[Sample]
    duration_s: float


def read_record(path: Path) -> Recorded:
    """Raises ConfigError for a file that ``--json`` did not write."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(facts, dict) or facts.get("kind") != KIND:
            raise ConfigError(f"{path} is no result of octavo bench serve --json")
        samples = [Sample(**fields) for fields in facts.pop("requests")]
        return Recorded(path=path, facts=facts, samples=samples, duration_s=float(facts["totals"]["duration_s"]))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is no complete result of octavo bench serve --json: {error}") from error
