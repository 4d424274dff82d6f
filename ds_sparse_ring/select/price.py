"""Selection by one price: an entry is kept where its mean probability per query row exceeds the price.

1. What the forced entries (local blocks, sinks) cover is taken out of the probe's probabilities.
2. A column is one entry per row: it is kept if its mean mass exceeds the price, and what it covers is taken out.
3. A block diagonal is BLOCK entries per row: it is kept if the mean mass left on it exceeds BLOCK times the price. A probe
   aligned to blocks cannot tell a column from a slash, so mass is first put on *token* diagonals; one at offset 64 a + r
   passes through block diagonal a for (64 - r) / 64 of all rows and through a + 1 for the rest, and shares its mass so.

One price for all heads, layers and segments keeps entries of equal marginal value everywhere: budgets move by themselves to
where the mass is. Thresholds only: no sort, and equal masses are all kept or all dropped.
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.probe import (
    Chosen,
    RowProbabilities,
    pattern_mean,
    probe_groups,
    row_probabilities,
    target_segment,
)


def select_by_price(q: Tensor, k: Tensor, context: SequenceContext, scale: float, price: float) -> Chosen:
    """Columns and diagonals of all segments by one price. Collective over the ring; arguments as in `select_index`."""
    config, segments = context.config, context.segments
    patterns = q.shape[0] // context.heads_per_pattern
    reach = [s.end - s.document_begin for s in segments]
    # one run of offsets per segment, as long as it reaches: many short documents take little
    bounds = list(accumulate(reach))
    ends = torch.tensor(bounds, device=q.device)
    mass = q.new_zeros(patterns, sum(reach), dtype=torch.float32)
    columns = [torch.empty(0, 2, dtype=torch.int64, device=q.device)]
    for probe in row_probabilities(q, k, probe_groups(segments, config), context, scale):
        target = target_segment(segments, probe.segment, config)
        if target is None:
            continue
        left = pattern_mean(probe.p, context.heads_per_pattern).float()  # [P, r, b, T]
        _take_out_forced(left, probe, context)
        taken = left.mean(1) > price  # [P, b, T]
        pattern, block, token = taken.nonzero(as_tuple=True)
        columns.append(torch.stack([target * patterns + pattern, probe.key_tokens[block, token]], 1))
        left.masked_fill_(taken[:, None], 0)
        end = bounds[target]
        mass[:, end - reach[target] : end] += _block_diagonal_mass(left, probe, reach[target])
    mass = context.axes.ring_sum(mass)
    pattern, place = (mass > BLOCK * price).nonzero(as_tuple=True)
    segment = torch.searchsorted(ends, place, right=True)
    offset = place - ends[segment] + torch.tensor(reach, device=q.device)[segment]
    diagonals = torch.stack([segment * patterns + pattern, offset], 1)
    return Chosen(diagonals, context.axes.ring_gather_rows(torch.cat(columns)))


def _take_out_forced(left: Tensor, probe: RowProbabilities, context: SequenceContext) -> None:
    """Set to 0 what every pattern keeps anyway: the nearest blocks of each row, and the document's first tokens."""
    config, begin = context.config, context.segments[probe.segment].document_begin
    row_blocks = probe.rows // BLOCK
    near = probe.key_blocks > row_blocks[0] - config.local_blocks
    local = row_blocks[:, None] - probe.key_blocks[None, near] < config.local_blocks
    left[:, :, near] = left[:, :, near].masked_fill(local[..., None], 0)
    first = probe.key_blocks * BLOCK < begin * BLOCK + config.sink_tokens
    sinks = probe.key_tokens[first] < begin * BLOCK + config.sink_tokens
    left[:, :, first] = left[:, :, first].masked_fill(sinks, 0)


def _block_diagonal_mass(left: Tensor, probe: RowProbabilities, size: int) -> Tensor:
    """Mean mass per block diagonal, ``[P, size]``, from probabilities ``[P, r, b, T]`` put on token diagonals.

    Row t and key j of blocks c apart, with t mod 64 - j mod 64 = x, lie on the token diagonal 64 c + x, which shares its mass:
    (64 - |x|) / 64 to block diagonal c, and |x| / 64 to c + 1 or c - 1 by the sign of x.
    """
    x = (probe.rows % BLOCK)[:, None] - torch.arange(BLOCK, device=left.device)  # [r, T]
    share = x.to(left.dtype) / BLOCK
    weights = torch.stack([(-share).clamp(min=0), 1 - share.abs(), share.clamp(min=0)], -1)  # to c - 1, c, c + 1
    per_block = torch.einsum("prbt,rtw->prbw", left, weights)
    centre = (probe.rows // BLOCK)[:, None] - probe.key_blocks[None, :]  # [r, b]
    offsets = centre[..., None] + torch.tensor([-1, 0, 1], device=left.device)
    mass = left.new_zeros(left.shape[0], size + 1)  # the last entry collects what lies beyond the segment's reach
    mass.index_add_(1, offsets.clamp(0, size).flatten(), per_block.flatten(1))
    return mass[:, :size] / probe.rows.numel()
