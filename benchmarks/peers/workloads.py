"""What every contender is asked, and which figures of it are compared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Unit = Literal["tok/s", "ms"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that a case gives, as ``figures_of`` in ``cases.py`` names it."""

    name: str
    label: str  # of the table's row
    unit: Unit

    @property
    def more_is_better(self) -> bool:
        return self.unit == "tok/s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """``concurrency`` clients that each ask again once they have their answer; lengths in tokens.

    ``long_prompts`` of ``long_tokens`` arrive beside them, one every ``long_every_s``; the clients then ask until the
    last of those is answered, and ``requests`` does not count.
    """

    name: str
    concurrency: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    shared_prefix: int = 0  # before the prompt, the same for all
    long_prompts: int = 0
    long_tokens: int = 0
    long_every_s: float = 0.0
    figures: tuple[Figure, ...]

    @property
    def slots(self) -> int:
        """Sequences that can be under way at once."""
        return self.concurrency + self.long_prompts

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.shared_prefix + self.prompt_tokens, self.long_tokens) + self.output_tokens

    def quick(self) -> Workload:
        """The same form, as small as shows that everything runs."""
        clients = min(self.concurrency, 8)
        return replace(
            self,
            concurrency=clients,
            requests=min(self.requests, clients),
            prompt_tokens=min(self.prompt_tokens, 128),
            output_tokens=min(self.output_tokens, 8),
            shared_prefix=min(self.shared_prefix, 200),
            long_prompts=min(self.long_prompts, 1),
            long_tokens=min(self.long_tokens, 512),
            long_every_s=min(self.long_every_s, 0.5),
        )


def _output(label: str) -> Figure:
    return Figure(name="output_tokens_per_s", label=label, unit="tok/s")


WORKLOADS = (
    *(
        Workload(
            name=f"{streams}x128/64",
            concurrency=streams,
            requests=requests,
            prompt_tokens=128,
            output_tokens=64,
            figures=(_output(f"{streams} stream{'s' if streams > 1 else ''}, 128/64"),),
        )
        for streams, requests in ((1, 2), (8, 8), (32, 32), (64, 64))
    ),
    Workload(
        name="16x1024/128",
        concurrency=16,
        requests=16,
        prompt_tokens=1024,
        output_tokens=128,
        figures=(
            _output("16 streams, 1,024/128"),
            Figure(name="itl_p99_s", label="  P99 ITL", unit="ms"),
        ),
    ),
    Workload(
        name="prefill 2048",
        concurrency=1,
        requests=2,
        prompt_tokens=2048,
        output_tokens=1,
        figures=(Figure(name="prompt_tokens_per_s", label="prefill of 2,048", unit="tok/s"),),
    ),
    Workload(
        name="32 chats, 1000 shared",
        concurrency=32,
        requests=32,
        prompt_tokens=64,
        output_tokens=64,
        shared_prefix=1000,
        figures=(
            _output("32 chats, 1,000 shared"),
            Figure(name="ttft_mean_s", label="  mean TTFT", unit="ms"),
        ),
    ),
    Workload(
        name="8 chats amid 4000",
        concurrency=8,
        requests=0,
        prompt_tokens=128,
        output_tokens=64,
        long_prompts=2,
        long_tokens=4000,
        long_every_s=2.0,
        figures=(
            Figure(name="itl_p99_s", label="8 chats amid 4,000: P99 ITL", unit="ms"),
            Figure(name="long_ttft_mean_s", label="  TTFT of the 4,000", unit="ms"),
        ),
    ),
)


def workloads_of(text: str, *, quick: bool) -> list[Workload]:
    """Those whose names hold one of the comma-separated words; ``all`` for all. ValueError if there is none."""
    words = [word.strip() for word in text.split(",")]
    found = [w for w in WORKLOADS if text == "all" or any(word in w.name for word in words)]
    if not found:
        raise ValueError(f"{text!r} is in no workload's name: {', '.join(w.name for w in WORKLOADS)}")
    return [workload.quick() for workload in found] if quick else found
