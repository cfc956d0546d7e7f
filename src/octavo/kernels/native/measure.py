"""What the machine can do: one half of a bound on step times. The other is ``kernels.cost``."""

from __future__ import annotations

from octavo import _native
from octavo.kernels.base import MachineSpeed

#: From what the caches hold to what only memory does: the rate falls in steps, at sizes that differ by CPU and tenant.
WORKING_SETS = tuple(mebibytes << 20 for mebibytes in (4, 8, 16, 32, 64, 128, 256))
SECONDS_EACH = 0.04


def measure_machine(context: _native.Context) -> MachineSpeed:
    """Reading and arithmetic with the context's threads and instruction set. Takes 256 MiB and half a second."""
    rates = _native.read_bandwidths(context, WORKING_SETS, SECONDS_EACH)
    return MachineSpeed(
        read_bytes_per_s=tuple(zip(WORKING_SETS, rates, strict=True)),
        macs_per_s=dict(_native.multiply_add_rates(context, SECONDS_EACH)),
    )
