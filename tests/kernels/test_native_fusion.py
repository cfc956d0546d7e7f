"""What fusing leaves of a recorded model; that it changes no bit is tested in test_native_invariance.py."""

from __future__ import annotations

from typing import cast

import numpy as np
import pytest
from native_models import backend, config, random_tensor

from octavo.kernels.base import Ops
from octavo.kernels.native.fusion import Region, fuse
from octavo.kernels.native.recorder import Recorder, Symbol
from octavo.weights.dequantise import Encoding


@pytest.mark.parametrize(("down", "quantised"), [("Q4_1", True), ("F32", False)])
def test_a_gated_result_is_written_once_in_the_form_that_its_reader_takes(down: Encoding, quantised: bool) -> None:
    made, rng = backend(config()), np.random.default_rng(0)
    gate, up = (made.pack(random_tensor(rng, (96, 64), "Q4_1"), frozenset({"linear"})) for _ in range(2))
    back = made.pack(random_tensor(rng, (64, 96), down), frozenset({"linear"}))
    recorder = Recorder(made._context, 1, 1, 64)
    x, ops = recorder.symbol("tokens", 64), cast(Ops, recorder)
    result = ops.linear(ops.gated_mul(ops.linear(x, gate), ops.linear(x, up), "silu"), back)
    regions = [item for item in fuse(recorder.nodes, cast(Symbol, result)) if isinstance(item, Region)]
    gated = [part for region in regions for part in region.parts if part.up]
    assert [(part.quantised, part.floats) for part in gated] == [(quantised, not quantised)]
    made.close()
