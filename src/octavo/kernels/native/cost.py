"""What the packed weights cost a step, and what the machine can do: the two halves of a bound on step times."""

from __future__ import annotations

from octavo import _native
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import MachineSpeed, ModelCost, WeightUse

#: From what the caches hold to what only memory does: the rate falls in steps, at sizes that differ by CPU and tenant.
WORKING_SETS = tuple(mebibytes << 20 for mebibytes in (4, 8, 16, 32, 64, 128, 256))
SECONDS_EACH = 0.04


class CostLedger:
    """Adds up the weights as they are packed."""

    def __init__(self, context: _native.Context) -> None:
        self._context = context
        self._layer_bytes = self._head_bytes = self._table_bytes = 0
        self._quantised_macs = self._float_macs = self._head_macs = 0
        self._head_is_quantised = False

    def add_vector(self, vector: _native.Vector) -> None:
        """A norm or a bias."""
        self._layer_bytes += 4 * vector.size

    def add_matrix(self, name: str, matrix: _native.PackedMatrix, uses: frozenset[WeightUse]) -> None:
        """A matrix under its canonical name (an architecture's ``names``)."""
        rows, columns = matrix.shape
        if "linear" not in uses:
            self._table_bytes += matrix.num_bytes
        elif "embedding" in uses or name == "head.weight":
            self._head_bytes += matrix.num_bytes
            self._head_macs += rows * columns
            self._head_is_quantised = matrix.reads_quantised(self._context)
        else:
            self._layer_bytes += matrix.num_bytes
            if matrix.reads_quantised(self._context):
                self._quantised_macs += rows * columns
            else:
                self._float_macs += rows * columns

    def cost(self, config: ModelConfig, *, kv_bytes: int) -> ModelCost:
        """kv_bytes: of one cached position, all layers."""
        return ModelCost(
            layer_bytes=self._layer_bytes,
            head_bytes=self._head_bytes,
            table_bytes=self._table_bytes,
            kv_bytes=kv_bytes,
            quantised_macs=self._quantised_macs,
            float_macs=self._float_macs,
            head_macs=self._head_macs,
            head_is_quantised=self._head_is_quantised,
            attention_macs=2 * config.num_layers * config.num_heads * config.head_dim,  # Q K^T, and weights times V
            window=config.sliding_window,
        )


def measure_machine(context: _native.Context) -> MachineSpeed:
    """Reading and arithmetic with the context's threads and instruction set. Takes 256 MiB and half a second."""
    rates = _native.read_bandwidths(context, WORKING_SETS, SECONDS_EACH)
    return MachineSpeed(
        read_bytes_per_s=tuple(zip(WORKING_SETS, rates, strict=True)),
        macs_per_s=dict(_native.multiply_add_rates(context, SECONDS_EACH)),
    )
