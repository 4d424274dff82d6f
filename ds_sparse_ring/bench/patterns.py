"""Vertical-slash patterns of a given density, made from a seed.

Neighbouring diagonals share key blocks between query blocks, isolated ones do not, and columns are gathered, so speed depends
on the kind:

=============  ==========================================================================================
kind           what a head reads
=============  ==========================================================================================
``band``       diagonals 0 to w, no columns: the easiest for a kernel
``clustered``  runs of 2 to 8 neighbouring diagonals in random places, and a share of random columns
``isolated``   single diagonals in random places, and the same share of columns
``columns``    the nearest diagonals, everything else columns
=============  ==========================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash, causal_cost
from ds_sparse_ring.layout import BLOCK

PatternKind = Literal["band", "clustered", "isolated", "columns"]
CLUSTER_WIDTHS = (2, 8)
"""Fewest and most diagonals of a cluster."""

_Order = Callable[[Tensor, torch.Generator], Tensor]


def pattern(
    kind: PatternKind,
    segments: tuple[Segment, ...],
    heads: int,
    *,
    density: float,
    spread: float = 100.0,
    column_share: float = 0.3,
    forced_diagonals: int = 2,
    heads_per_pattern: int = 1,
    seed: int = 0,
) -> VerticalSlash:
    """An index whose heads differ in density as heads of models do.

    Args:
        heads: query heads; a multiple of ``heads_per_pattern``.
        density: mean over heads of the share of the causal area to be covered, in every segment.
        spread: largest over smallest density of a head, see `head_densities`.
        column_share: share of the area of ``clustered`` and ``isolated`` that columns cover.
        forced_diagonals: the nearest block diagonals, in every head; at least 1.

    Raises:
        SparseRingError: an unknown kind, or numbers out of range.
    """
    if kind not in get_args(PatternKind):
        raise SparseRingError(f"pattern: unknown kind {kind!r}; use one of {', '.join(get_args(PatternKind))}")
    if not 0 <= column_share <= 1 or forced_diagonals < 1 or heads % heads_per_pattern:
        raise SparseRingError(
            f"pattern: column share {column_share}, {forced_diagonals} forced diagonals, {heads_per_pattern} of {heads} heads "
            "per pattern: needs a share between 0 and 1, a forced diagonal, and a divisor of the heads"
        )
    by_columns = {"band": 0.0, "columns": 1.0}.get(kind, column_share)
    order = {"clustered": _clusters, "band": _nearest}.get(kind, _scattered)
    total = float(causal_cost(segments, torch.arange(segments[-1].end)).sum())
    forced = sum(float(diagonal_areas(s)[:forced_diagonals].sum()) for s in segments) / total
    densities = head_densities(heads // heads_per_pattern, density, spread=spread, at_least=forced, seed=seed)
    shares = [(d, d * (1 - by_columns)) for d in densities]
    return _draw(segments, shares, heads_per_pattern, order, kind != "band", forced_diagonals, seed)


def vertical_slash_pattern(
    segments: tuple[Segment, ...],
    heads: int,
    *,
    density: float,
    column_density: float | None,
    forced_diagonals: int = 2,
    seed: int = 0,
) -> VerticalSlash:
    """Random isolated diagonals and random columns, equally many in every head.

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
    by_diagonals = 0.0 if column_density is None else density - column_density
    return _draw(segments, [(density, by_diagonals)] * heads, 1, _scattered, True, forced_diagonals, seed)


def head_densities(heads: int, mean: float, *, spread: float, at_least: float = 0.0, seed: int = 0) -> list[float]:
    """Densities in geometric steps from the smallest to ``spread`` times that, shuffled, whose mean is ``mean``.

    None is above 1 or below ``at_least`` (what the forced diagonals cover); the others make up for those that are clipped.

    Raises:
        SparseRingError: ``mean`` is above 1 or below ``at_least``, or ``spread`` below 1.
    """
    if not at_least <= mean <= 1 or spread < 1:
        raise SparseRingError(
            f"pattern: mean density {mean:g} with spread {spread:g}: needs a spread of at least 1 and a density up to 1, and not "
            f"below the forced diagonals, which cover {at_least:.4f} here"
        )
    steps = [spread ** (head / max(1, heads - 1)) for head in range(heads)]

    def scaled(factor: float) -> list[float]:
        return [min(1.0, max(at_least, factor * step)) for step in steps]

    low, high = 0.0, 1.0  # at 1 every head is at 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(scaled(middle)) < mean * heads else (low, middle)
    values = scaled(high)
    return [values[i] for i in torch.randperm(heads, generator=torch.Generator().manual_seed(seed)).tolist()]


def _draw(
    segments: tuple[Segment, ...],
    shares: list[tuple[float, float]],
    heads_per_pattern: int,
    order: _Order,
    with_columns: bool,
    forced_diagonals: int,
    seed: int,
) -> VerticalSlash:
    """One row per (segment, pattern); ``shares``: of the causal area, in all and by diagonals, of each pattern."""
    generator = torch.Generator().manual_seed(seed)
    diagonal_pairs: list[Tensor] = []
    column_pairs: list[Tensor] = [torch.empty(0, 2, dtype=torch.int64)]
    for s, segment in enumerate(segments):
        area = float(causal_cost(segments, torch.arange(segment.begin, segment.end)).sum())
        for p, (density, by_diagonals) in enumerate(shares):
            diagonals, covered = _diagonals(segment, by_diagonals * area, forced_diagonals, order, generator)
            found = [(diagonal_pairs, diagonals)]
            if with_columns:
                found.append((column_pairs, _columns(segment, density * area - covered, diagonals, generator)))
            for pairs, values in found:
                pairs.append(torch.stack([torch.full_like(values, s * len(shares) + p), values], 1))
    return VerticalSlash.from_keys(segments, len(shares), heads_per_pattern, torch.cat(diagonal_pairs), torch.cat(column_pairs))


def diagonal_areas(segment: Segment) -> Tensor:
    """(query, key) pairs of each block diagonal of a segment."""
    offsets = torch.arange(segment.end - segment.document_begin)
    rows = segment.end - segment.begin - (offsets - (segment.begin - segment.document_begin)).clamp(min=0)
    area = rows * BLOCK * BLOCK
    area[0] = (segment.end - segment.begin) * BLOCK * (BLOCK + 1) // 2
    return area


def _diagonals(
    segment: Segment, pairs: float, forced_count: int, order: _Order, generator: torch.Generator
) -> tuple[Tensor, float]:
    """Forced diagonals and as many others as fit into ``pairs`` (query, key) pairs; and the pairs that they have."""
    area = diagonal_areas(segment)
    offsets = torch.arange(area.numel())
    ordered = torch.cat([offsets[:forced_count], order(offsets[forced_count:], generator)])
    chosen = ordered[(area[ordered].cumsum(0) <= pairs) | (ordered < forced_count)].sort().values
    return chosen, float(area[chosen].sum())


def _nearest(offsets: Tensor, generator: torch.Generator) -> Tensor:
    return offsets


def _scattered(offsets: Tensor, generator: torch.Generator) -> Tensor:
    return offsets[torch.randperm(offsets.numel(), generator=generator)]


def _clusters(offsets: Tensor, generator: torch.Generator) -> Tensor:
    """``offsets`` (consecutive) in an order that fills cluster after cluster, each in a random place; they may touch."""
    count = offsets.numel()
    if count == 0:
        return offsets
    least, most = CLUSTER_WIDTHS
    starts = torch.randperm(count, generator=generator)
    widths = torch.randint(least, most + 1, (count,), generator=generator)
    place = starts[:, None] + torch.arange(most)
    place = place[(torch.arange(most) < widths[:, None]) & (place < count)]
    first = torch.full((count,), place.numel()).scatter_reduce(0, place, torch.arange(place.numel()), "amin")
    return offsets[first.argsort()]


def _columns(segment: Segment, pairs: float, diagonals: Tensor, generator: torch.Generator) -> Tensor:
    """Random tokens of the document so far, until their uncovered rows make up ``pairs``."""
    begin = segment.document_begin
    blocks = max(segment.end - 1 - begin, 1)
    tokens = begin * BLOCK + torch.randperm(blocks * BLOCK, generator=generator)
    rows = reading_blocks(segment, diagonals, blocks)[tokens // BLOCK - begin] * BLOCK
    return tokens[rows.cumsum(0) <= pairs].sort().values


def reading_blocks(segment: Segment, diagonals: Tensor, blocks: int) -> Tensor:
    """How many query blocks of the segment read a column in each of the document's first ``blocks`` key blocks.

    They come after the key block, and the diagonal between the two is off.
    """
    reach = segment.end - segment.document_begin
    on = torch.zeros(reach + 1, dtype=torch.int64)
    on[diagonals + 1] = 1
    below = on.cumsum(0)  # active diagonals smaller than each offset
    key = torch.arange(blocks)
    nearest = (segment.begin - segment.document_begin - key).clamp(min=1)
    beyond = (reach - key).clamp(min=1)
    return torch.maximum(beyond, nearest) - nearest - (below[torch.maximum(beyond, nearest)] - below[nearest])
