"""A head's attention and what the index keeps of it, pooled to a small picture: rows spread over the sequence, cells of keys.

Made of a few rows only, so it costs as much as measuring recall on them; nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import Index, density
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.probe import RowGroup, RowProbabilities, row_probabilities
from ds_sparse_ring.select.recall import sampled_groups, visible

CELLS = 96
"""Rows of a map, and cells that the keys are pooled to."""
_UNIT = 8
"""Tokens that are pooled first in sequences too short for whole blocks."""
_ROWS_AT_ONCE = 8
"""Scores of so many rows exist at a time."""


@dataclass(frozen=True)
class AttentionMap:
    """Of one query head.

    Attributes:
        head: its number on this rank. tokens: of the stream, padding of the layout included.
        rows: the query tokens, int64 ``[r]``, ascending.
        pooled: float32 ``[4, r, c]``: probability, the part of it that the index keeps, and the shares of a cell's keys that are
            read on block diagonals and as columns.
        density: active share of the causal area, float64 scalar on the device.
    """

    head: int
    tokens: int
    rows: Tensor
    pooled: Tensor
    density: Tensor


@torch.no_grad()
def attention_map(q: Tensor, k: Tensor, index: Index, context: SequenceContext, *, head: int, scale: float) -> AttentionMap:
    """The map of one head. Collective over the ring.

    Args:
        q: this rank's queries after RoPE, ``[H, n, D]``; k: its keys, ``[K, n, D]``.
        head: the query head, one of H.
        scale: multiplies q.k before the softmax.
    """
    groups = [
        RowGroup(group.segment, rows) for group in sampled_groups(context, CELLS) for rows in group.rows.split(_ROWS_AT_ONCE)
    ]
    blocks, kv_head = context.segments[-1].end, head * k.shape[0] // q.shape[0]
    unit = BLOCK if blocks >= CELLS else _UNIT
    units = blocks * BLOCK // unit
    cells = min(CELLS, units)
    parts = [
        _pooled(p, index, head // index.heads_per_pattern, units, cells)
        for p in row_probabilities(q[head : head + 1], k[kv_head : kv_head + 1], groups, context, scale)
    ]
    pooled = context.axes.ring_sum(torch.cat(parts, 1))
    rows = torch.cat([group.rows for group in groups])
    return AttentionMap(head, blocks * BLOCK, rows, pooled, density(index)[head // index.heads_per_pattern])


def _pooled(part: RowProbabilities, index: Index, pattern: int, units: int, cells: int) -> Tensor:
    """This rank's keys for the rows of a group, ``[4, r, c]``."""
    device, tokens = part.p.device, index.segments[-1].end * BLOCK
    row_blocks, unit = part.rows // BLOCK, tokens // units
    whole, single = (table[pattern] for table in visible(index, part.segment, row_blocks, part.key_blocks))
    diagonals = whole[..., None] & (part.key_tokens <= part.rows[:, None, None])
    columns = single & ~whole[..., None] & (part.key_blocks < row_blocks[:, None])[..., None]
    p = part.p[0].float()
    fields = torch.stack([p, p * (diagonals | columns), diagonals.float(), columns.float()])  # [4, r, b, T]
    by_unit = fields.unflatten(-1, (BLOCK // unit, unit)).sum(-1).flatten(2)
    place = torch.arange(BLOCK // unit, device=device)
    cell = (part.key_blocks[:, None] * (BLOCK // unit) + place).flatten() * cells // units
    out = torch.zeros(4, p.shape[0], cells, device=device).index_add_(2, cell, by_unit)
    first_units = (torch.arange(cells + 1, device=device) * units + cells - 1) // cells
    out[2:] /= first_units.diff() * unit
    return out
