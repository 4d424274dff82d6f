"""Recall: the share of attention mass that an index keeps, against dense attention on the same queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import Index, mask, segment_of_blocks
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.probe import RowGroup, pattern_mean, probe_groups, row_probabilities


@torch.no_grad()
def kept_mass(q: Tensor, k: Tensor, index: Index, groups: list[RowGroup], context: SequenceContext, *, scale: float) -> Tensor:
    """Mass that the index keeps for each row of ``groups``, mean over a pattern's heads: ``[P, rows]``. Collective."""
    kept = []
    for probe in row_probabilities(q, k, groups, context, scale):
        p = pattern_mean(probe.p, index.heads_per_pattern).flatten(2)  # [P, r, b * T]
        keys = probe.key_tokens.flatten()
        visible = torch.stack([mask(index, h * index.heads_per_pattern, probe.rows, keys) for h in range(index.patterns)])
        kept.append((p * visible).sum(-1))
    return context.axes.ring_sum(torch.cat(kept, 1))


def estimated_recall(q: Tensor, k: Tensor, index: Index, context: SequenceContext, *, scale: float) -> Tensor:
    """Mass kept on the last rows of every segment, ``[P]``: cheap, and for ``probe: previous`` out of sample. Collective."""
    return kept_mass(q, k, index, probe_groups(context.segments, context.config), context, scale=scale).mean(1)


def true_recall(q: Tensor, k: Tensor, index: Index, context: SequenceContext, *, scale: float, rows: int) -> dict[str, float]:
    """Mass kept on ``rows`` queries spread evenly over the valid tokens, mean over patterns. Collective.

    Returns:
        ``early``, ``middle``, ``late``: means over the three thirds of the stream; ``worst``: mean over the worst 5 % of all
        (pattern, query) pairs; ``mean``: over all.
    """
    kept = kept_mass(q, k, index, sampled_groups(context, rows), context, scale=scale)
    thirds = torch.tensor_split(kept, 3, dim=1)
    flat = kept.flatten().sort().values
    worst = flat[: max(1, flat.numel() // 20)]
    names = ("early", "middle", "late")
    # fewer than three rows leave a third empty: the mean stands in, since every report must have the same keys
    out = {n: float(part.mean() if part.numel() else kept.mean()) for n, part in zip(names, thirds, strict=True)}
    return out | {"worst": float(worst.mean()), "mean": float(kept.mean())}


def sampled_groups(context: SequenceContext, rows: int) -> list[RowGroup]:
    """Queries spread evenly over the valid tokens of the stream, grouped by segment."""
    valid = torch.cat([torch.arange(s.begin * BLOCK, s.valid_end) for s in context.segments])
    chosen = valid[torch.linspace(0, valid.numel() - 1, min(rows, valid.numel())).round().long()].unique()
    segments = segment_of_blocks(context.segments, chosen // BLOCK)
    return [RowGroup(int(s), chosen[segments == s]) for s in segments.unique()]
