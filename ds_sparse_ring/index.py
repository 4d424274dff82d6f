"""The index: which keys each query block reads, in global coordinates.

Two kinds, one interface. ``FullIndex`` is dense causal attention inside each document. ``VerticalSlash`` keeps, per segment of
query blocks and per *pattern* (``heads_per_pattern`` neighbouring query heads),

* *diagonals*: block offsets d. Query block i reads key block i - d, element-wise causal for d = 0, which is always there;
* *columns*: single key tokens j. Query block i reads j iff j lies in an earlier block and the diagonal i - block(j) is off,
  so that no pair is counted twice and columns never need an element-wise mask.

The index is never expanded to lists per row: it takes O(patterns * budget) memory for any length. It is data: chosen once per
layer and micro-batch, then used by the forward pass, by its replay under gradient checkpointing and by the backward pass.

Shapes: S segments, P patterns, H query heads, n query blocks. Vertical-slash patterns: MInference (arXiv 2407.02490) and
MTraining (arXiv 2510.18830); segments and block diagonals in this form are ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.layout import BLOCK

_DIAGONAL_PAIRS = BLOCK * (BLOCK + 1) // 2


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

    def diagonals(self, segment: int, pattern: int) -> Tensor:
        """Active block offsets."""

    def columns(self, segment: int, pattern: int) -> Tensor:
        """Active key tokens (global ids)."""

    def column_slice(self, segment: int, pattern: int) -> slice:
        """Where the columns of (segment, pattern) stand among all columns of the index."""


@dataclass(frozen=True)
class FullIndex:
    """Dense causal attention within each document; padding blocks read only themselves."""

    segments: tuple[Segment, ...]
    patterns: int
    heads_per_pattern: int = 1

    def diagonals(self, segment: int, pattern: int) -> Tensor:
        s = self.segments[segment]
        return torch.arange(1 if s.is_padding else s.end - s.document_begin)

    def columns(self, segment: int, pattern: int) -> Tensor:
        return torch.empty(0, dtype=torch.int64)

    def column_slice(self, segment: int, pattern: int) -> slice:
        return slice(0, 0)


@dataclass(frozen=True, eq=False)
class VerticalSlash:
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
        row = segment * self.patterns + pattern
        return self.diagonal_values[int(self.diagonal_ptr[row]) : int(self.diagonal_ptr[row + 1])]

    def columns(self, segment: int, pattern: int) -> Tensor:
        return self.column_values[self.column_slice(segment, pattern)]

    def column_slice(self, segment: int, pattern: int) -> slice:
        row = segment * self.patterns + pattern
        return slice(int(self.column_ptr[row]), int(self.column_ptr[row + 1]))

    def column_patterns(self) -> Tensor:
        """Pattern of each column, int64 ``[columns]``."""
        counts = self.column_ptr.diff()
        patterns = torch.arange(counts.numel(), device=counts.device) % self.patterns
        return torch.repeat_interleave(patterns, counts)

    def equal(self, other: VerticalSlash) -> bool:
        """True if both select the same entries, bit for bit."""
        return self.segments == other.segments and all(
            torch.equal(getattr(self, name), getattr(other, name))
            for name in ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values")
        )


def _compressed_rows(pairs: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    pairs = torch.unique(pairs, dim=0) if pairs.numel() else pairs.reshape(0, 2)
    counts = torch.bincount(pairs[:, 0], minlength=rows)
    ptr = torch.zeros(rows + 1, dtype=torch.int64, device=pairs.device)
    torch.cumsum(counts, 0, out=ptr[1:])
    return ptr, pairs[:, 1].contiguous()


def segment_of_blocks(segments: tuple[Segment, ...], blocks: Tensor) -> Tensor:
    """Segment number of each global block."""
    ends = torch.tensor([s.end for s in segments], device=blocks.device)
    return torch.searchsorted(ends, blocks, right=True)


def diagonal_bitmap(diagonals: Tensor) -> Tensor:
    """Bool ``[largest offset + 2]``: which offsets are active (the last entry is always False, for look-ups past the end)."""
    largest = int(diagonals.max()) if diagonals.numel() else 0
    bitmap = torch.zeros(largest + 2, dtype=torch.bool, device=diagonals.device)
    bitmap[diagonals] = True
    return bitmap


def columns_counted(q_blocks: Tensor, columns: Tensor, diagonals: Tensor) -> Tensor:
    """Bool ``[n, C]``: column j counts for query block i iff block(j) < i and the diagonal i - block(j) is off."""
    offset = q_blocks[:, None] - torch.div(columns, BLOCK, rounding_mode="floor")[None, :]
    bitmap = diagonal_bitmap(diagonals)
    return (offset > 0) & ~bitmap[offset.clamp(0, bitmap.numel() - 1)]


def mask(index: Index, head: int, q_tokens: Tensor, k_tokens: Tensor) -> Tensor:
    """The element-wise mask of one query head, bool ``[n, m]``: the definition that every fast path is tested against.

    Args:
        q_tokens, k_tokens: global token ids of the aligned stream.
    """
    pattern = head // index.heads_per_pattern
    out = torch.zeros(q_tokens.numel(), k_tokens.numel(), dtype=torch.bool, device=q_tokens.device)
    q_blocks, k_blocks = q_tokens // BLOCK, k_tokens // BLOCK
    row_segments = segment_of_blocks(index.segments, q_blocks)
    for s in row_segments.unique().tolist():
        rows = (row_segments == s).nonzero().flatten()
        diagonals = index.diagonals(s, pattern).to(q_tokens.device)
        columns = index.columns(s, pattern).to(q_tokens.device)
        offset = q_blocks[rows, None] - k_blocks[None, :]
        bitmap = diagonal_bitmap(diagonals)
        on_slash = (offset >= 0) & bitmap[offset.clamp(0, bitmap.numel() - 1)]
        on_column = torch.isin(k_tokens, columns)[None, :] & (offset > 0)
        in_document = k_blocks[None, :] >= index.segments[s].document_begin
        causal = k_tokens[None, :] <= q_tokens[rows, None]
        out[rows] = (on_slash | on_column) & in_document & causal
    return out


def cost(index: Index, q_blocks: Tensor, k_blocks: tuple[int, int] | None = None) -> Tensor:
    """Active (query, key) pairs of each query block per query head, int64 ``[P, n]``.

    Args:
        q_blocks: global block numbers, int64 ``[n]``.
        k_blocks: only keys in blocks ``[begin, end)``; None for all.
    """
    low, high = k_blocks if k_blocks is not None else (0, 1 << 62)
    out = torch.zeros(index.patterns, q_blocks.numel(), dtype=torch.int64)
    q_blocks = q_blocks.cpu()
    row_segments = segment_of_blocks(index.segments, q_blocks)
    for s in row_segments.unique().tolist():
        rows = (row_segments == s).nonzero().flatten()
        blocks = q_blocks[rows]
        first = max(low, index.segments[s].document_begin)
        for p in range(index.patterns):
            diagonals, columns = index.diagonals(s, p).cpu(), index.columns(s, p).cpu()
            # diagonals are sorted: those that land in [first, high) are a run of them
            slashes = torch.searchsorted(diagonals, blocks - first, right=True)
            slashes -= torch.searchsorted(diagonals, blocks - max(first, high), right=True)
            on_diagonal = (blocks >= low) & (blocks < high)
            pairs = slashes * BLOCK * BLOCK - on_diagonal * (BLOCK * BLOCK - _DIAGONAL_PAIRS)
            columns = columns[(columns // BLOCK >= low) & (columns // BLOCK < high)]
            out[p, rows] = pairs + BLOCK * columns_counted(blocks, columns, diagonals).sum(1)
    return out


def causal_cost(segments: tuple[Segment, ...], q_blocks: Tensor) -> Tensor:
    """(query, key) pairs of each query block under dense causal attention inside its document, int64 ``[n]``."""
    begins = torch.tensor([s.begin if s.is_padding else s.document_begin for s in segments])
    padding = torch.tensor([s.is_padding for s in segments])
    q_blocks = q_blocks.cpu()
    row_segments = segment_of_blocks(segments, q_blocks)
    earlier = torch.where(padding[row_segments], 0, q_blocks - begins[row_segments])
    return earlier * BLOCK * BLOCK + _DIAGONAL_PAIRS


def density(index: Index) -> Tensor:
    """Active share of the causal area of all documents, per pattern: float64 ``[P]``."""
    blocks = torch.arange(index.segments[-1].end)
    return cost(index, blocks).sum(1).double() / causal_cost(index.segments, blocks).sum()
