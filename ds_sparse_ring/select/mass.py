"""Selection by mass: top-p and fixed counts, columns and slashes chosen apart (MTraining, arXiv 2510.18830, section 4.1).

Columns are ranked by the probability that the probe's rows put on them, slashes (token diagonals) likewise; each kind keeps the
fewest of most mass that reach the share p (the entry that crosses it included), within its bounds. Equal masses are taken in
order of their position. A chosen token diagonal at offset 64 a + r keeps the block diagonals a and, for r > 0, a + 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.comm import Axes
from ds_sparse_ring.config import FixedSelector, TopPSelector
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

_BINS = 1024


@dataclass(frozen=True)
class Budget:
    """Keep at least the share ``p`` of the mass and ``low`` entries, at most ``high`` entries."""

    p: float
    low: int
    high: int | None


def select_by_mass(
    q: Tensor, k: Tensor, context: SequenceContext, scale: float, selector: TopPSelector | FixedSelector
) -> Chosen:
    """Columns and diagonals of all segments by ranked mass. Collective over the ring; arguments as in `select_index`."""
    config, segments = context.config, context.segments
    patterns = q.shape[0] // context.heads_per_pattern
    column_budget, slash_budget = budgets(selector)
    empty = torch.empty(0, 2, dtype=torch.int64, device=q.device)
    columns, diagonals = [empty], [empty]
    for probe in row_probabilities(q, k, probe_groups(segments, config), context, scale):
        target = target_segment(segments, probe.segment, config)
        if target is None:
            continue
        p = pattern_mean(probe.p, context.heads_per_pattern).double()  # [P, r, b, T]
        pattern, token = _top(p.mean(1).flatten(1), probe.key_tokens.flatten(), column_budget, context.axes)
        columns.append(torch.stack([target * patterns + pattern, token], 1))
        slashes = _token_diagonal_mass(p, probe, context)
        offsets = torch.arange(slashes.shape[1], device=q.device)
        pattern, offset = _top(slashes, offsets, slash_budget, None)
        block = torch.cat([offset // BLOCK, -(-offset // BLOCK)])
        pairs = torch.stack([target * patterns + torch.cat([pattern, pattern]), block], 1)
        diagonals.append(pairs[block < segments[target].end - segments[target].document_begin])
    return Chosen(torch.cat(diagonals), torch.cat(columns))


def budgets(selector: TopPSelector | FixedSelector) -> tuple[Budget, Budget]:
    """What a selector keeps of columns and of token diagonals."""
    if isinstance(selector, FixedSelector):
        return Budget(0, selector.columns, selector.columns), Budget(0, selector.slashes, selector.slashes)
    return (
        Budget(selector.p, selector.min_columns, selector.max_columns),
        Budget(selector.p, selector.min_slashes, selector.max_slashes),
    )


def _token_diagonal_mass(p: Tensor, probe: RowProbabilities, context: SequenceContext) -> Tensor:
    """Mean mass of token diagonals, ``[P, document tokens up to the segment's end]``. Collective over the ring.

    Sums of probabilities in fp32 are exact in fp64, unless these are a factor of 2**20 apart, and the division comes last: so
    diagonals of equal probabilities tie, however their keys are spread over ranks.
    """
    segment = context.segments[probe.segment]
    reach = (segment.end - segment.document_begin) * BLOCK
    mass = p.new_zeros(p.shape[0], reach)
    keys = probe.key_tokens.flatten()
    for i, row in enumerate(probe.rows.tolist()):  # within a row each key has its own offset, so indices never repeat
        past = keys <= row
        mass[:, row - keys[past]] += p[:, i].flatten(1)[:, past]
    return context.axes.ring_sum(mass) / probe.rows.numel()


def _top(mass: Tensor, ids: Tensor, budget: Budget, axes: Axes | None) -> tuple[Tensor, Tensor]:
    """The entries of most mass of each pattern that a budget keeps, the same on all ranks: (pattern, id) pairs.

    Only candidates travel: a histogram over logarithmic bins, reduced over the ring, says down to which bin any entry can be
    kept; those entries are gathered, sorted exactly and cut.

    Args:
        mass: ``[P, x]`` float64, this rank's entries; ids: ``[x]``.
        axes: the ring over which entries are spread; None if every rank holds all of them.
    """
    patterns = mass.shape[0]
    bins = (-mass.clamp(min=1e-300).log2() * 8).clamp(0, _BINS - 1).long()
    histogram = mass.new_zeros(2, patterns, _BINS)
    histogram[0].scatter_add_(1, bins, mass)
    histogram[1].scatter_add_(1, bins, torch.ones_like(mass))
    if axes is not None:
        histogram = axes.ring_sum(histogram)
    by_mass, by_count = histogram.cumsum(2)
    total, count = by_mass[:, -1:], by_count[:, -1:]
    # relative slack: the bin must not be missed for a sum that rounds the other way when it is added in another order
    enough = (by_mass >= budget.p * total * (1 + 1e-12)) & (by_count >= count.clamp(max=budget.low))
    if budget.high is not None:
        enough |= by_count >= budget.high
    enough[:, -1] = True
    last_bin = enough.int().argmax(1)
    pattern, at = (bins <= last_bin[:, None]).nonzero(as_tuple=True)
    candidates = torch.stack([pattern.double(), ids[at].double(), mass[pattern, at]], 1)  # ids are exact in float64
    if axes is not None:
        candidates = axes.ring_gather_rows(candidates)
    kept = [_cut(candidates[candidates[:, 0] == p, 1:], budget, float(total[p])) for p in range(patterns)]
    rows = torch.cat([torch.full_like(ids_p, p) for p, ids_p in enumerate(kept)])
    return rows, torch.cat(kept)


def _cut(candidates: Tensor, budget: Budget, total: float) -> Tensor:
    """Ids of the entries that one pattern keeps, from its candidates ``[m, 2]`` (id, mass)."""
    candidates = candidates[candidates[:, 0].argsort()]
    candidates = candidates[candidates[:, 1].argsort(descending=True, stable=True)]  # equal masses: lowest id first
    reached = int((candidates[:, 1].cumsum(0) < budget.p * total).sum()) + 1
    count = max(reached if budget.p > 0 else 0, budget.low)
    return candidates[: count if budget.high is None else min(count, budget.high), 0].long()
