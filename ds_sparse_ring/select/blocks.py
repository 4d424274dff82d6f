"""Tables that selectors of whole blocks share: what each block of a sequence may read, and lists from what ranks chose.

Shapes: P patterns, B blocks of the sequence, b of them on this rank.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.layout import BLOCK, Layout
from ds_sparse_ring.select.probe import NOT_FINITE


def first_blocks(segments: tuple[Segment, ...]) -> Tensor:
    """The first block that each block may read, int64 ``[B]``: its document's; padding reads only itself."""
    every = torch.arange(segments[-1].end)
    return torch.cat(
        [every[s.begin : s.end] if s.is_padding else every[s.document_begin].repeat(s.end - s.begin) for s in segments]
    )


@lru_cache(maxsize=8)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def local_blocks(layout: Layout, rank: int, segments: tuple[Segment, ...], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Of a rank's blocks: their global numbers, the first block that each may read, its valid tokens; int64 ``[b]`` each."""
    blocks = layout.block_ids(rank)
    ends = torch.cat([torch.full((s.end - s.begin,), s.valid_end) for s in segments])
    valid = (ends[blocks] - blocks * BLOCK).clamp(0, BLOCK)
    return blocks.to(device), first_blocks(segments)[blocks].to(device), valid.to(device)


@lru_cache(maxsize=8)
@torch.inference_mode(False)
def _sequence_order(layout: Layout, device: torch.device) -> Tensor:
    """Where each block of the sequence is when the blocks of all ranks stand one after the other, int64 ``[B]``."""
    return torch.cat([layout.block_ids(rank) for rank in range(layout.ranks)]).argsort().to(device)


def of_all_blocks(x: Tensor, context: SequenceContext) -> Tensor:
    """``[heads, b, ...]`` of every rank -> ``[heads, B, ...]`` in the order of the sequence. Collective over the ring."""
    if context.layout.ranks == 1:
        return x
    return torch.cat(context.axes.ring_gather(x), 1)[:, _sequence_order(context.layout, x.device)]


def valid_rows(x: Tensor, valid: Tensor) -> Tensor:
    """``[heads, n, D]`` as blocks ``[heads, b, BLOCK, D]`` in the accumulator's dtype; tokens that fill up a document are 0."""
    inside = torch.arange(BLOCK, device=x.device) < valid[:, None]
    return torch.where(inside[..., None], x.unflatten(1, (-1, BLOCK)), 0).to(accumulator_dtype(x.dtype))


def check_finite(*tensors: Tensor, context: SequenceContext) -> None:
    """Refuse what holds NaN or infinity on any rank of the ring. Collective; the host waits.

    Raises:
        SparseRingError: there are some.
    """
    broken = torch.stack([~torch.isfinite(x).all() for x in tensors]).any().int()
    if context.axes.ring_max(broken.reshape(1)).item():
        raise SparseRingError(NOT_FINITE)


def row_ptr(counts: Tensor, patterns: int) -> Tensor:
    """Where rows of P patterns begin whose query blocks read ``counts`` ``[B]`` key blocks each: int64 ``[P * B + 1]``."""
    ptr = counts.new_zeros(patterns * counts.numel() + 1)
    torch.cumsum(counts.repeat(patterns), 0, out=ptr[1:])
    return ptr
