"""``bench balance``: what layouts make of a sparse index, counted: work of ranks, and of a hop's ranks.

The simulator spreads active pairs evenly over the causal triangle; here they are those of an index of `bench.patterns`, or of one
that was recorded. Nothing is timed. A ring is as slow as the slowest rank of each hop: "slowest hops" is their sum over the mean
rank's work, by which attention is longer than if all hops were even.

Shapes: R ranks of a flat ring, N blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast, get_args

import numpy as np
import typer

from ds_sparse_ring.bench.options import tokens_or_none
from ds_sparse_ring.bench.patterns import PatternKind, pattern
from ds_sparse_ring.bench.recorded import RecordedIndex
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.layout import BLOCK, Layout, LayoutKind
from ds_sparse_ring.plan_report import parse_tokens
from ds_sparse_ring.simulate import imbalances

_Counts = np.ndarray[tuple[int, int], np.dtype[np.float64]]


def main(
    tokens: Annotated[str, typer.Option(help="Of a sequence, of one document.")] = "128K",
    density: Annotated[float, typer.Option(help="Active share of the causal pairs.")] = 0.05,
    patterns: Annotated[str, typer.Option(help="band, clustered, isolated, columns.")] = "clustered,columns",
    heads: Annotated[int, typer.Option(help="Query heads, a pattern each.")] = 16,
    segment_tokens: Annotated[str, typer.Option(help="Tokens of a segment.")] = "16K",
    ranks: Annotated[str, typer.Option(help="Sizes of rings.")] = "2,8,32",
    index: Annotated[Path | None, typer.Option(help="A recorded index in place of the patterns.")] = None,
) -> None:
    """Print a Markdown table."""
    if index is not None:
        found = {"recorded": RecordedIndex.load(index).index}
    else:
        length = parse_tokens(tokens)
        segments = make_segments([length], -(-length // BLOCK), tokens_or_none(segment_tokens))
        kinds = [cast(PatternKind, kind) for kind in patterns.split(",")]
        found = {kind: pattern(kind, segments, heads, density=density) for kind in kinds}
    print("| index | ranks | layout | workers | hops | slowest hops |\n|---|---|---|---|---|---|")
    for name, chosen in found.items():
        pairs = [block_pairs(chosen, segment) for segment in range(len(chosen.segments))]
        for size in map(int, ranks.split(",")):
            for kind in get_args(LayoutKind):
                cells = " | ".join(f"{figure:.3f}" for figure in balance(hop_pairs(chosen, pairs, kind, size)))
                print(f"| {name} | {size} | {kind} | {cells} |", flush=True)


def block_pairs(index: VerticalSlash, segment: int) -> tuple[_Counts, _Counts]:
    """Active (query, key) pairs of a segment's query blocks, over all patterns.

    Returns:
        Those on diagonals by key block ``[n, N]``, and those in columns ``[n, 1]``, which a rank computes with its own keys; n
        blocks of the segment.
    """
    place = index.segments[segment]
    rows, blocks = np.arange(place.begin, place.end), index.segments[-1].end
    on_diagonals, in_columns = np.zeros((len(rows), blocks)), np.zeros((len(rows), 1))
    distance = rows[:, None] - np.arange(blocks)
    for of_pattern in range(index.patterns):
        active = np.isin(distance, index.diagonals(segment, of_pattern).numpy())
        keys = np.bincount(index.columns(segment, of_pattern).numpy() // BLOCK, minlength=blocks)
        on_diagonals += active
        in_columns += BLOCK * ((~active & (distance > 0)) * keys).sum(1, keepdims=True)
    own = distance == 0
    return on_diagonals * np.where(own, BLOCK * (BLOCK + 1) / 2, BLOCK * BLOCK), in_columns


def hop_pairs(index: VerticalSlash, pairs: list[tuple[_Counts, _Counts]], kind: LayoutKind, ranks: int) -> _Counts:
    """Pairs of each rank by hop of a flat ring ``[R, R]``: hop t has the keys of rank r - t, and hop 0 the columns."""
    layout = Layout.for_blocks(kind, ranks, index.segments[-1].end)
    places = np.stack([np.isin(np.arange(index.segments[-1].end), layout.block_ids(rank).numpy()) for rank in range(ranks)])
    by_source, columns = np.zeros((ranks, ranks)), np.zeros(ranks)
    for segment, (on_diagonals, in_columns) in zip(index.segments, pairs, strict=True):
        mine = places[:, segment.begin : segment.end].astype(np.float64)
        by_source += mine @ on_diagonals @ places.T
        columns += (mine @ in_columns)[:, 0]
    hops = np.stack([np.roll(by_source[rank, ::-1], rank + 1) for rank in range(ranks)])
    hops[:, 0] += columns
    return cast(_Counts, hops)


def balance(hops: _Counts) -> tuple[float, float, float]:
    """Busiest rank over the mean; mean over hops of the slowest rank over the mean; sum of the slowest over the mean rank."""
    return *imbalances(hops), float(hops.max(0).sum() / hops.sum(1).mean())


if __name__ == "__main__":
    typer.run(main)
