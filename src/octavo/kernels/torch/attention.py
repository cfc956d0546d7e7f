"""Paged attention in plain torch: which queries run together, and the arithmetic.

The queries of a step are cut into *groups*. A group is n sequences with the same number of queries each: many sequences
with one query (decodes of similar context length), or a tile of one sequence's chunk. Each group gathers the keys and
values that its queries may see, by slot, straight into the layout of a batched matrix product.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.base import ModelInput

QUERY_TILE = 256  # queries of one chunk that run together: bounds the score matrix at [H, 256, context] float32
MAX_GATHER_ROWS = 1 << 17  # (slot, KV head) rows that one group may gather: 32 MiB of float32 keys at head_dim 64


@dataclass(frozen=True, slots=True)
class Group:
    """n sequences, each with t queries, over at most L keys."""

    num_seqs: int  # n
    rows: slice | torch.Tensor  # the n * t rows of q, sequence by sequence
    kv_rows: torch.Tensor  # [n * H_kv * L] rows of the cache seen as [slots * H_kv, D]
    hidden: torch.Tensor | None  # [n, 1, t, L] bool: keys that a query must not see; None where it sees all


def plan_groups(
    step: ModelInput,
    block_tables: NDArray[np.int32],
    block_size: int,
    num_kv_heads: int,
    window: int | None,
    device: str,
) -> list[Group]:
    """Cut a step's queries into groups, over the cache that ``block_tables`` [S, B] lead into.

    Every layer of one cache group with the same window uses the same ones.
    """
    planner = _Planner(step, block_tables, block_size, num_kv_heads, window, device)
    groups = planner.one_query_groups()
    for seq in range(step.num_one_query_seqs, len(step.context_lens)):
        groups += planner.tiles(seq)
    return groups


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    group: Group,
    scale: float,
    soft_cap: float | None,
) -> torch.Tensor:
    """Attention of one group, in float32.

    q:                 [n * t, H, D], the group's rows
    k_cache, v_cache:  [slots, H_kv, D], one layer
    returns:           [n * t, H * D], float32

    Only slots that hold visible positions are gathered, never the rest of a block: what lies there may be another
    request's NaN, and 0 * NaN would reach the sum.
    """
    n, (rows, num_heads, head_dim) = group.num_seqs, q.shape
    num_kv_heads, t = k_cache.shape[1], rows // group.num_seqs
    queries_per_kv = num_heads // num_kv_heads * t
    keys = k_cache.view(-1, head_dim).index_select(0, group.kv_rows).view(n * num_kv_heads, -1, head_dim).float()
    values = v_cache.view(-1, head_dim).index_select(0, group.kv_rows).view(n * num_kv_heads, -1, head_dim).float()

    # [n, t, H_kv, H / H_kv, D] -> [n * H_kv, (H / H_kv) * t, D]: all queries of a KV head side by side
    q = q.float().view(n, t, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = torch.bmm(q.reshape(n * num_kv_heads, queries_per_kv, head_dim), keys.transpose(1, 2)).mul_(scale)
    if soft_cap is not None:
        scores = (scores / soft_cap).tanh_().mul_(soft_cap)
    if group.hidden is not None:
        scores.view(n, num_heads, t, -1).masked_fill_(group.hidden, float("-inf"))
    weights = scores.sub_(torch.amax(scores, dim=-1, keepdim=True)).exp_()
    attended = torch.bmm(weights, values).div_(weights.sum(dim=-1, keepdim=True))
    return attended.view(n, num_heads, t, head_dim).permute(0, 2, 1, 3).reshape(rows, num_heads * head_dim)


class _Planner:
    """Positions -> cache rows, for one step and one window."""

    def __init__(
        self,
        step: ModelInput,
        block_tables: NDArray[np.int32],
        block_size: int,
        num_kv_heads: int,
        window: int | None,
        device: str,
    ) -> None:
        self.step, self.block_size, self.num_kv_heads, self.device = step, block_size, num_kv_heads, device
        self.block_tables = block_tables
        self.window = window if window is not None else int(step.context_lens.max(initial=1))

    def one_query_groups(self) -> list[Group]:
        """Decodes, longest first; a group ends where padding would more than double its keys, or at its size limit."""
        ends = self.step.context_lens[: self.step.num_one_query_seqs]
        starts = np.maximum(ends - self.window, 0)
        lengths = ends - starts
        order = np.argsort(-lengths, kind="stable")
        groups, first = [], 0
        while first < len(order):
            longest = int(lengths[order[first]])
            fits = max(1, MAX_GATHER_ROWS // (longest * self.num_kv_heads))
            similar = int(np.count_nonzero(lengths[order[first:]] * 2 >= longest))
            seqs = order[first : first + min(fits, similar)]
            first += len(seqs)
            if len(seqs) == len(order):
                seqs = np.arange(len(order))  # one group: keep the rows in place
            groups.append(self._one_query_group(seqs, starts[seqs], lengths[seqs]))
        return groups

    def _one_query_group(self, seqs: NDArray[np.intp], starts: NDArray[np.int32], lengths: NDArray[np.int32]) -> Group:
        offsets = np.arange(lengths.max(), dtype=np.int32)
        padded = offsets >= lengths[:, None]
        # a padded key repeats the last visible one, so that nothing else is ever read
        positions = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        in_place = len(seqs) == self.step.num_one_query_seqs
        return Group(
            num_seqs=len(seqs),
            rows=slice(0, len(seqs)) if in_place else self._to_device(seqs.astype(np.int64)),
            kv_rows=self._kv_rows(seqs, positions),
            hidden=self._to_device(padded[:, None, None, :]) if padded.any() else None,
        )

    def tiles(self, seq: int) -> list[Group]:
        """The chunk of one sequence, in tiles of queries, each over the keys that its last query may see."""
        row, stop = int(self.step.query_starts[seq]), int(self.step.query_starts[seq + 1])
        position = int(self.step.context_lens[seq]) - (stop - row)
        groups = []
        while row < stop:
            size = min(QUERY_TILE, stop - row)
            queries = np.arange(position, position + size)[:, None]
            keys = np.arange(max(0, position - self.window + 1), position + size)
            hidden = (keys > queries) | (keys <= queries - self.window)
            groups.append(
                Group(
                    num_seqs=1,
                    rows=slice(row, row + size),
                    kv_rows=self._kv_rows(np.array([seq]), keys[None, :]),
                    hidden=self._to_device(hidden[None, None]) if size > 1 else None,
                )
            )
            row, position = row + size, position + size
        return groups

    def _kv_rows(self, seqs: NDArray[np.intp], positions: NDArray[np.integer]) -> torch.Tensor:
        """Positions [n, L] of sequences [n] -> rows [n * H_kv * L] of the cache seen as [slots * H_kv, D]."""
        blocks = self.block_tables[seqs[:, None], positions // self.block_size]
        slots = blocks.astype(np.int64) * self.block_size + positions % self.block_size
        rows = slots[:, None, :] * self.num_kv_heads + np.arange(self.num_kv_heads)[:, None]
        return self._to_device(rows.reshape(-1))

    def _to_device(self, array: NDArray[np.int64] | NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)
