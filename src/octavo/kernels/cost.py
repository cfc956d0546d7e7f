"""What the packed weights cost a step, whichever backend has packed them: one half of a bound on step times."""

from __future__ import annotations

from octavo.core.model_config import ModelConfig
from octavo.kernels.base import ModelCost, WeightUse


class CostLedger:
    """Adds up the weights as they are packed."""

    def __init__(self) -> None:
        self._layer_bytes = self._head_bytes = self._table_bytes = 0
        self._quantised_macs = self._float_macs = self._head_macs = 0
        self._head_is_quantised = False

    def add(self, uses: frozenset[WeightUse], *, num_bytes: int, macs: int, is_quantised: bool = False) -> None:
        """One tensor. macs: multiply-adds of one row with it; is_quantised: that row meets it as integers."""
        if "head" in uses:
            self._head_bytes += num_bytes
            self._head_macs += macs
            self._head_is_quantised = is_quantised
        elif uses & {"experts", "adapter"}:
            return  # a step need not read any of them
        elif "embedding" in uses:
            self._table_bytes += num_bytes
        else:
            self._layer_bytes += num_bytes
            if "linear" in uses and is_quantised:
                self._quantised_macs += macs
            elif "linear" in uses:
                self._float_macs += macs

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
            windows=config.windows,
        )
