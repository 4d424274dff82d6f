"""What an index asks for and what a machine does for it: active entries, tiles touched, bytes that must move.

Shapes: P patterns, n tiles a side. Counts are (query, key) pairs over all query heads, exact integers held in floats.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.bench.patterns import diagonal_areas, reading_blocks
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash
from ds_sparse_ring.layout import BLOCK


def active_pairs(index: VerticalSlash) -> float:
    """Entries of an index: what `ds_sparse_ring.index.cost` counts, summed, in time that does not grow with tokens * columns.

    Args:
        index: on the CPU.
    """
    total = 0
    for s, segment in enumerate(index.segments):
        areas = diagonal_areas(segment)
        for p in range(index.patterns):
            diagonals, columns = index.diagonals(s, p), index.columns(s, p)
            total += int(areas[diagonals].sum())
            if columns.numel():
                rows = reading_blocks(segment, diagonals, segment.end - segment.document_begin)
                total += int(rows[columns // BLOCK - segment.document_begin].sum()) * BLOCK
    return float(total * index.heads_per_pattern)


def tile_pairs(index: VerticalSlash) -> float:
    """Entries that a kernel with tiles of BLOCK x BLOCK touches: whole diagonal blocks, and tiles of BLOCK gathered columns.

    A tile of columns is touched by every query block after its first column (a kernel may skip a few more: those whose
    columns all lie on active diagonals). ``tile_pairs / active_pairs`` is the least work executed over active work.
    """
    total = 0
    for s, segment in enumerate(index.segments):
        rows = segment.end - segment.begin
        first = segment.begin - segment.document_begin
        for p in range(index.patterns):
            diagonals, columns = index.diagonals(s, p), index.columns(s, p)
            total += int((rows - (diagonals - first).clamp(min=0)).sum())
            total += int((segment.end - (columns[::BLOCK] // BLOCK + 1).clamp(min=segment.begin)).clamp(min=0).sum())
    return float(total * BLOCK * BLOCK * index.heads_per_pattern)


def minimal_bytes(index: VerticalSlash, q: Tensor, k: Tensor) -> tuple[float, float]:
    """Bytes that the forward and the backward pass cannot avoid: each input once in, each result once out.

    Forward: q, k, v, the gathered columns; o, log-sum-exp. Backward: those inputs, do, log-sum-exp, row sums of do * o; dq, dk,
    dv, the columns' gradients. Inputs, o, do, dq count in the dtype of q, sums and other gradients in float32.

    Args:
        q: ``[H, S, D]``; k: ``[K, S, D]``.
    """
    queries, keys, rows = q.numel(), 2 * k.numel(), q.shape[0] * q.shape[1]
    columns = 2 * index.column_values.numel() * q.shape[-1]
    inputs = (queries + keys + columns) * q.element_size()
    forward = inputs + queries * q.element_size() + 4 * rows
    backward = inputs + queries * q.element_size() + 8 * rows + queries * q.element_size() + 4 * (keys + columns)
    return float(forward), float(backward)


def tile_maps(index: VerticalSlash, size: int) -> tuple[Tensor, Tensor]:
    """Which tiles of ``size`` x ``size`` tokens an index touches.

    Returns:
        Two bool tensors ``[P, n, n]`` on the index's device: tiles of which every entry is active, and other tiles with an
        active entry.

    Raises:
        SparseRingError: segments that do not begin at a multiple of ``size``, or several documents.
    """
    step, blocks = size // BLOCK, index.segments[-1].end
    if any(s.begin % step or s.document_begin for s in index.segments) or blocks % step:
        raise SparseRingError(f"tiles of {size} tokens: needs one document, and segments that begin at multiples of {size}")
    device = index.diagonal_values.device
    whole, touched = (torch.zeros(index.patterns, blocks // step, blocks // step, dtype=torch.bool, device=device) for _ in "wt")
    key = torch.arange(blocks, device=device)
    for s, segment in enumerate(index.segments):
        offset = torch.arange(segment.begin, segment.end, device=device)[:, None] - key
        diagonals, columns = diagonal_bitmap(index, s), column_bitmap(index, s).view(index.patterns, blocks, BLOCK).any(-1)
        rows = slice(segment.begin // step, segment.end // step)
        for p in range(index.patterns):
            on = diagonals[p][offset.clamp(min=0)] & (offset >= 0)
            some = on | ((offset > 0) & columns[p])
            grid = (on.shape[0] // step, step, blocks // step, step)
            whole[p, rows] = (on & (offset > 0)).view(grid).all(3).all(1)
            touched[p, rows] = some.view(grid).any(3).any(1)
    return whole, touched & ~whole


def diagonal_bitmap(index: VerticalSlash, segment: int) -> Tensor:
    """Active block offsets of a segment, bool ``[P, blocks of the stream]``."""
    return _bitmap(index, segment, index.diagonal_ptr, index.diagonal_values, index.segments[-1].end)


def column_bitmap(index: VerticalSlash, segment: int) -> Tensor:
    """Columns of a segment, bool ``[P, tokens of the stream]``."""
    return _bitmap(index, segment, index.column_ptr, index.column_values, index.segments[-1].end * BLOCK)


def _bitmap(index: VerticalSlash, segment: int, ptr: Tensor, values: Tensor, size: int) -> Tensor:
    bounds = ptr[segment * index.patterns : (segment + 1) * index.patterns + 1]
    out = torch.zeros(index.patterns, size, dtype=torch.bool, device=values.device)
    rows = torch.arange(index.patterns, device=values.device).repeat_interleave(bounds.diff())
    out[rows, values[int(bounds[0]) : int(bounds[-1])]] = True
    return out
