"""The backends that the kit is run on. A new one is a line here; when it passes, it is done.

"name": (how to make one for a config, how far float32 results may be from the truth)
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Backend
from octavo.kernels.native.backend import NativeBackend
from octavo.kernels.torch.backend import TorchBackend

BACKENDS: dict[str, tuple[Callable[[ModelConfig], Backend], float]] = {
    "native": (lambda c: NativeBackend(c, 2, "exact", "float32", activations="int8"), 2e-5),
    "torch": (lambda c: TorchBackend(c, device="cpu", dtype="float32", threads=1), 2e-5),
}
#: Rounding a row of a product to int8, as native does for quantised weights: of values of about 1.
QUANTISED_TOLERANCE = 5e-2
#: Ops that a backend does not have and refuses by name.
WITHOUT = {"native": frozenset({"route", "expert_linear", "combine", "adapter_linear"})}
