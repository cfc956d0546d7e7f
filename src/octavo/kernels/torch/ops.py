"""The ops of one step, run at once. Only aten ops that every device has, see tests/kernels/test_torch_mps_table.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.core.cache_group import CacheGroup
from octavo.core.model_config import RopeTable
from octavo.kernels.base import Activation, KVCacheLayout, ModelInput, PositionScale
from octavo.kernels.reference.rope import position_factors, rotation_table
from octavo.kernels.torch.attention import Group, attend, plan_groups
from octavo.kernels.torch.experts import ExpertOps

HEAD_SLICE = 16384  # vocabulary rows of a half-precision head that are widened to float32 at a time


Planes = list[tuple[torch.Tensor, torch.Tensor]]


def layer_planes(kv_caches: Sequence[torch.Tensor], groups: Sequence[CacheGroup]) -> Planes:
    """Views of each group's cache [layers, 2, blocks, block_size, H_kv, D]: per layer K and V as [slots, H_kv, D].

    A slot is block_id * block_size + offset.
    """
    planes: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for kv_cache, group in zip(kv_caches, groups, strict=True):
        slots = kv_cache.view(*kv_cache.shape[:2], -1, *kv_cache.shape[4:])
        planes |= {layer: (plane[0], plane[1]) for layer, plane in zip(group.layers, slots, strict=True)}
    return [planes[layer] for layer in range(len(planes))]


class RotationTable:
    """cos and sin by position on the device, grown by doubling as positions are met."""

    def __init__(self, table: RopeTable, device: str) -> None:
        self._table, self._device = table, device
        self._cos = self._sin = torch.empty(0)

    def rows(self, positions: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [T, 1, dim] of ``positions`` [T], all below num_positions; sin is negated in the first half.

        x * cos + swap_halves(x) * sin is then the rotation.
        """
        if num_positions > len(self._cos):
            cos, sin = rotation_table(self._table, max(num_positions, 2 * len(self._cos), 1024))
            self._cos = torch.from_numpy(np.concatenate([cos, cos], axis=1)).to(self._device)
            self._sin = torch.from_numpy(np.concatenate([-sin, sin], axis=1)).to(self._device)
        return self._cos.index_select(0, positions).unsqueeze(1), self._sin.index_select(0, positions).unsqueeze(1)


Rotations = dict[RopeTable, RotationTable]


class TorchOps(ExpertOps):
    """``kernels.base.Ops`` on torch tensors: activations in the backend's dtype, norms and attention in float32."""

    def __init__(
        self, step: ModelInput, planes: Planes, layout: KVCacheLayout, rotations: Rotations, device: str
    ) -> None:
        self.token_ids = self._to(step.token_ids, device)
        self.positions = self._to(step.positions, device)
        self._step, self._planes, self._layout, self._device = step, planes, layout, device
        self._logit_rows = self._to(step.logit_rows, device)
        self._cache_group = {layer: g for g, group in enumerate(layout.groups) for layer in group.layers}
        written = np.flatnonzero(step.slot_mapping[0] >= 0)  # in one group as in all
        self._written = None if len(written) == step.num_tokens else self._to(written, device)
        self._slots = [self._to(slots[written].astype(np.int64), device) for slots in step.slot_mapping]
        self._groups: dict[tuple[int, int | None], list[Group]] = {}
        self._rotations = rotations
        self._rotation_rows: dict[RopeTable, tuple[torch.Tensor, torch.Tensor]] = {}

    @staticmethod
    def _to(array: NDArray[np.int32] | NDArray[np.int64] | NDArray[np.float32], device: str) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    def embedding(self, table: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return table.index_select(0, token_ids)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, num_heads: int = 1) -> torch.Tensor:
        wide = x.float().view(len(x), num_heads, x.shape[-1] // num_heads)  # there may be no rows: -1 could be anything
        mean_square = (wide * wide).mean(dim=-1, keepdim=True)
        return (wide * torch.rsqrt(mean_square + eps) * weight).view_as(x).to(x.dtype)

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(dim=-1, keepdim=True)
        normal = wide * torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps) * weight
        return (normal if bias is None else normal + bias).to(x.dtype)

    def linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())

    def rope(self, x: torch.Tensor, positions: torch.Tensor, num_heads: int, table: RopeTable) -> torch.Tensor:
        """The rotation of the step's positions, gathered once for all layers of a table; arithmetic in float32."""
        assert positions is self.positions, "rope rotates by the step's positions"
        heads = x.view(x.shape[0], num_heads, -1)
        cos, sin = self._rotation(table)
        rotated = heads[..., : table.dim].float()
        rotated = (rotated * cos).addcmul_(rotated.roll(table.dim // 2, -1), sin).to(x.dtype)
        if table.dim < heads.shape[-1]:
            rotated = torch.cat([rotated, heads[..., table.dim :]], dim=-1)
        return rotated.view_as(x)

    def _rotation(self, table: RopeTable) -> tuple[torch.Tensor, torch.Tensor]:
        if table not in self._rotation_rows:
            rotation = self._rotations.setdefault(table, RotationTable(table, self._device))
            num_positions = int(self._step.positions.max(initial=0)) + 1
            self._rotation_rows[table] = rotation.rows(self.positions, num_positions)
        return self._rotation_rows[table]

    def scale_by_position(self, x: torch.Tensor, positions: torch.Tensor, scale: PositionScale) -> torch.Tensor:
        assert positions is self.positions, "scale_by_position takes the step's positions"
        factors = self._to(position_factors(scale, self._step.positions), self._device)
        return (x.float() * factors.unsqueeze(1)).to(x.dtype)

    def write_kv(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        for cache, rows in zip(self._planes[layer], (k, v), strict=True):
            if self._written is not None:
                rows = rows.index_select(0, self._written)
            cache.index_copy_(0, self._slots[self._cache_group[layer]], rows.view(-1, *cache.shape[1:]))

    def paged_attention(
        self, layer: int, q: torch.Tensor, *, scale: float, window: int | None = None, soft_cap: float | None = None
    ) -> torch.Tensor:
        layout, which = self._layout, (self._cache_group[layer], window)
        if which not in self._groups:
            self._groups[which] = plan_groups(
                self._step,
                self._step.block_tables[which[0]],
                layout.block_size,
                layout.num_kv_heads,
                window,
                self._device,
            )
        heads = q.view(q.shape[0], -1, layout.head_dim)
        keys, values = self._planes[layer]
        out = torch.empty_like(q)
        for group in self._groups[which]:
            if isinstance(group.rows, slice):
                out[group.rows] = attend(heads[group.rows], keys, values, group, scale, soft_cap)
            else:
                rows = heads.index_select(0, group.rows)
                out.index_copy_(0, group.rows, attend(rows, keys, values, group, scale, soft_cap).to(q.dtype))
        return out

    def gated_mul(self, gate: torch.Tensor, up: torch.Tensor, activation: Activation) -> torch.Tensor:
        return self.activation(gate, activation).mul_(up)

    def activation(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        if activation == "silu":
            return torch.nn.functional.silu(x)
        return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu" else "none")

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def select_logit_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x.index_select(0, self._logit_rows)

    def logits(self, x: torch.Tensor, head: torch.Tensor, soft_cap: float | None = None) -> torch.Tensor:
        """In float32 whatever the weights' dtype: a logit of 20 rounded to bfloat16 is off by up to 0.06."""
        if head.dtype == torch.float32:
            logits = torch.mm(head, x.float().t()).t().contiguous()  # up to twice as fast for few rows as x @ head^T
        else:
            wide = x.float()
            logits = torch.cat([torch.mm(wide, part.float().t()) for part in torch.split(head, HEAD_SLICE)], dim=-1)
        return logits if soft_cap is None else (logits / soft_cap).tanh_().mul_(soft_cap)
