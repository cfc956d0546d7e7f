"""Mixture of experts and adapters: products of rows with matrices that each row has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from octavo.kernels.base import Array, RoutingRule


@dataclass(frozen=True, slots=True)
class TorchRouting:
    """Each row's experts, the best first, and what their results weigh."""

    experts: torch.Tensor  # [T, k]
    weights: torch.Tensor  # [T, k] float32


class ExpertOps:
    """The ops of ``kernels.base.Ops`` that group rows by what they have chosen."""

    def route(self, logits: torch.Tensor, rule: RoutingRule, correction: torch.Tensor | None = None) -> TorchRouting:
        wide = logits.float()
        scores = wide.softmax(dim=-1) if rule.score == "softmax" else wide.sigmoid()
        ranks = scores if correction is None else scores + correction
        if rule.num_groups > 1:
            groups = ranks.view(len(ranks), rule.num_groups, -1)
            standing = groups.sort(dim=-1, descending=True).values[..., : rule.group_best].sum(dim=-1)
            kept = _best(standing, rule.num_chosen_groups)
            lost = torch.ones_like(standing, dtype=torch.bool).scatter(1, kept, value=False)
            ranks = groups.masked_fill(lost.unsqueeze(-1), float("-inf")).view_as(ranks)
        experts = _best(ranks, rule.num_chosen)
        weights = scores.gather(1, experts)
        if rule.normalise:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return TorchRouting(experts, weights * rule.scale)

    def expert_linear(
        self, x: torch.Tensor, weight: torch.Tensor, routing: TorchRouting, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_rows, k = routing.experts.shape
        rows = x.repeat_interleave(k, 0) if x.dim() == 2 else x.reshape(num_rows * k, -1)
        out = rows.new_empty(num_rows * k, weight.shape[1])
        for expert, chosen in _by_choice(routing.experts.reshape(-1)):
            product = torch.mm(rows.index_select(0, chosen), weight[expert].t())
            out.index_copy_(0, chosen, product if bias is None else product + bias[expert])
        return out.view(num_rows, k, -1)

    def combine(self, x: torch.Tensor, routing: TorchRouting) -> torch.Tensor:
        weighted = x.float() * routing.weights.unsqueeze(-1)
        total = weighted[:, 0]
        for rank in range(1, weighted.shape[1]):
            total = total + weighted[:, rank]
        return total.to(x.dtype)

    def adapter_linear(
        self, y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, adapter_rows: Array
    ) -> torch.Tensor:
        out = y.clone()
        for adapter, rows in _by_choice(torch.as_tensor(adapter_rows, device=y.device)):
            if adapter >= 0:
                low = torch.mm(x.index_select(0, rows), a[adapter].t())
                out.index_add_(0, rows, torch.mm(low, b[adapter].t()))
        return out


def _best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """Indices [T, count] of the best of each row, the lowest index first among equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _by_choice(choices: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    """(choice, indices of those who made it), of all choices that were made, ascending."""
    for choice in torch.unique(choices).tolist():
        yield choice, torch.nonzero(choices == choice).view(-1)
