"""No Mac runs these tests, so a table stands in for one: every aten op of whole steps of the torch backend must have an
MPS kernel in the ``native_functions.yaml`` that torch ships, with dtypes that MPS has.

This proves that nothing is missing, not that Apple's kernels are right: nobody has run octavo on a Mac here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torchgen
import yaml
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octavo.core.errors import ConfigError
from octavo.core.plan import DrawRule
from octavo.core.sampling_params import SamplingParams
from octavo.kernels.base import KVCacheLayout, PositionScale
from octavo.kernels.torch import backend as backend_module
from octavo.kernels.torch.backend import TorchBackend
from octavo.kernels.torch.ops import TorchOps
from octavo.model.architectures.mistral import MinistralConfig
from octavo.model.decoder import load
from random_model import make_step, random_source, variant

FLOAT = {torch.float32, torch.float16, torch.bfloat16}  # bfloat16 from macOS 14, which the backend checks
INDEX = {torch.int32, torch.int64}
ANY = FLOAT | INDEX | {torch.bool}
WIDE = {torch.float32}  # where the backend computes in float32 on purpose

#: op -> dtypes that its MPS kernel takes and that the backend means to use. An op that is not here fails the test.
DTYPES: dict[str, set[torch.dtype]] = {
    # views, allocation, copies and conversions
    **dict.fromkeys(
        ("alias", "detach", "detach_", "lift_fresh", "resolve_conj", "resolve_neg", "view", "view_as"), ANY
    ),
    **dict.fromkeys(("permute", "reshape", "select.int", "slice.Tensor", "split.Tensor", "t", "transpose.int"), ANY),
    **dict.fromkeys(("unsqueeze", "clone", "contiguous", "copy_", "empty.memory_format", "empty_like"), ANY),
    **dict.fromkeys(("to.dtype", "to.dtype_layout", "full", "fill_.Tensor"), ANY),
    # gathers and scatters: values, with indices
    **dict.fromkeys(("index_select", "index_copy_", "index.Tensor", "index_put_", "gather", "topk"), FLOAT | INDEX),
    **dict.fromkeys(("where.self", "masked_fill_.Scalar", "gt.Scalar"), FLOAT | {torch.bool}),
    # arithmetic in the dtype of activations
    **dict.fromkeys(("mm", "addmm", "add.Tensor", "mul.Tensor", "mul_.Tensor", "silu", "gelu", "cat"), FLOAT),
    # arithmetic in float32: norms, rotations, attention, sampling
    **dict.fromkeys(("bmm", "mean.dim", "rsqrt", "addcmul_", "roll", "tanh_", "amax", "amin", "sum.dim_IntList"), WIDE),
    **dict.fromkeys(("clamp_", "exp", "exp_", "log_", "div.Tensor", "div_.Tensor", "sub.Tensor", "sub_.Tensor"), WIDE),
}

#: composite op -> the kernels it runs. Each does the same on every device: views, allocation, and these.
COMPOSITES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("alias", "detach", "detach_", "lift_fresh", "resolve_conj", "resolve_neg", "view_as"), ()),
    **dict.fromkeys(("select.int", "slice.Tensor", "split.Tensor", "t", "transpose.int", "unsqueeze"), ("as_strided",)),
    "empty_like": ("empty.memory_format", "empty_strided"),
    "full": ("empty.memory_format", "fill_.Scalar"),
    "copy_": ("_copy_from",),  # the seam to other devices: MPS has its own copies between it and the CPU
    "_copy_from": (),
    **dict.fromkeys(("clone", "contiguous", "to.dtype", "to.dtype_layout"), ("empty_strided", "copy_")),
    "reshape": ("view", "clone"),
    "index_put_": ("_index_put_impl_",),
}


class Recorder(TorchDispatchMode):
    """Every aten op that passes, with the dtypes of its tensors. Composite ops are seen whole in inference mode."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: dict[str, set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        self.ops[name].update(tensor.dtype for tensor in tensors)
        return out


class MpsTable:
    """Which ops have an MPS kernel, by torch's own table."""

    def __init__(self) -> None:
        table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
        entries = yaml.load(table.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
        self.entries = {entry["func"].split("(")[0]: entry for entry in entries}

    def objection(self, op: str) -> str | None:
        """Why ``op`` may not run on MPS; None if it may."""
        if op in COMPOSITES:
            found = (self.objection(kernel) for kernel in COMPOSITES[op])
            return next((f"{op} runs {reason}" for reason in found if reason), None)
        entry = self.entries.get(op)
        if entry is None:
            return f"{op}, which is not in native_functions.yaml"
        keys = {key.strip() for keys in entry.get("dispatch", {}) for key in keys.split(",")}
        if "CompositeImplicitAutograd" in keys and "MPS" in keys:
            return f"{op}, a composite that branches by device"
        if "MPS" in keys:
            return None
        if "structured_delegate" in entry:
            return self.objection(entry["structured_delegate"])
        kind = (
            "a composite that COMPOSITES does not resolve" if not keys or "Composite" in str(keys) else "no MPS kernel"
        )
        return f"{op}: {kind}"

    def objections(self, ops: dict[str, set[torch.dtype]]) -> list[str]:
        """Everything that stands against running these ops on MPS."""
        found = [reason for op in sorted(ops) if (reason := self.objection(op))]
        for op, dtypes in sorted(ops.items()):
            strange = {str(dtype) for dtype in dtypes - DTYPES.get(op, set())}
            if strange:
                found.append(f"{op} with {', '.join(sorted(strange))}: not in DTYPES")
        return found


@cache
def mps_table() -> MpsTable:
    return MpsTable()


SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 3},
    {},
    {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "xtc_probability": 1.0, "temperature": 0.7},
    {"top_p": 0.9999, "temperature": 50.0},
    {"typical_p": 0.5},
    {"xtc_probability": 1.0},
    {"logit_bias": ((1, 1.0),), "allowed_token_ids": (1, 2, 3), "bad_words_token_ids": ((2,),)},
    {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "dry_multiplier": 1.0},
]

MODELS: list[dict[str, Any]] = [
    {"sliding_window": 6, "attention_soft_cap": 30.0, "logits_soft_cap": 20.0},
    {"tied_embeddings": False, "attention_bias": True, "hidden_act": "gelu", "rope_dim": 8, "vocab_size": 256},
    {"architecture": "starcoder2", "attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    {"architecture": "qwen3", "layer_windows": (3, None)},
    {"architecture": "ministral3", "growth": PositionScale(beta=0.1, length=4)},
]


def record_steps(dtype: str, changes: dict[str, Any], recorder: Recorder) -> None:
    """Load a model and record steps that between them use everything the backend can do."""
    growth = changes.get("growth")
    c = variant(**{name: value for name, value in changes.items() if name != "growth"})
    if growth is not None:
        c = MinistralConfig(**{field.name: getattr(c, field.name) for field in fields(c)}, query_growth=growth)
    source = random_source(c)
    torch_backend = TorchBackend(c, device="cpu", dtype=dtype)
    torch_backend.allocate_kv_cache(
        KVCacheLayout.full(num_layers=2, num_blocks=60, block_size=4, num_kv_heads=c.num_kv_heads, head_dim=c.head_dim)
    )
    torch_backend._kv_caches[0].zero_()  # one token below skips its write and then reads what is there
    torch_backend.bind(load(source, torch_backend), max_tokens=128, max_seqs=16)
    draws = [
        DrawRule(params=SamplingParams(**features), random_stream=1, history=[1, 2, 1, 2], prompt_len=1)
        for features in SAMPLING
    ]
    # contexts of several lengths, then decodes and chunks on them; copies, a skipped write, prompt logprobs
    starts = (20, 3, 21, 2, 9, 4, 8, 2)
    tables = [list(range(6 * i, 6 * i + 6)) for i in range(len(starts))]
    prefill = make_step([(0, range(start)) for start in starts], tables, 4)
    chunks = [(start, range(1 if i < 6 else 5)) for i, start in enumerate(starts)]
    step = make_step(chunks, tables, 4, target_rows=[7, 8], copies=[(0, 1, 50, 3), (0, 2, 51, 4)])
    step.slot_mapping[0, -1] = -1
    with recorder:
        torch_backend.run(prefill, draws)
        out = torch_backend.run(step, draws, [(3, 0), (4, 2)], hidden_rows=[1, 0])
    assert None not in out.tokens
    assert None not in out.row_logprobs


@cache
def recorded() -> dict[str, set[torch.dtype]]:
    recorder = Recorder()
    for dtype in ("float32", "bfloat16", "float16"):
        for changes in MODELS:
            record_steps(dtype, changes, recorder)
    return recorder.ops


@pytest.mark.slow
def test_every_op_of_whole_steps_has_an_mps_kernel_and_dtypes_that_mps_has():
    assert mps_table().objections(recorded()) == []


@pytest.mark.slow
def test_the_tables_list_nothing_that_is_no_longer_used():
    resolved = {kernel for kernels in COMPOSITES.values() for kernel in kernels}
    assert set(DTYPES) - set(recorded()) - resolved == set()
    assert set(COMPOSITES) - set(recorded()) - resolved == set()


def plant(monkeypatch: pytest.MonkeyPatch, op: Callable[[torch.Tensor], object]) -> dict[str, set[torch.dtype]]:
    """What is recorded when each residual sum also runs ``op``."""

    def add(self: TorchOps, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        op(a)
        return a + b

    monkeypatch.setattr(TorchOps, "add", add)
    recorder = Recorder()
    record_steps("float32", MODELS[0], recorder)
    return recorder.ops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("op", "complaint"),
    [
        (lambda x: torch.mode(x), "mode: no MPS kernel"),
        (lambda x: torch.nn.functional.linear(x, x), "linear, a composite that branches by device"),
        (
            lambda x: torch.nn.functional.softplus(x).logsumexp(0),
            "logsumexp: a composite that COMPOSITES does not resolve",
        ),
        (lambda x: x.double(), "to.dtype with torch.float64: not in DTYPES"),
        (lambda x: x * x.double(), "mul.Tensor with torch.float64: not in DTYPES"),
        (lambda x: x.cumsum(0), "cumsum with torch.float32: not in DTYPES"),
    ],
)
def test_a_planted_op_is_found(monkeypatch, op, complaint):
    assert complaint in mps_table().objections(plant(monkeypatch, op))


def test_bfloat16_on_mps_needs_macos_14(monkeypatch):
    config = random_source().config
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for newer, auto in [(False, "float32"), (True, "bfloat16")]:
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor, newer=newer: newer)
        made = TorchBackend(config)
        assert (made.device, made.dtype) == ("mps", auto)
    monkeypatch.setattr(backend_module.torch.backends.mps, "is_macos_or_newer", lambda major, minor: False)
    with pytest.raises(ConfigError, match="needs macOS 14"):
        TorchBackend(config, device="mps", dtype="bfloat16")
