"""BigBird's pattern, causal: the nearest blocks, a document's first ones, and random ones between (arXiv 2007.14062).

The random blocks of a query block are distinct, each block between as likely as any other. A row's length is known beforehand,
so that the host never waits.

Shapes: P patterns, B blocks of the sequence; row = pattern * B + query block.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.config import BigBirdSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import BlockLists, in_order, row_of_entries
from ds_sparse_ring.select.blocks import first_blocks, row_ptr
from ds_sparse_ring.select.seeded import drawn, hashed


@dataclass(frozen=True)
class _Rows:
    """What the rows of all layers have in common.

    Attributes:
        ptr: int64 ``[P * B + 1]``. first: the first block that each query block may read, int64 ``[B]``.
        sinks, between, drawn: first blocks that it reads, blocks between those and its window, and how many of these it reads.
        window: first block of its window. entries: of all rows.
    """

    ptr: Tensor
    first: Tensor
    sinks: Tensor
    between: Tensor
    drawn: Tensor
    window: Tensor
    entries: int


def select_bigbird(selector: BigBirdSelector, context: SequenceContext, patterns: int, device: torch.device) -> BlockLists:
    """Each row: sinks, random blocks, window."""
    rows = _rows(selector, context.segments, patterns, device)
    entry = torch.arange(rows.entries, device=device)
    row = row_of_entries(rows.ptr, entry)
    place, query = entry - rows.ptr[row], row % rows.first.numel()
    first, sinks, between, count, window = (x[query] for x in (rows.first, rows.sinks, rows.between, rows.drawn, rows.window))
    pattern = context.axes.ulysses_rank * patterns + row // rows.first.numel()  # a Ulysses group shares out the heads in order
    turn, number = hashed(selector.seed, context.layer, pattern, query), place - sinks
    random = first + sinks + drawn(hashed(turn, place), turn, number, count.clamp(min=1), between.clamp(min=1))
    values = torch.where(place < sinks, first + place, torch.where(number < count, random, window + number - count))
    values = in_order(row, values)
    return BlockLists(context.segments, patterns, context.heads_per_pattern, rows.ptr, values)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _rows(selector: BigBirdSelector, segments: tuple[Segment, ...], patterns: int, device: torch.device) -> _Rows:
    first = first_blocks(segments)
    query = torch.arange(first.numel())
    window = torch.maximum(first, query + 1 - selector.window_blocks)
    sinks = (window - first).clamp(max=selector.sink_blocks)
    between = window - first - sinks
    drawn = between.clamp(max=selector.random_blocks)
    ptr = row_ptr(sinks + drawn + query + 1 - window, patterns)
    entries = int(ptr[-1])
    ptr, first, sinks, between, drawn, window = (x.to(device) for x in (ptr, first, sinks, between, drawn, window))
    return _Rows(ptr, first, sinks, between, drawn, window, entries)
