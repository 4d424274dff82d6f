"""Diagonals and columns that depend on no query and no key: windows, global tokens, random diagonals.

They are the baselines that choosing by attention mass must beat, on the same ring and kernels. Windows and global tokens are
made once per sequence and serve all layers; random diagonals take a few launches. The host never waits.

Shapes: S segments, P patterns; row = segment * P + pattern.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.config import LongformerSelector, RandomDiagonalsSelector, SparseRingConfig, WindowSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.index import Index, VerticalSlash, in_order, row_of_entries
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select.seeded import drawn, hashed

_BLOCK_PAIRS, _DIAGONAL_PAIRS = BLOCK * BLOCK, BLOCK * (BLOCK + 1) // 2


def window_index(
    selector: WindowSelector | LongformerSelector, context: SequenceContext, patterns: int, device: torch.device
) -> VerticalSlash:
    """The nearest blocks of every query block, and global tokens; one object for all layers of a sequence."""
    return _window_index(selector, context.segments, patterns, context.heads_per_pattern, device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _window_index(
    selector: WindowSelector | LongformerSelector,
    segments: tuple[Segment, ...],
    patterns: int,
    heads_per_pattern: int,
    device: torch.device,
) -> VerticalSlash:
    window = selector.window_blocks
    diagonals = [torch.arange(1 if s.is_padding else min(s.end - s.document_begin, window)) for s in segments]
    columns = [global_tokens_read(selector, s) for s in segments]
    rows = (*_repeated(diagonals, patterns), *_repeated(columns, patterns))
    return VerticalSlash(segments, patterns, heads_per_pattern, *(x.to(device) for x in rows))


def _global_tokens(selector: WindowSelector | LongformerSelector, segment: Segment) -> Tensor:
    """Valid tokens of the document up to the segment's end that are global."""
    length = segment.valid_end - segment.document_begin * BLOCK
    if isinstance(selector, WindowSelector):
        places = torch.arange(min(length, selector.sink_tokens))
    else:
        places = torch.arange(min(length, selector.global_tokens))
        if selector.global_every is not None:
            places = torch.cat([places, torch.arange(0, length, selector.global_every)[1:]]).unique()
    return segment.document_begin * BLOCK + places


def global_tokens_read(selector: WindowSelector | LongformerSelector, segment: Segment) -> Tensor:
    """Global tokens that some query block of the segment reads as columns: all others have it in their window. Ascending."""
    tokens = _global_tokens(selector, segment)
    return tokens[tokens < (segment.end - selector.window_blocks) * BLOCK]


def _repeated(of_segments: list[Tensor], patterns: int) -> tuple[Tensor, Tensor]:
    """The same values for all patterns of a segment, as compressed rows."""
    counts = torch.tensor([values.numel() for values in of_segments]).repeat_interleave(patterns)
    ptr = torch.zeros(counts.numel() + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr, torch.cat([values.repeat(patterns) for values in of_segments])


@dataclass(frozen=True)
class _Random:
    """What the random diagonals of all layers have in common.

    Attributes:
        ptr: int64 ``[S * P + 1]``. near, far, reach: int64 ``[S]``: nearest diagonals, random ones, all that there are.
        column_ptr, column_values: the first tokens, as in the index. entries: diagonals of all rows.
    """

    ptr: Tensor
    near: Tensor
    far: Tensor
    reach: Tensor
    column_ptr: Tensor
    column_values: Tensor
    entries: int


def random_diagonals(
    selector: RandomDiagonalsSelector, context: SequenceContext, patterns: int, device: torch.device
) -> VerticalSlash:
    """The nearest diagonals of every row, and random ones up to the density."""
    common = _random(selector, context.segments, patterns, device)
    entry = torch.arange(common.entries, device=device)
    row = row_of_entries(common.ptr, entry)
    segment, place = row // patterns, entry - common.ptr[row]
    near, far, reach = (x[segment] for x in (common.near, common.far, common.reach))
    pattern = context.axes.ulysses_rank * patterns + row % patterns  # a Ulysses group shares out the heads in order
    turn = hashed(selector.seed, context.layer, segment, pattern)
    far_off = near + drawn(hashed(turn, place), turn, place - near, far.clamp(min=1), (reach - near).clamp(min=1))
    values = in_order(row, torch.where(place < near, place, far_off))
    columns = common.column_ptr, common.column_values
    return VerticalSlash(context.segments, patterns, context.heads_per_pattern, common.ptr, values, *columns)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _random(selector: RandomDiagonalsSelector, segments: tuple[Segment, ...], patterns: int, device: torch.device) -> _Random:
    counts = torch.tensor([_diagonal_counts(selector, s) for s in segments])  # [S, 3]
    of_rows = counts[:, :2].sum(1).repeat_interleave(patterns)
    ptr = torch.zeros(of_rows.numel() + 1, dtype=torch.int64)
    torch.cumsum(of_rows, 0, out=ptr[1:])
    columns = _first_tokens(selector, segments, patterns, device)
    near, far, reach = counts.T.to(device)
    return _Random(ptr.to(device), near, far, reach, columns.column_ptr, columns.column_values, int(ptr[-1]))


def of_any_text(index: Index, context: SequenceContext) -> Index:
    """The index's diagonals, and of its columns only those that are always active: the first tokens of the documents."""
    if not isinstance(index, VerticalSlash):
        return index
    columns = _first_tokens(context.config, index.segments, index.patterns, index.diagonal_ptr.device)
    rows = index.diagonal_ptr, index.diagonal_values, columns.column_ptr, columns.column_values
    return VerticalSlash(index.segments, index.patterns, index.heads_per_pattern, *rows)


def _first_tokens(
    values: RandomDiagonalsSelector | SparseRingConfig, segments: tuple[Segment, ...], patterns: int, device: torch.device
) -> VerticalSlash:
    """An index whose columns are the first tokens that lie outside the nearest blocks."""
    window = values.local_blocks if isinstance(values, SparseRingConfig) else values.window_blocks
    return _window_index(WindowSelector(window_blocks=window, sink_tokens=values.sink_tokens), segments, patterns, 1, device)


def _diagonal_counts(selector: RandomDiagonalsSelector, segment: Segment) -> tuple[int, int, int]:
    """Nearest diagonals of a segment, random ones, and all that there are."""
    if segment.is_padding:
        return 1, 0, 1
    reach = segment.end - segment.document_begin
    near = min(reach, selector.window_blocks)
    pairs = [_pairs(segment, offset) for offset in range(reach)]
    rest, wanted = sum(pairs[near:]), selector.density * sum(pairs) - sum(pairs[:near])
    far = round((reach - near) * wanted / rest) if rest else 0
    return near, min(max(far, 0), reach - near), reach


def _pairs(segment: Segment, offset: int) -> int:
    """(query, key) pairs of a segment on a block diagonal."""
    readers = segment.end - max(segment.begin, segment.document_begin + offset)
    return readers * (_BLOCK_PAIRS if offset else _DIAGONAL_PAIRS)
