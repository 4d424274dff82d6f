"""Vertical-slash patterns of a given density, made from a seed.

``isolated`` patterns scatter their diagonals one by one, ``columns`` keeps only the nearest diagonals and spends the rest on
columns. Neighbouring diagonals share key blocks between query blocks, isolated ones do not, so speed depends on the kind.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash, causal_cost
from ds_sparse_ring.layout import BLOCK


def vertical_slash_pattern(
    segments: tuple[Segment, ...],
    heads: int,
    *,
    density: float,
    column_density: float | None,
    forced_diagonals: int = 2,
    seed: int = 0,
) -> VerticalSlash:
    """Random isolated diagonals and random columns, per segment and head.

    Args:
        density: share of each segment's causal area to be covered in all.
        column_density: share to be covered by columns, the rest by isolated diagonals; None: everything but the forced diagonals.
        forced_diagonals: the nearest block diagonals, which are always there, as the selectors keep them; at least 1.

    Raises:
        SparseRingError: densities out of order, or no forced diagonal.
    """
    if not 0 <= (column_density or 0) <= density <= 1 or forced_diagonals < 1:
        raise SparseRingError(
            f"pattern: density {density}, column density {column_density} and {forced_diagonals} forced diagonals: needs "
            "0 <= column density <= density <= 1 and a forced diagonal"
        )
    generator = torch.Generator().manual_seed(seed)
    diagonal_pairs: list[Tensor] = []
    column_pairs: list[Tensor] = []
    for s, segment in enumerate(segments):
        area = float(causal_cost(segments, torch.arange(segment.begin, segment.end)).sum())
        by_diagonals = 0.0 if column_density is None else (density - column_density) * area
        for head in range(heads):
            diagonals, covered = _diagonals(segment, by_diagonals, forced_diagonals, generator)
            columns = _columns(segment, density * area - covered, diagonals, generator)
            for pairs, values in ((diagonal_pairs, diagonals), (column_pairs, columns)):
                pairs.append(torch.stack([torch.full_like(values, s * heads + head), values], 1))
    return VerticalSlash.from_keys(segments, heads, 1, torch.cat(diagonal_pairs), torch.cat(column_pairs))


def _diagonals(segment: Segment, pairs: float, forced_count: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Forced diagonals and as many random ones as fit into ``pairs`` (query, key) pairs; and the pairs that they have."""
    offsets = torch.arange(segment.end - segment.document_begin)
    first = segment.begin - segment.document_begin
    area = (segment.end - segment.begin - (offsets - first).clamp(min=0)) * BLOCK * BLOCK
    area[0] = (segment.end - segment.begin) * BLOCK * (BLOCK + 1) // 2
    forced = offsets < forced_count
    order = torch.cat([offsets[forced], offsets[~forced][torch.randperm(int((~forced).sum()), generator=generator)]])
    chosen = order[(area[order].cumsum(0) <= pairs) | (order < forced_count)].sort().values
    return chosen, float(area[chosen].sum())


def _columns(segment: Segment, pairs: float, diagonals: Tensor, generator: torch.Generator) -> Tensor:
    """Random tokens of the document so far, until their uncovered rows make up ``pairs``."""
    tokens = torch.arange(segment.document_begin * BLOCK, max(segment.end - 1, segment.document_begin + 1) * BLOCK)
    tokens = tokens[torch.randperm(tokens.numel(), generator=generator)]
    q_blocks = torch.arange(segment.begin, segment.end)
    offset = q_blocks[:, None] - torch.arange(int(tokens.max()) // BLOCK + 1)[None, :]
    read = (offset > 0) & ~torch.isin(offset, diagonals)
    rows = read.sum(0)[tokens // BLOCK] * BLOCK
    return tokens[rows.cumsum(0) <= pairs].sort().values
