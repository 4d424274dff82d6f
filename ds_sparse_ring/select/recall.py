"""Recall: the share of attention mass that an index keeps, against dense attention on the same queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import Index, VerticalSlash, segment_of_blocks
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.probe import RowGroup, finite, gather_rows, pattern_mean, probe_groups, ring_largest, row_scores

_PROBES, _ROWS_OF_A_PROBE = 64, 8
"""Probes, evenly spread, and rows of each that recall is measured on. All 64 rows took 14 % of a step of 256K tokens; their
mean is little better known. Nor does it need each of a thousand short segments."""


@torch.no_grad()
def kept_mass(q: Tensor, k: Tensor, index: Index, groups: list[RowGroup], context: SequenceContext, *, scale: float) -> Tensor:
    """Mass that the index keeps for each row of ``groups``, mean over a pattern's heads: ``[P, rows]``. Collective.

    Every score is computed once: the sum of all exponentials, and of those that the index keeps, are reduced over the ring.

    Raises:
        SparseRingError: a score is NaN or infinite.
    """
    gathered = gather_rows(q, groups, context)
    largest = gathered.q.new_full(gathered.q.shape[:2], float("-inf"))  # [H, all rows]
    sums = gathered.q.new_zeros(2, *gathered.q.shape[:2])  # all, kept
    for group, part in zip(groups, gathered.parts, strict=True):
        scores, key_blocks = row_scores(gathered, part, k, group, context, scale)
        if scores.numel():
            largest[:, part] = scores.amax((-2, -1))
            exponentials = scores.sub_(finite(largest[:, part])[..., None, None]).exp_()
            sums[:, :, part] = _sums(exponentials, index, group.segment, gathered.tokens[part] // BLOCK, key_blocks)
    _, share = ring_largest(largest, context)
    total, kept = context.axes.ring_sum(sums.mul_(share))
    return pattern_mean(kept / total, index.heads_per_pattern)


def _sums(exponentials: Tensor, index: Index, segment: int, row_blocks: Tensor, key_blocks: Tensor) -> Tensor:
    """Sums over all keys, and over those that the index keeps, of ``[H, r, b, T]`` (overwritten): ``[2, H, r]``."""
    whole, single = visible(index, segment, row_blocks, key_blocks)
    by_pattern = exponentials.unflatten(0, (index.patterns, index.heads_per_pattern))
    blocks = by_pattern.sum(-1)  # [P, heads, r, b]
    total = blocks.sum(-1)
    columns = by_pattern.mul_(single[:, None, None]).sum(-1)
    columns.masked_fill_(key_blocks >= row_blocks[:, None], 0)
    return torch.stack([total, torch.where(whole[:, None], blocks, columns).sum(-1)]).flatten(1, 2)


def visible(index: Index, segment: int, row_blocks: Tensor, key_blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Key blocks that rows of a segment read in whole, bool ``[P, r, b]``, and which keys are columns, bool ``[P, b, T]``.

    What lies in the future may be among them: its probability is 0.
    """
    if isinstance(index, VerticalSlash):
        diagonals, columns = index.tables(segment)
        whole = diagonals[:, (row_blocks[:, None] - key_blocks).clamp(min=0)]
        return whole, columns.unflatten(1, (-1, BLOCK))[:, key_blocks - index.segments[segment].document_begin]
    listed = []
    for pattern in range(index.patterns):
        target, counts = index.key_blocks(segment, pattern, row_blocks)
        beyond = index.segments[-1].end
        table = torch.zeros(row_blocks.numel(), beyond + 1, dtype=torch.bool, device=target.device)
        listed.append(table.scatter_(1, torch.where(counts, target, beyond), True)[:, key_blocks])
    return torch.stack(listed), table.new_zeros(index.patterns, key_blocks.numel(), BLOCK)


def estimated_recall(q: Tensor, k: Tensor, index: Index, context: SequenceContext, *, scale: float) -> Tensor:
    """Mass kept on the last rows of segments, ``[P]``: cheap, and for ``probe: previous`` out of sample. Collective.

    A mean over a few rows of a few probes, evenly spread, the last ones among them.
    """
    probes = probe_groups(context.segments, context.config)
    groups = [probes[place] for place in _spread(len(probes), _PROBES)]
    rows = [RowGroup(group.segment, group.rows[_spread(group.rows.numel(), _ROWS_OF_A_PROBE)]) for group in groups]
    return kept_mass(q, k, index, rows, context, scale=scale).mean(1)


def _spread(count: int, most: int) -> Tensor:
    """At most so many of ``count`` places, evenly spread, the last one among them."""
    kept = min(most, count)
    return torch.arange(1, kept + 1) * count // max(kept, 1) - 1


def true_recall(q: Tensor, k: Tensor, index: Index, context: SequenceContext, *, scale: float, rows: int) -> dict[str, float]:
    """Mass kept on ``rows`` queries spread evenly over the valid tokens, mean over patterns. Collective.

    Returns:
        ``early``, ``middle``, ``late``: means over the three thirds of the stream; ``worst``: mean over the worst 5 % of all
        (pattern, query) pairs; ``mean``: over all.
    """
    kept = kept_mass(q, k, index, sampled_groups(context, rows), context, scale=scale)
    # fewer than three rows leave a third empty: the mean stands in, since every report must have the same keys
    thirds = [part if part.numel() else kept for part in torch.tensor_split(kept, 3, dim=1)]
    worst = kept.flatten().sort().values[: max(1, kept.numel() // 20)]
    means = torch.stack([part.mean() for part in (*thirds, worst, kept)]).tolist()  # the host waits once
    return dict(zip(("early", "middle", "late", "worst", "mean"), means, strict=True))


def sampled_groups(context: SequenceContext, rows: int) -> list[RowGroup]:
    """Queries spread evenly over the valid tokens of the stream, grouped by segment."""
    valid = torch.cat([torch.arange(s.begin * BLOCK, s.valid_end) for s in context.segments])
    chosen = valid[torch.linspace(0, valid.numel() - 1, min(rows, valid.numel())).round().long()].unique()
    segments = segment_of_blocks(context.segments, chosen // BLOCK)
    return [RowGroup(int(s), chosen[segments == s]) for s in segments.unique()]
