"""The index: which keys each query block reads, in global coordinates.

Three kinds, one interface. ``FullIndex`` is dense causal attention inside each document. ``BlockLists`` names the key blocks of
each query block one by one. ``VerticalSlash`` keeps, per segment of query blocks and per *pattern* (``heads_per_pattern``
neighbouring query heads),

* *diagonals*: block offsets d. Query block i reads key block i - d, element-wise causal for d = 0, which is always there;
* *columns*: single key tokens j. Query block i reads j iff j lies in an earlier block and the diagonal i - block(j) is off,
  so that no pair is counted twice and columns never need an element-wise mask.

It is never expanded to lists per row: it takes O(patterns * budget) memory for any length. An index is data: chosen once per
layer and micro-batch, then used by the forward pass, by its replay under gradient checkpointing and by the backward pass.

Shapes: S segments, P patterns, H query heads, n query blocks. Vertical-slash patterns: MInference (arXiv 2407.02490) and
MTraining (arXiv 2510.18830); segments and block diagonals in this form are ours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK, BlockMap

_BLOCK_PAIRS = BLOCK * BLOCK
_DIAGONAL_PAIRS = BLOCK * (BLOCK + 1) // 2
VALUE_BITS = 40
"""Of a token or block in a key ``row << VALUE_BITS | value``: a million million of them; 23 bits are left for rows."""


class Index(Protocol):
    """What kernels, plans and metrics ask of an index. Offsets and columns are sorted int64 tensors."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments in stream order; together they cover every block."""

    @property
    def patterns(self) -> int:
        """Number of patterns (query heads / heads_per_pattern)."""

    @property
    def heads_per_pattern(self) -> int:
        """Neighbouring query heads that share a pattern."""

    def key_blocks(self, segment: int, pattern: int, q_blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Key blocks that each of ``n`` query blocks of a segment reads in whole (element-wise causal in its own block).

        Returns:
            Global block numbers int64 ``[n, L]``, and bool ``[n, L]``: which of them count.
        """

    def block_counts(self, segment: int, pattern: int, q_blocks: Tensor, low: int, high: int) -> Tensor:
        """How many of those key blocks lie in ``[low, high)``, int64 ``[n]``."""

    def columns_counted(self, segment: int, pattern: int, q_blocks: Tensor, part: slice) -> Tensor:
        """Bool ``[n, C]``: which of the columns ``part`` of (segment, pattern) each query block reads."""

    def columns(self, segment: int, pattern: int) -> Tensor:
        """Active key tokens (global ids)."""

    def column_slice(self, segment: int, pattern: int) -> slice:
        """Where the columns of (segment, pattern) stand among all columns of the index."""


_T = TypeVar("_T")


def _once(made: dict[Any, Any], key: Any, make: Callable[[], _T]) -> _T:
    if key not in made:
        made[key] = make()
    found: _T = made[key]
    return found


class _Derived:
    """Tables that are made from an index, once a pass."""

    _derived: dict[Any, Any]
    _noted: dict[Any, Any]

    def derived(self, key: Any, make: Callable[[], _T]) -> _T:
        """What ``make`` gave for this key, the first time."""
        return _once(self._derived, key, make)

    def forget(self) -> None:
        """Drop what was derived: it is made again faster than many layers' worth of it is kept until the backward pass."""
        self._derived.clear()

    def noted(self, key: Any, make: Callable[[], _T]) -> _T:
        """As `derived`, but never forgotten: for numbers that the host would wait for again."""
        return _once(self._noted, key, make)


class _NoColumns:
    """Part of the indices that know whole blocks only."""

    def columns(self, segment: int, pattern: int) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def column_slice(self, segment: int, pattern: int) -> slice:
        return slice(0, 0)

    def columns_counted(self, segment: int, pattern: int, q_blocks: Tensor, part: slice) -> Tensor:
        return torch.empty(q_blocks.numel(), 0, dtype=torch.bool, device=q_blocks.device)


@dataclass(frozen=True)
class FullIndex(_NoColumns):
    """Dense causal attention within each document; padding blocks read only themselves."""

    segments: tuple[Segment, ...]
    patterns: int
    heads_per_pattern: int = 1

    def key_blocks(self, segment: int, pattern: int, q_blocks: Tensor) -> tuple[Tensor, Tensor]:
        s = self.segments[segment]
        target = q_blocks[:, None] - torch.arange(1 if s.is_padding else s.end - s.document_begin, device=q_blocks.device)
        return target, target >= s.document_begin

    def block_counts(self, segment: int, pattern: int, q_blocks: Tensor, low: int, high: int) -> Tensor:
        s = self.segments[segment]
        first = q_blocks if s.is_padding else q_blocks.new_full((), s.document_begin)
        return ((q_blocks + 1).clamp(max=high) - first.clamp(min=low)).clamp(min=0)


@dataclass(frozen=True, eq=False)
class BlockLists(_NoColumns, _Derived):
    """Key blocks of each query block, named one by one: what selectors of whole blocks and fixed patterns give.

    Attributes:
        block_ptr: int64 ``[P * blocks + 1]``; row ``pattern * blocks + query block`` is ``block_values[ptr[row]:ptr[row + 1]]``.
        block_values: int64, global key blocks, ascending within a row: the query block's own and earlier ones.
    """

    segments: tuple[Segment, ...]
    patterns: int
    heads_per_pattern: int
    block_ptr: Tensor
    block_values: Tensor
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _noted: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_keys(cls, segments: tuple[Segment, ...], patterns: int, heads_per_pattern: int, pairs: Tensor) -> BlockLists:
        """Build from ``[m, 2]`` int64 pairs (pattern * blocks + query block, key block) in any order, duplicates allowed.

        Every query block's own block is added.

        Raises:
            SparseRingError: a key block after its query block, or of another document.
        """
        blocks = segments[-1].end
        rows = torch.arange(patterns * blocks, device=pairs.device)
        pairs = torch.cat([pairs, torch.stack([rows, rows % blocks], 1)])
        begins = torch.tensor([s.document_begin for s in segments], device=pairs.device)
        query = pairs[:, 0] % blocks
        outside = (pairs[:, 1] > query) | (pairs[:, 1] < begins[segment_of_blocks(segments, query)])
        if outside.any():
            row, key = pairs[outside][0].tolist()
            raise SparseRingError(
                f"block lists: query block {row % blocks} cannot read key block {key}: it lies in the future or in another "
                "document"
            )
        return cls(segments, patterns, heads_per_pattern, *_compressed_rows(pairs, patterns * blocks))

    def _rows(self, pattern: int, q_blocks: Tensor) -> tuple[Tensor, Tensor]:
        row = pattern * self.segments[-1].end + q_blocks
        return self.block_ptr[row], self.block_ptr[row + 1]

    def key_blocks(self, segment: int, pattern: int, q_blocks: Tensor) -> tuple[Tensor, Tensor]:
        begin, end = self._rows(pattern, q_blocks)
        place = torch.arange(int((end - begin).max()) if q_blocks.numel() else 0, device=q_blocks.device)
        counts = place[None, :] < (end - begin)[:, None]
        at = torch.where(counts, begin[:, None] + place, torch.zeros_like(place)[None, :])
        return self.block_values[at], counts

    def block_counts(self, segment: int, pattern: int, q_blocks: Tensor, low: int, high: int) -> Tensor:
        target, counts = self.key_blocks(segment, pattern, q_blocks)
        return (counts & (target >= low) & (target < high)).sum(1)


@dataclass(frozen=True, eq=False)
class VerticalSlash(_Derived):
    """Diagonals and columns per (segment, pattern) as two compressed rows.

    Attributes:
        diagonal_ptr, column_ptr: int64 ``[S * P + 1]``; row ``segment * P + pattern`` is ``values[ptr[row]:ptr[row + 1]]``.
        diagonal_values: int64, block offsets, ascending within a row; offset 0 is in every row.
        column_values: int64, global token ids, ascending within a row.
    """

    segments: tuple[Segment, ...]
    patterns: int
    heads_per_pattern: int
    diagonal_ptr: Tensor
    diagonal_values: Tensor
    column_ptr: Tensor
    column_values: Tensor
    _derived: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)
    _noted: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_keys(
        cls,
        segments: tuple[Segment, ...],
        patterns: int,
        heads_per_pattern: int,
        diagonals: Tensor,
        columns: Tensor,
    ) -> VerticalSlash:
        """Build from ``[m, 2]`` int64 pairs (row, value) in any order, duplicates allowed; row = segment * P + pattern."""
        rows = len(segments) * patterns
        return cls(segments, patterns, heads_per_pattern, *_compressed_rows(diagonals, rows), *_compressed_rows(columns, rows))

    def diagonals(self, segment: int, pattern: int) -> Tensor:
        """Active block offsets, ascending."""
        row = segment * self.patterns + pattern
        return self.diagonal_values[int(self.diagonal_ptr[row]) : int(self.diagonal_ptr[row + 1])]

    def columns(self, segment: int, pattern: int) -> Tensor:
        return self.column_values[self.column_slice(segment, pattern)]

    def column_slice(self, segment: int, pattern: int) -> slice:
        row = segment * self.patterns + pattern
        return slice(int(self.column_ptr[row]), int(self.column_ptr[row + 1]))

    def key_blocks(self, segment: int, pattern: int, q_blocks: Tensor) -> tuple[Tensor, Tensor]:
        target = q_blocks[:, None] - self.diagonals(segment, pattern)[None, :]
        return target, target >= self.segments[segment].document_begin

    def block_counts(self, segment: int, pattern: int, q_blocks: Tensor, low: int, high: int) -> Tensor:
        diagonals = self.diagonals(segment, pattern)
        first = max(low, self.segments[segment].document_begin)
        # diagonals are sorted: those that land in [first, high) are a run of them
        counts = torch.searchsorted(diagonals, q_blocks - first, right=True)
        return counts - torch.searchsorted(diagonals, q_blocks - max(first, high), right=True)

    def columns_counted(self, segment: int, pattern: int, q_blocks: Tensor, part: slice) -> Tensor:
        """Column j counts for query block i iff block(j) < i and the diagonal i - block(j) is off."""
        columns, diagonals = self.columns(segment, pattern)[part], self.diagonals(segment, pattern)
        offset = q_blocks[:, None] - torch.div(columns, BLOCK, rounding_mode="floor")[None, :]
        bitmap = torch.zeros(int(diagonals[-1]) + 2, dtype=torch.bool, device=q_blocks.device)
        bitmap[diagonals] = True  # the last entry stays False, for offsets beyond the largest
        return (offset > 0) & ~bitmap[offset.clamp(0, bitmap.numel() - 1)]

    def column_patterns(self) -> Tensor:
        """Pattern of each column, int64 ``[columns]``."""
        return row_of_entries(self.column_ptr, self.column_values) % self.patterns

    def column_kv_heads(self, kv_heads: int) -> Tensor:
        """Key/value head, of ``kv_heads``, of each column, int64 ``[columns]``."""
        patterns_per_kv_head = self.patterns // kv_heads
        return torch.div(self.column_patterns(), patterns_per_kv_head, rounding_mode="floor")

    def tables(self, segment: int) -> tuple[Tensor, Tensor]:
        """What a segment reads as bitmaps over its document: for many lookups at once. The host waits once per index.

        Returns:
            Bool ``[P, reach]``: which block offsets are on; bool ``[P, reach * BLOCK]``: which tokens of the document are
            columns, the document's first one at 0; reach: blocks from the document's first to the segment's last.
        """
        s, patterns = self.segments[segment], self.patterns
        reach, begin = s.end - s.document_begin, s.document_begin * BLOCK
        ends = torch.stack([self.diagonal_ptr[::patterns], self.column_ptr[::patterns]])
        bounds: list[list[int]] = self.derived("segment_bounds", ends.tolist)
        diagonals, columns = (slice(*x[segment : segment + 2]) for x in bounds)
        rows = slice(segment * patterns, (segment + 1) * patterns + 1)
        whole, single = (torch.zeros(patterns, n, dtype=torch.bool, device=ends.device) for n in (reach, reach * BLOCK))
        offsets, tokens = self.diagonal_values[diagonals], self.column_values[columns] - begin
        whole[row_of_entries(self.diagonal_ptr[rows], offsets), offsets] = True
        single[row_of_entries(self.column_ptr[rows], tokens), tokens] = True
        return whole, single

    def with_diagonals(self, pairs: Tensor) -> VerticalSlash:
        """The index and more diagonals: ``[m, 2]`` int64 pairs as in `from_keys`. The host waits for how many are new."""
        rows = row_of_entries(self.diagonal_ptr, self.diagonal_values)
        merged = torch.cat([torch.stack([rows, self.diagonal_values], 1), pairs])
        diagonals = _compressed_rows(merged, self.diagonal_ptr.numel() - 1)
        return VerticalSlash(
            self.segments, self.patterns, self.heads_per_pattern, *diagonals, self.column_ptr, self.column_values
        )

    def parts(self, most: int) -> tuple[VerticalSlash, ...]:
        """The index cut between its rows where it has more than ``most`` columns; () where it has not, or has one row.

        A part has at most so many columns, or those of one row. It is an index of its rows' segments alone, with all of their
        diagonals: each column counts in one part for the queries that it counts for here. The host waits once per index.
        """
        if self.column_values.numel() <= most:
            return ()
        return self.noted(("parts", most), lambda: self._parts(most))

    def _parts(self, most: int) -> tuple[VerticalSlash, ...]:
        diagonals, columns = torch.stack([self.diagonal_ptr, self.column_ptr]).tolist()
        found, row, rows = [], 0, len(columns) - 1
        while row < rows:
            after = max(row + 1, bisect_right(columns, columns[row] + most, lo=row) - 1)
            if columns[after] > columns[row]:
                found.append(self._part(row, after, diagonals, columns))
            row = after
        return tuple(found) if len(found) > 1 else ()

    def _part(self, row: int, after: int, diagonals: list[int], columns: list[int]) -> VerticalSlash:
        """Rows from ``row`` to the one before ``after``; ``diagonals``, ``columns``: where those of each row begin."""
        begin, end = row // self.patterns, -(-after // self.patterns)
        rows = slice(begin * self.patterns, end * self.patterns + 1)
        of_diagonals = slice(diagonals[rows.start], diagonals[rows.stop - 1])
        return VerticalSlash(
            self.segments[begin:end],
            self.patterns,
            self.heads_per_pattern,
            self.diagonal_ptr[rows] - of_diagonals.start,
            self.diagonal_values[of_diagonals],
            self.column_ptr[rows].clamp(columns[row], columns[after]) - columns[row],
            self.column_values[columns[row] : columns[after]],
        )

    def equal(self, other: VerticalSlash) -> bool:
        """True if both select the same entries, bit for bit."""
        return self.segments == other.segments and all(
            torch.equal(getattr(self, name), getattr(other, name))
            for name in ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values")
        )


def _compressed_rows(pairs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    # one integer per pair: sorting those is far cheaper than sorting pairs
    keys = torch.unique((pairs[:, 0] << VALUE_BITS) | pairs[:, 1])
    counts = torch.bincount(keys >> VALUE_BITS, minlength=rows)
    ptr = torch.zeros(rows + 1, dtype=torch.int64, device=pairs.device)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr, keys & ((1 << VALUE_BITS) - 1)


def row_of_entries(ptr: Tensor, values: Tensor) -> Tensor:
    """Row of each entry of compressed rows, counted from the first one of ``ptr``."""
    rows = torch.arange(ptr.numel() - 1, device=ptr.device)
    return torch.repeat_interleave(rows, ptr.diff(), output_size=values.numel())


def in_order(row: Tensor, values: Tensor) -> Tensor:
    """Entries of compressed rows, ascending within each; ``row``: the row of each entry, ascending."""
    return ((row << VALUE_BITS) | values).sort().values & ((1 << VALUE_BITS) - 1)


def segment_of_blocks(segments: tuple[Segment, ...], blocks: Tensor) -> Tensor:
    """Segment number of each global block."""
    ends = torch.tensor([s.end for s in segments], device=blocks.device)
    return torch.searchsorted(ends, blocks, right=True)


def mask(index: Index, head: int, q_tokens: Tensor, k_tokens: Tensor) -> Tensor:
    """The element-wise mask of one query head, bool ``[n, m]``: the definition that every fast path is tested against.

    Args:
        q_tokens, k_tokens: global token ids of the aligned stream.
    """
    pattern = head // index.heads_per_pattern
    out = torch.zeros(q_tokens.numel(), k_tokens.numel(), dtype=torch.bool, device=q_tokens.device)
    q_blocks, k_blocks = q_tokens // BLOCK, k_tokens // BLOCK
    row_segments = segment_of_blocks(index.segments, q_blocks)
    total = index.segments[-1].end
    for s in row_segments.unique().tolist():
        rows = (row_segments == s).nonzero().flatten()
        blocks, block_of_row = q_blocks[rows].unique(return_inverse=True)
        target, counts = index.key_blocks(s, pattern, blocks)
        whole = torch.zeros(blocks.numel(), total + 1, dtype=torch.bool, device=q_tokens.device)
        whole.scatter_(1, torch.where(counts, target, total), True)  # the last entry collects what does not count
        columns = index.columns(s, pattern).to(q_tokens.device)
        single = torch.zeros(blocks.numel(), total * BLOCK, dtype=torch.bool, device=q_tokens.device)
        single[:, columns] = index.columns_counted(s, pattern, blocks, slice(0, columns.numel()))
        visible = whole[:, k_blocks] | single[:, k_tokens]
        out[rows] = visible[block_of_row] & (k_tokens[None, :] <= q_tokens[rows, None])
    return out


def cost(index: Index, q_blocks: Tensor, k_blocks: tuple[int, int] | None = None) -> Tensor:
    """Active (query, key) pairs of each query block per query head, int64 ``[P, n]``.

    Args:
        q_blocks: global block numbers, int64 ``[n]``, on the index's device.
        k_blocks: only keys in blocks ``[begin, end)``; None for all.
    """
    low, high = k_blocks if k_blocks is not None else (0, index.segments[-1].end)
    out = torch.zeros(index.patterns, q_blocks.numel(), dtype=torch.int64, device=q_blocks.device)
    row_segments = segment_of_blocks(index.segments, q_blocks)
    for s in row_segments.unique().tolist():
        rows = (row_segments == s).nonzero().flatten()
        blocks = q_blocks[rows]
        for p in range(index.patterns):
            own = (blocks >= low) & (blocks < high)  # every query block reads its own, half of it
            pairs = index.block_counts(s, p, blocks, low, high) * _BLOCK_PAIRS - own * (_BLOCK_PAIRS - _DIAGONAL_PAIRS)
            column_blocks = index.columns(s, p).to(q_blocks.device) // BLOCK
            inside = (column_blocks >= low) & (column_blocks < high)
            counted = index.columns_counted(s, p, blocks, slice(0, column_blocks.numel()))
            out[p, rows] = pairs + BLOCK * (counted & inside).sum(1)
    return out


def causal_cost(segments: tuple[Segment, ...], q_blocks: Tensor) -> Tensor:
    """(query, key) pairs of each query block under dense causal attention inside its document, int64 ``[n]``."""
    begins = torch.tensor([s.begin if s.is_padding else s.document_begin for s in segments])
    padding = torch.tensor([s.is_padding for s in segments])
    q_blocks = q_blocks.cpu()
    row_segments = segment_of_blocks(segments, q_blocks)
    earlier = torch.where(padding[row_segments], 0, q_blocks - begins[row_segments])
    return earlier * _BLOCK_PAIRS + _DIAGONAL_PAIRS


def span_pairs(index: Index, q_map: BlockMap, q_blocks: int) -> Tensor:
    """Active (query, key) pairs of a span of query blocks per query head, int64 ``[P]``: the rows of `cost`, summed.

    In closed form over the index's lists: a few dozen launches, and no waiting for the device.

    Args:
        q_map: global numbers of the span's ``q_blocks`` query blocks, all of them in the sequence.
    """
    if isinstance(index, VerticalSlash):
        return _diagonal_pairs(index, q_map, q_blocks) + _column_pairs(index, q_map, q_blocks)
    if isinstance(index, BlockLists):
        counts = index.block_ptr.diff().view(index.patterns, -1)
        blocks = q_map.to_global(torch.arange(q_blocks, device=counts.device))
        return counts[:, blocks].sum(1) * _BLOCK_PAIRS - q_blocks * (_BLOCK_PAIRS - _DIAGONAL_PAIRS)
    blocks = q_map.to_global(torch.arange(q_blocks))
    return causal_cost(index.segments, blocks).sum().repeat(index.patterns)


def _diagonal_pairs(index: VerticalSlash, q_map: BlockMap, q_blocks: int) -> Tensor:
    """A diagonal counts once for each query block of its segment that is far enough from the document's first block."""
    ptr, offset = index.diagonal_ptr, index.diagonal_values
    segment = row_of_entries(ptr, offset) // index.patterns
    begin, end, document_begin = _segment_bounds(index.segments, offset.device)[:, segment]
    first = torch.maximum(begin, document_begin + offset)
    readers = (q_map.count_below(end, q_blocks) - q_map.count_below(first, q_blocks)).clamp(min=0)
    return _pattern_sums(readers * torch.where(offset > 0, _BLOCK_PAIRS, _DIAGONAL_PAIRS), ptr, index.patterns)


def _column_pairs(index: VerticalSlash, q_map: BlockMap, q_blocks: int) -> Tensor:
    """A column counts for each later query block of its segment, but for those that read it on one of their diagonals.

    Column block b and diagonal d meet in query block b + d. It belongs to the span only if d is congruent to start - b modulo
    the stride: with diagonals in order of (row, d modulo stride, d), those that meet in a range of the span are a run of them.
    """
    block = index.column_values // BLOCK
    row = row_of_entries(index.column_ptr, block)
    begin, end, _ = _segment_bounds(index.segments, block.device)[:, row // index.patterns]
    first = torch.maximum(begin, block + 1)
    later = (q_map.count_below(end, q_blocks) - q_map.count_below(first, q_blocks)).clamp(min=0)

    stride, offset, beyond = q_map.stride, index.diagonal_values, index.segments[-1].end + 1
    keys = (row_of_entries(index.diagonal_ptr, offset) * stride + offset % stride) * beyond + offset
    if stride > 1:
        keys = keys.sort().values
    low = first.clamp(min=q_map.start) - block
    high = torch.maximum(end.clamp(max=q_map.start + stride * q_blocks) - block, low)
    run = (row * stride + (q_map.start - block) % stride) * beyond
    met = torch.searchsorted(keys, run + high) - torch.searchsorted(keys, run + low)
    return _pattern_sums((later - met) * BLOCK, index.column_ptr, index.patterns)


def _pattern_sums(entries: Tensor, ptr: Tensor, patterns: int) -> Tensor:
    """Sums over all rows of each pattern, ``[P]``, from one integer per entry of compressed rows."""
    before = entries.new_zeros(entries.numel() + 1)
    torch.cumsum(entries, 0, out=before[1:])
    return before[ptr].diff().view(-1, patterns).sum(0)


@lru_cache(maxsize=16)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _segment_bounds(segments: tuple[Segment, ...], device: torch.device) -> Tensor:
    """First block, one past the last, and first block of the document of each segment: int64 ``[3, S]``."""
    return torch.tensor([[s.begin, s.end, s.document_begin] for s in segments], device=device).T.contiguous()


def density(index: Index) -> Tensor:
    """Active share of the causal area of all documents, per pattern: float64 ``[P]``, on the index's device."""
    return _share(span_pairs(index, BlockMap(1, 0), index.segments[-1].end), index)


def column_density(index: Index) -> Tensor:
    """Share of the causal area of all documents that is read as columns, per pattern: float64 ``[P]``; part of `density`."""
    if isinstance(index, VerticalSlash):
        return _share(_column_pairs(index, BlockMap(1, 0), index.segments[-1].end), index)
    return torch.zeros_like(density(index))


def _share(pairs: Tensor, index: Index) -> Tensor:
    return pairs.double() / _causal_pairs(index.segments)


@lru_cache(maxsize=16)
def _causal_pairs(segments: tuple[Segment, ...]) -> int:
    """(query, key) pairs of dense causal attention inside all documents."""
    return int(causal_cost(segments, torch.arange(segments[-1].end)).sum())
