"""What a caller hands over may be wrong: it is refused by name, and nothing is read or written out of bounds."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from native_models import ISAS, allocate, backend, config, pinned_isa, random_llama
from native_steps import Seq, advance, step_input

from octavo import _native
from octavo.core.errors import ConfigError
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import ModelInput
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.native.draws import DRAW_DTYPE
from octavo.kernels.native.threads import default_threads

C = config()
GREEDY = [DrawRule(params=SamplingParams(temperature=0.0), random_stream=0)]


@pytest.fixture(scope="module")
def made() -> NativeBackend:
    return random_llama(C, "Q4_1")


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


PARTS = [name for name, kind in vars(ModelInput).items() if isinstance(kind, property)]
HOSTILE = [
    ("token_ids", lambda a: a + 117, "token_ids has 1.. but takes"),
    ("token_ids", lambda a: a - 200, "token_ids has -"),
    ("positions", lambda a: a + 1, "a position is"),
    ("slot_mapping", lambda a: a + 64 * 16, "slot_mapping has"),
    ("slot_mapping", lambda a: a * 0 - 2, "slot_mapping has -2"),
    ("block_tables", lambda a: a + 64, "block_tables has"),
    ("block_tables", lambda a: a - 64, "block_tables has -"),
    ("block_tables", lambda a: a[:, :, :1].copy(), "at most what its block table covers"),
    ("query_starts", lambda a: ints(0, 21), "query_starts entry is 21"),
    ("query_starts", lambda a: ints(1, 20), r"query_starts\[0\] is 1"),
    ("query_starts", lambda a: ints(0, 0), "query_starts entry is 0"),
    ("context_lens", lambda a: a - 1, "context_lens entry is 19"),
    ("context_lens", lambda a: a + 10**6, "context_lens entry"),
    ("logit_rows", lambda a: a + 1, "logit_rows has 20"),
    ("logit_rows", lambda a: ints(0, 1), "2 logit_rows but 1 draws"),
    ("copies", lambda a: ints(0, 0, 64, 3).reshape(1, 4), "copies has 64"),
    ("copies", lambda a: ints(1, 0, 1, 3).reshape(1, 4), "copies has 1"),
    ("copies", lambda a: ints(0, 0, 1, 17).reshape(1, 4), "copy's number of tokens is 17"),
]


@pytest.mark.parametrize(("field", "spoil", "message"), HOSTILE)
def test_a_hostile_step_is_refused_by_name(made: NativeBackend, field: str, spoil, message: str) -> None:
    seq = Seq(list(range(20)), [5, 6])
    step = step_input([(seq, 20)], 16)
    parts = {name: getattr(step, name) for name in PARTS}
    spoilt = parts | {field: spoil(parts[field])}
    flat = {"slot_mapping": spoilt["slot_mapping"].reshape(-1), "block_tables": list(spoilt["block_tables"][0])}
    hostile = ModelInput.of(**spoilt | flat)
    with pytest.raises(ValueError, match=message):
        made.run(hostile, GREEDY)
    assert made.run(step, GREEDY).tokens[0] is not None  # and the backend still works


@settings(max_examples=50, deadline=None)
@given(*[st.integers(1, 7)] * 3, st.integers(0, 3), st.integers(1, 4), st.integers(0, 5))
def test_both_sides_take_a_step_apart_alike(
    tokens: int, rows: int, seqs: int, copies: int, groups: int, width: int
) -> None:
    length = (2 + groups) * tokens + rows + 2 * seqs + 1 + 4 * copies + groups * seqs * width
    step = ModelInput(array("i", range(length)), tokens, rows, seqs, copies, 0, groups)
    assert _native.step_layout(step.ints, (tokens, rows, seqs, copies, groups)) == list(step.layout())
    found = [getattr(step, name).reshape(-1).tolist() for name, _ in step.layout()]
    assert [value for part in found for value in part] == list(range(length))


@pytest.mark.parametrize("size", ["num_tokens", "num_rows", "num_seqs", "num_copies", "num_groups"])
@pytest.mark.parametrize("forged", [0, 2, 21, 2**31, 2**62, -1])
def test_a_forged_size_never_reaches_beyond_the_array(made: NativeBackend, size: str, forged: int) -> None:
    step = step_input([(Seq(list(range(20)), [5, 6]), 20)], 16)
    if forged != getattr(step, size):
        with pytest.raises((ValueError, TypeError)):
            made.run(dataclasses.replace(step, **{size: forged}), GREEDY)
    with pytest.raises(ValueError, match="array of run"):
        made.run(dataclasses.replace(step, ints=array("q", step.ints)), GREEDY)
    assert made.run(step, GREEDY).tokens[0] is not None


def test_more_tokens_or_sequences_than_bound_are_refused(made: NativeBackend) -> None:
    with pytest.raises(ValueError, match="token_ids is 1025"):
        made.run(step_input([(Seq([1] * 1025, list(range(65))), 1025)], 16), GREEDY)
    many = [(Seq([1], [0]), 1) for _ in range(65)]
    with pytest.raises(ValueError, match="context_lens is 65"):
        made.run(step_input(many, 16), GREEDY * 65)


@pytest.mark.parametrize("what", ["logit_bias", "allowed_token_ids", "history", "banned"])
def test_token_ids_outside_the_vocabulary_never_reach_the_sampler(made: NativeBackend, what: str) -> None:
    params, extra = SamplingParams(temperature=0.0), {}
    if what == "logit_bias":
        params = SamplingParams(logit_bias=((117, 1.0),))
    elif what == "allowed_token_ids":
        params = SamplingParams(allowed_token_ids=(-1,))
    elif what == "history":
        params, extra = SamplingParams(repetition_penalty=1.5), {"history": [3, 500]}
    else:
        extra = {"banned_token_ids": (117,)}
    with pytest.raises(ValueError, match="but the vocabulary has 117 tokens"):
        made.run(step_input([(Seq([1], [0]), 1)], 16), [DrawRule(params=params, random_stream=0, **extra)])


def test_a_row_that_is_not_finite_fails_alone() -> None:
    """A NaN in one sequence's cache: its own draw fails, its neighbour's is what it would be without it."""
    made = random_llama(C, "Q4_1")
    assert made._kv is not None
    good, bad = Seq(list(range(20)), [1, 2]), Seq(list(range(20)), [3, 4])
    for seq in (good, bad):
        advance(made, [(seq, 19)], 16)
    alone = made.run(step_input([(good, 1)], 16), GREEDY).tokens[0]
    made._kv.poison(3)
    result = made.run(step_input([(good, 1), (bad, 1)], 16), GREEDY * 2)
    assert result.tokens == [alone, "not_finite"]


def test_infinite_weights_fail_the_row_and_not_the_process() -> None:
    rows = step_input([(Seq(list(range(5)), [0]), 5)], 16)
    made = random_llama(config(rms_norm_eps=float("nan")), "Q8_0")
    assert made.run(rows, GREEDY).tokens == ["not_finite"]


def test_the_draw_record_has_the_layout_that_the_sampler_reads() -> None:
    assert DRAW_DTYPE.itemsize == _native.DRAW_BYTES


def test_an_instruction_set_that_is_not_there_is_refused_with_the_choices() -> None:
    with (
        pinned_isa("sse9"),
        pytest.raises(ConfigError, match="OCTAVO_ISA is 'sse9' but this CPU and build offer generic"),
    ):
        NativeBackend(C)


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_of_this_host_can_be_pinned(isa: str) -> None:
    assert backend(C, isa).fingerprint.startswith(f"native-{isa}-exact")


def test_bad_wishes_are_refused() -> None:
    with pytest.raises(ConfigError, match="numerics is 'sloppy'"):
        NativeBackend(C, numerics="sloppy")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="kv_dtype is 'int3'"):
        NativeBackend(C, kv_dtype="int3")
    with pytest.raises(ConfigError, match="threads is 2000"):
        NativeBackend(C, threads=2000)


def test_a_cache_that_does_not_fit_is_refused_with_the_way_out() -> None:
    with pytest.raises(ConfigError, match="lower --kv-cache-memory"):
        allocate(backend(C), C, num_blocks=2**31 - 1, block_size=2**20)


def test_default_threads_stay_inside_the_affinity_mask() -> None:
    assert 1 <= default_threads() <= len(os.sched_getaffinity(0))


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_idle_threads_use_no_cpu() -> None:
    """They sleep and nothing wakes them, not even for a look: counted, so that a busy machine changes nothing."""

    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def looked_at(thread: str) -> tuple[str, str]:
        """State, and how often the thread has gone to sleep."""
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines())
        return fields["State"].split()[0], fields["voluntary_ctxt_switches"].strip()

    before = threads()
    made = random_llama(C, "Q4_1", threads=4)
    advance(made, [(Seq(list(range(20)), [5, 6]), 20)], 16)
    workers = threads() - before
    assert len(workers) == 3  # the fourth is the caller
    for _ in range(3000):  # a spin takes microseconds, but a busy machine may not have run it yet
        if all(looked_at(worker)[0] == "S" for worker in workers):
            break
        time.sleep(0.01)
    asleep = {worker: looked_at(worker) for worker in workers}
    assert {state for state, _ in asleep.values()} == {"S"}
    for _ in range(30):
        time.sleep(0.01)
        assert {worker: looked_at(worker) for worker in workers} == asleep
    made.close()


def test_the_cache_takes_no_memory_before_it_is_used() -> None:
    def resident() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    made, before = backend(C), resident()
    made_bytes = made.kv_bytes_per_token(C, C.num_layers) * 16 * (1 << 18)
    allocate(made, C, num_blocks=1 << 18)
    assert made_bytes >= 1 << 30
    assert resident() - before < 16 << 20
