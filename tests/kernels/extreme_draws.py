"""Every numeric sampling field at the ends of its range, alone and combined, on rows of logits that are as extreme."""

from __future__ import annotations

import random

import numpy as np
from numpy.typing import NDArray

from octavo.core.plan import DrawRule
from octavo.core.request import uniform
from octavo.core.sampling_params import SamplingParams

VOCAB = 97
LARGEST = np.finfo(np.float32).max

#: The admissible ends of each field, and what is just inside them.
ENDS: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (5e-324, 1e-45, 1e-38, 1e-30, 0.5, 1.3, 100.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "dry_multiplier": (1e-300, 1.0, 100.0),
    "dry_base": (1.0, 10.0),
    "dry_allowed_length": (1, 1024),
    "dry_penalty_last_n": (-1, 0, 1, 2**31 - 1),
    "temperature": (0.0, 5e-324, 1e-30, 1e-5, 100.0),
    "top_k": (1, 2, VOCAB, 2**31 - 1),
    "typical_p": (5e-324, 1e-30, 1.0 - 2**-53),
    "top_p": (5e-324, 1e-30, 1.0 - 2**-53),
    "min_p": (5e-324, 1e-30, 1.0),
    "xtc_probability": (5e-324, 1.0),
    "xtc_threshold": (0.0, 5e-324, 1.0),
    "logit_bias": (
        ((3, 100.0),),
        ((3, -100.0),),
        tuple((token, -100.0) for token in range(VOCAB)),
        ((3, 100.0),) * 4096,
        ((3, -100.0),) * 4096,
    ),
    "allowed_token_ids": ((3,), (3, 5), tuple(range(VOCAB))),
    "seed": (-(2**63), 2**64 - 1),
}


def rows() -> NDArray[np.float32]:
    """[8, VOCAB], all finite."""
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(VOCAB)
    return np.stack(
        [
            3 * spread,
            np.zeros(VOCAB),
            np.full(VOCAB, -50.0),
            np.full(VOCAB, LARGEST),
            np.full(VOCAB, -LARGEST),
            np.where(np.arange(VOCAB) % 2 == 0, LARGEST, -LARGEST),
            1e37 * spread,
            np.where(np.arange(VOCAB) == 7, 1e30, -1e30),
        ]
    ).astype(np.float32)


def rules(seed: int, count: int) -> list[DrawRule]:
    """Random combinations: a field is left alone, or at one of its ends; token 3 is never masked."""
    rng, made = random.Random(seed), []
    for _ in range(count):
        chosen = rng.sample(sorted(ENDS), rng.choice((1, 2, 3, 8, len(ENDS))))
        params = SamplingParams(**{name: rng.choice(ENDS[name]) for name in chosen})  # type: ignore[arg-type]
        history = rng.choice(([], [3], [3] * 700, [rng.randrange(6) for _ in range(300)], list(range(VOCAB))))
        banned = rng.choice(((), (4, 5), tuple(range(4, VOCAB))))
        made.append(
            DrawRule(
                params=params,
                random_stream=rng.getrandbits(64),
                history=history if params.needs_history else (),
                prompt_len=rng.randrange(len(history) + 1),
                banned_token_ids=banned,
            )
        )
    return made


BOUNDARY_VOCAB = 2048
#: Fields -> how many of ``BOUNDARY_VOCAB`` equally likely tokens are left. Every sum is exact: a token at the boundary
#: is in or out without doubt, and 0.999 of the mass is a token less.
BOUNDARIES: list[tuple[dict[str, object], int]] = [
    ({"top_p": 0.5}, 1024),
    ({"top_p": 0.5 + 2**-11}, 1025),
    ({"top_p": 1 - 2**-11}, 2047),
    ({"top_p": 0.5, "top_k": 1024}, 512),
    ({"top_p": 0.5, "top_k": 2046}, 1023),
    ({"top_p": 0.5, "min_p": 1.0}, 1024),
    ({"typical_p": 0.5}, 1024),
    ({"typical_p": 0.5, "top_p": 0.5}, 512),
]


def boundary_rule(fields: dict[str, object], left: int, position: int) -> DrawRule:
    """A draw that takes the last of the ``left`` tokens 0, 1, ... if exactly these are left, and another if not."""
    u_last = (left - 1) / left
    stream = next(s for s in range(10**6) if uniform(s, position) >= u_last)
    return DrawRule(params=SamplingParams(**fields), random_stream=stream)  # type: ignore[arg-type]


#: XTC among four equally likely tokens: at the threshold counts as above it, and the highest id stays.
XTC_AT_THE_THRESHOLD = SamplingParams(xtc_probability=1.0, xtc_threshold=0.25)
XTC_ABOVE_THE_THRESHOLD = SamplingParams(xtc_probability=1.0, xtc_threshold=0.25 + 2**-20)

#: One likely token, one that weighs 0.0003 beside it and is needed to reach ``THIN_TOP_P``, and others just below. So a
#: head of the likeliest tokens settles the draw, and 0.999 of the mass would be the first token alone.
THIN_ROW = np.array([0.0, -8.0, *[-8.01] * 38], np.float32)
_THIN_WEIGHTS = np.exp(THIN_ROW.astype(np.float64))
THIN_TOP_P = float((1.0 + 0.5 * _THIN_WEIGHTS[1]) / _THIN_WEIGHTS.sum())


def thin_rule(position: int, **more: object) -> DrawRule:
    """A draw from ``THIN_ROW`` that takes token 1 if just tokens 0 and 1 are left."""
    stream = next(s for s in range(10**6) if uniform(s, position) >= 1.0 - _THIN_WEIGHTS[1] / 2)
    return DrawRule(params=SamplingParams(top_p=THIN_TOP_P, **more), random_stream=stream)  # type: ignore[arg-type]
