"""What somebody asks for, and the sequences that come of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octavo.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownOutput:
    """How far an answer has come elsewhere, from where it goes on: with the same seed as if it had never been away."""

    token_ids: tuple[int, ...]  # that its reader has been told
    num_chars: int  # of its text, that its reader has


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One prompt and how it is to go on, as a caller asks for it: nothing is checked yet.

    It goes whole from the API and the command line to ``engine/requests.py``, which makes n Requests of it.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling: SamplingParams
    n: int = 1  # choices
    priority: int = 0  # lower runs first, as in vLLM
    client: str = ""  # whose share it counts against ("fair") and whose requests it may see
    cache_salt: bytes = b""  # isolates the prefix cache: equal prompts share KV only under an equal salt
    known_output: tuple[KnownOutput, ...] = ()  # of each choice; (): nothing is known of any
    grammar: object | None = None  # what each choice must match: a record of which text/grammar.py knows a maker


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A validated request, as the scheduler sees it. ``n > 1`` becomes n of these. Fields are as in ``Submission``.

    The engine makes it at submission: ``sampling.max_tokens`` is resolved (never None), token ids are inside the
    vocabulary, ``seed`` is given or was drawn from the OS, so that preemption and replay repeat it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]  # at least one
    sampling: SamplingParams
    max_tokens: int  # resolved: at most max_model_len - len(prompt_token_ids)
    stop_token_ids: frozenset[int]  # resolved: sampling.stop_token_ids, and the model's EOS ids unless ignore_eos
    seed: int  # 64 bits, unsigned
    arrival_s: float  # monotonic clock
    priority: int = 0
    client: str = ""
    cache_salt: bytes = b""
    known_output: KnownOutput | None = None
    grammar: object | None = None
    choice_index: int = 0
    fork_of: str | None = None  # request_id of the sibling whose prompt KV it shares

    @property
    def random_stream(self) -> int:
        """Of this sequence, 64 bits: a hash of (seed, choice index)."""
        return mix64(mix64(self.seed) + self.choice_index)


def mix64(x: int) -> int:
    """SplitMix64's output function (Steele, Lea, Flood 2014): a bijection of 64-bit numbers that scatters them."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return x ^ (x >> 31)


def uniform(stream: int, position: int, purpose: int = 0) -> float:
    """The uniform number in [0, 1), 53 bits, of one draw: a pure function of its arguments.

    position: index in the sequence of the token being drawn; purpose: 0 the draw, 1 XTC's coin.
    """
    return (mix64(mix64(stream ^ mix64(position)) + purpose) >> 11) * 2.0**-53
