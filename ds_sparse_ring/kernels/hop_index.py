"""What the index says about one span of queries and one span of keys: small tables on the device, for the GPU kernels.

With block maps ``stride * local + start`` of one stride R, query block l and key block j (local numbers) lie
``R (l - j) + q_start - k_start`` blocks apart. So a diagonal d meets the two spans iff ``d = R a + c`` with
``c = (q_start - k_start) mod R``, and then joins l to ``l + base - a`` with ``base = (q_start - k_start - c) / R``: a span pair
sees a vertical-slash pattern of *local* offsets a. They are filtered once per index and residue. Nothing here grows with
rows x keys, and nothing waits for the device.

Shapes: S segments, P patterns, n query blocks, m key blocks; row = segment * P + pattern. Tables are int32 where not said.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VALUE_BITS, BlockLists, FullIndex, Index, VerticalSlash, row_of_entries
from ds_sparse_ring.kernels.contract import Work
from ds_sparse_ring.kernels.triton_tables import columns_kernel, offsets_kernel
from ds_sparse_ring.layout import BlockMap

FULL, VERTICAL_SLASH, BLOCK_LISTS = 0, 1, 2
_WORD = 32
_NO_KEY = 1 << 30


@dataclass(frozen=True)
class Spans:
    """Tables that depend on segments and maps alone.

    Attributes:
        base: key block of query block l on local offset 0 is ``l + base``. own: local offset 0 is block diagonal 0.
        residue: c, the block diagonals that meet are ``R a + c``.
        segments: ``[S, 3]``: first query block, one past the last, first key block that they may read (huge: only their own).
        q_segment: ``[n]`` segment of each query block. k_segments: ``[m, 2]`` segments (from, to) that may read each key block.
    """

    base: int
    own: bool
    residue: int
    segments: Tensor
    q_segment: Tensor
    k_segments: Tensor


@dataclass(frozen=True)
class Offsets:
    """Local offsets of each row, and a bitmap with counts by which "how many are below x" takes two loads.

    Attributes:
        ptr: int64 ``[S * P + 1]``, where rows begin (they may end before the next); values: offsets, ascending within a row, one
            spare entry at the end.
        bits: ``[S * P, words]``; before: offsets in the words before, same shape. The last word is empty.
    """

    ptr: Tensor
    values: Tensor
    bits: Tensor
    before: Tensor


@dataclass(frozen=True)
class Lists:
    """Explicit lists: row ``pattern * n + query block`` of key blocks, and their transpose ``pattern * m + key block``."""

    ptr: Tensor
    values: Tensor
    t_ptr: Tensor
    t_values: Tensor


@dataclass(frozen=True)
class Columns:
    """Where columns count.

    Attributes:
        ptr, ids: the columns of the index, int64: ``[S * P + 1]`` and tokens ``[C]``, ascending within a row.
        end: ``[P, n]`` how many columns of a query block's row lie in earlier blocks.
        tile_row, tile_begin: ``[tiles]`` row and first column (within the row) of each tile of columns; row -1: none.
    """

    ptr: Tensor
    ids: Tensor
    end: Tensor
    tile_row: Tensor
    tile_begin: Tensor


def spans(work: Work, q_blocks: int, k_blocks: int, device: torch.device) -> Spans:
    """The tables of a span pair; cached.

    Raises:
        SparseRingError: maps of different strides.
    """
    return _spans(work.index.segments, work.q_map, work.k_map, q_blocks, k_blocks, device)


@lru_cache(maxsize=2048)  # hops x spans of a few layouts
@torch.inference_mode(False)
def _spans(
    segments: tuple[Segment, ...], q_map: BlockMap, k_map: BlockMap, q_blocks: int, k_blocks: int, device: torch.device
) -> Spans:
    if q_map.stride != k_map.stride:
        raise SparseRingError(f"kernel: queries have stride {q_map.stride}, keys {k_map.stride}; the strides must be equal")
    base, residue = divmod(q_map.start - k_map.start, q_map.stride)
    table, q_segment, k_segments = [], torch.zeros(q_blocks, dtype=torch.int32), torch.zeros(k_blocks, 2, dtype=torch.int32)
    last_of_document = {s.document_begin: i + 1 for i, s in enumerate(segments)}
    for i, s in enumerate(segments):
        rows, keys = q_map.local_range(s.begin, s.end, q_blocks), k_map.local_range(s.begin, s.end, k_blocks)
        first_key = k_map.local_range(s.document_begin, s.end, k_blocks).start
        table.append([rows.start, rows.stop, _NO_KEY if s.is_padding else first_key])
        q_segment[rows.start : rows.stop] = i
        k_segments[keys.start : keys.stop] = torch.tensor([i, last_of_document[s.document_begin]], dtype=torch.int32)
    tables = torch.tensor(table, dtype=torch.int32), q_segment, k_segments
    on_device = [x.to(device, non_blocking=True) for x in tables]  # staged: the host may forget them at once
    return Spans(base, residue == 0, residue, *on_device)


def offsets(index: VerticalSlash, stride: int, residue: int) -> Offsets:
    """Diagonals ``stride * a + residue`` as local offsets a, diagonal 0 left out; made for all residues at once, and cached."""
    return index.derived(("offsets", stride), lambda: _offsets(index, stride))[residue]


def _offsets(index: VerticalSlash, stride: int) -> list[Offsets]:
    """For each residue: one launch for all hops."""
    device, rows = index.diagonal_values.device, index.diagonal_ptr.numel() - 1
    # the tables of every residue begin at multiples of 16 bytes, or kernels would be compiled for those that do not
    size = _rounded(index.diagonal_values.numel() + 1)
    words = _rounded(max(s.end - s.document_begin for s in index.segments) // stride // _WORD + 2)
    bits, before = torch.zeros(2, stride, rows, words, dtype=torch.int32, device=device)
    values = torch.zeros(stride, size, dtype=torch.int32, device=device)
    offsets_kernel[(rows, stride)](
        index.diagonal_ptr, index.diagonal_values, stride, size, words, values, bits, before, CHUNK=128
    )  # fmt: skip
    return [Offsets(index.diagonal_ptr, *tables) for tables in zip(values, bits, before, strict=True)]


def _rounded(count: int) -> int:
    return -(-count // 4) * 4


def columns(index: VerticalSlash, q_map: BlockMap, q_blocks: int, segments: Tensor, tile: int) -> Columns:
    """Where the columns of an index count, and tiles of ``tile`` of them; cached."""
    key = ("columns", q_map, q_blocks, tile)
    return index.derived(key, lambda: _columns(index, q_map, q_blocks, segments, tile))


def _columns(index: VerticalSlash, q_map: BlockMap, q_blocks: int, segments: Tensor, tile: int) -> Columns:
    device, rows = index.column_values.device, index.column_ptr.numel() - 1
    end = torch.empty(index.patterns, q_blocks, dtype=torch.int32, device=device)
    tiles = torch.full((2, index.column_values.numel() // tile + rows), -1, dtype=torch.int32, device=device)
    columns_kernel[(rows,)](
        index.column_ptr, index.column_values, segments, end, *tiles, index.patterns, q_blocks, q_map.stride, q_map.start,
        TILE=tile, CHUNK=256,
    )  # fmt: skip
    return Columns(index.column_ptr, index.column_values, end, *tiles)


def lists(index: BlockLists, work: Work, q_blocks: int, k_blocks: int) -> Lists:
    """Key blocks that each query block of the span reads in the key span, its own left out, and the transpose; cached."""
    key = ("lists", work.q_map, work.k_map, q_blocks, k_blocks)
    return index.derived(key, lambda: _lists(index, work, q_blocks, k_blocks))


def _lists(index: BlockLists, work: Work, q_blocks: int, k_blocks: int) -> Lists:
    total = index.segments[-1].end
    rows = index.block_ptr.numel() - 1
    row = row_of_entries(index.block_ptr, index.block_values)
    pattern, query = torch.div(row, total, rounding_mode="floor"), row % total
    q_local, q_there = work.q_map.to_local(query, q_blocks)
    k_local, k_there = work.k_map.to_local(index.block_values, k_blocks)
    kept = q_there & k_there & (query != index.block_values)
    patterns = rows // total
    forward = _compressed(pattern * q_blocks + q_local, k_local, kept, patterns * q_blocks)
    transposed = _compressed(pattern * k_blocks + k_local, q_local, kept, patterns * k_blocks)
    return Lists(*forward, *transposed)


def _compressed(row: Tensor, value: Tensor, kept: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Rows in order, values ascending; what is not kept goes behind the last row. One spare entry."""
    keys, _ = torch.where(kept, (row << VALUE_BITS) | value, rows << VALUE_BITS).sort()
    starts = torch.arange(rows + 1, device=row.device) << VALUE_BITS
    values = torch.zeros(keys.numel() + 1, dtype=torch.int32, device=row.device)
    values[:-1] = (keys & ((1 << VALUE_BITS) - 1)).int()
    return torch.searchsorted(keys, starts).int(), values


def kind_of(index: Index) -> int:
    """FULL, VERTICAL_SLASH or BLOCK_LISTS."""
    for kind, cls in ((FULL, FullIndex), (VERTICAL_SLASH, VerticalSlash), (BLOCK_LISTS, BlockLists)):
        if isinstance(index, cls):
            return kind
    raise TypeError(f"the GPU kernels do not know {type(index).__name__}")
