"""What the founding benchmark says: samples, medians over rounds, the table, and what memory allows at best."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from octavo.cli.bound import Bound, decode_bound
from octavo.engine.engine import Engine

LABELS = {
    "huggingface": "Hugging Face",
    "octavo": "octavo",
    "octavo_cold": "octavo cold",
    "octavo_warm": "octavo warm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One request. Times in seconds."""

    prompt_tokens: int
    token_ids: list[int]
    start_s: float  # from time zero to its own turn
    first_s: float  # from time zero to its first token
    last_s: float  # from time zero to its last token
    cached_tokens: int = 0  # of the prompt, not computed

    @property
    def tpot_s(self) -> float | None:
        count = len(self.token_ids)
        return (self.last_s - self.first_s) / (count - 1) if count > 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """All requests, once, on one engine."""

    wall_s: float
    samples: list[Sample]


def figures(rounds: Sequence[Round]) -> dict[str, float]:
    """Medians over the rounds of wall time, throughput, and the requests' mean TTFT, TPOT and cached tokens."""

    def median(of: Callable[[Round], float]) -> float:
        return statistics.median(of(one) for one in rounds)

    def mean_tpot(one: Round) -> float:
        known = [s.tpot_s for s in one.samples if s.tpot_s is not None]
        return statistics.fmean(known) if known else float("nan")

    return {
        "wall_s": median(lambda one: one.wall_s),
        "tokens_per_s": median(lambda one: sum(len(s.token_ids) for s in one.samples) / one.wall_s),
        "mean_ttft_s": median(lambda one: statistics.fmean(s.first_s for s in one.samples)),
        "mean_own_ttft_s": median(lambda one: statistics.fmean(s.first_s - s.start_s for s in one.samples)),
        "mean_tpot_s": median(mean_tpot),
        "mean_cached_tokens": median(lambda one: statistics.fmean(s.cached_tokens for s in one.samples)),
    }


def ratios(theirs: Mapping[str, float], ours: Mapping[str, float]) -> dict[str, float]:
    """How many times better octavo is: times theirs / ours."""
    return {key: theirs[key] / ours[key] for key in ("wall_s", "mean_ttft_s", "mean_own_ttft_s", "mean_tpot_s")}


def agreement(left: Round, right: Round) -> list[int]:
    """Per request, how many tokens agree before the first that differs (another rounding, a near tie)."""
    return [
        next((i for i, (a, b) in enumerate(zip(x.token_ids, y.token_ids, strict=False)) if a != b), len(x.token_ids))
        for x, y in zip(left.samples, right.samples, strict=True)
    ]


def table(title: str, medians: Mapping[str, Mapping[str, float]]) -> Table:
    """Hugging Face beside each of octavo's runs, and how many times better each of these is. 80 columns."""
    found = Table(title=title, box=None)
    found.add_column("", no_wrap=True)
    for name in medians:
        found.add_column(LABELS[name], justify="right", no_wrap=True)
        if name != "huggingface":
            found.add_column("ratio", justify="right", no_wrap=True)
    theirs = medians["huggingface"]
    better = {name: ratios(theirs, ours) for name, ours in medians.items()}
    for key, label, scale, unit in (
        ("wall_s", "wall time", 1, "s"),
        ("tokens_per_s", "throughput", 1, "tok/s"),
        ("mean_ttft_s", "mean TTFT, from arrival", 1000, "ms"),
        ("mean_own_ttft_s", "mean TTFT, own turn", 1000, "ms"),
        ("mean_tpot_s", "mean TPOT", 1000, "ms"),
        ("mean_cached_tokens", "prompt tokens cached", 1, ""),
    ):
        cells = []
        for name, of in medians.items():
            cells.append(f"{of[key] * scale:,.{2 if unit == 's' else 1}f} {unit}".rstrip())
            if name != "huggingface":
                cells.append(f"{better[name][key]:.2f}" if key in better[name] else "")
        found.add_row(label, *cells)
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBound:
    """How long the weights alone take to come from memory. None of it can be avoided by anyone who batches nothing."""

    read_bytes_per_s: float  # measured, of as much memory as octavo's weights take
    octavo: Bound  # a step with one token of each request
    peer_step_bytes: int

    @property
    def peer_step_s(self) -> float:
        return self.peer_step_bytes / self.read_bytes_per_s


def memory_bound(engine: Engine, peer: Any, num_requests: int, context: int) -> MemoryBound | None:
    """None on a backend that does not know what it reads."""
    backend = engine.runner.backend
    cost, speed = backend.model_cost(), backend.measure_machine()
    if cost is None or speed is None:
        return None
    bound = decode_bound(cost, speed, streams=num_requests, context=context)
    table = peer.get_input_embeddings().weight
    tied = table is peer.get_output_embeddings().weight
    weights = sum(p.numel() * p.element_size() for p in peer.parameters())  # of a tied table once
    return MemoryBound(
        read_bytes_per_s=bound.bytes / bound.memory_s,
        octavo=bound,
        peer_step_bytes=weights - (0 if tied else table.numel() * table.element_size()),
    )


def bandwidth_argument(
    bound: MemoryBound, num_requests: int, max_tokens: int, medians: Mapping[str, Mapping[str, float]]
) -> str:
    """In words: what a step must read, what follows for both, and how near each came."""
    one_by_one, at_once = num_requests * max_tokens, max_tokens
    lines = [
        f"A step reads all weights from memory, for however many requests: {bound.peer_step_bytes / 1e9:.2f} GB for "
        f"Hugging Face, {bound.octavo.bytes / 1e9:.2f} GB with the KV of {num_requests} for octavo. At the "
        f"{bound.read_bytes_per_s / 1e9:.1f} GB/s measured here that is at least {bound.peer_step_s * 1e3:,.0f} and "
        f"{bound.octavo.seconds * 1e3:,.0f} ms. One by one it is {one_by_one} steps, at best "
        f"{one_by_one * bound.peer_step_s:,.2f} s; all at once {at_once}, at best "
        f"{at_once * bound.octavo.seconds:,.2f} s: no scheduler makes more than that of these weights."
    ]
    for name, of in medians.items():
        least = bound.peer_step_s if name == "huggingface" else bound.octavo.seconds
        lines.append(f"{LABELS[name]}: mean TPOT is {of['mean_tpot_s'] / least:.2f} x that least time.")
    return "\n".join(lines)


def bound_facts(bound: MemoryBound | None) -> dict[str, Any] | None:
    """For the JSON."""
    return None if bound is None else {**asdict(bound), "peer_step_s": bound.peer_step_s}
