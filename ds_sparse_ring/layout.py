"""Which rank holds which block of the sequence, in which order, and the exact inverse.

A sequence is cut into blocks of ``BLOCK`` tokens. Every layout is a short list of *spans*: runs of local blocks that one
affine map ``global = stride * local + start`` carries to global blocks. Kernels and plans only ever see these maps, so one
kernel serves a single device, a ring in any layout, and chunks of a sequence.

=============  ===================================  ==================================================
layout         blocks of rank r (of R, n each)      use
=============  ===================================  ==================================================
striped        r, r + R, r + 2R, ...                default: evens out the causal triangle and slashes
contiguous     r*n ... (r+1)*n - 1                  baseline
zigzag         chunk r and chunk 2R-1-r (of 2R)     baseline: evens out the causal triangle only
=============  ===================================  ==================================================

A layout may be one over *groups* of neighbouring ranks (Ulysses): each group has the blocks of the table, and its ranks hold
consecutive parts of them, so that their shards, one after the other, are the group's shard. With one group for all ranks these
are plain contiguous shards of the sequence, whatever the kind.

Pure integers: nothing here touches a process group or a device.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ds_sparse_ring.errors import SparseRingError

BLOCK = 64
"""Tokens per block: the unit of layouts, of block diagonals and of document alignment."""

LayoutKind = Literal["striped", "contiguous", "zigzag"]


@dataclass(frozen=True)
class BlockMap:
    """Affine map from local to global block numbers: ``global = stride * local + start`` (``start`` may be negative)."""

    stride: int
    start: int

    def to_global(self, local: Tensor) -> Tensor:
        """Global block numbers of local ones (any integer shape)."""
        return self.stride * local + self.start

    def to_local(self, block: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
        """Local numbers of global blocks, and which of them exist among ``blocks`` local ones.

        Where ``present`` is False the local number is 0, so that it can be used to index before it is masked.
        """
        offset = block - self.start
        local = torch.div(offset, self.stride, rounding_mode="floor")
        present = (offset % self.stride == 0) & (local >= 0) & (local < blocks)
        return torch.where(present, local, torch.zeros_like(local)), present

    def local_range(self, begin: int, end: int, blocks: int) -> range:
        """Local blocks (of ``blocks``) whose global number lies in ``[begin, end)``."""
        low = max(0, -((self.start - begin) // self.stride))
        high = min(blocks, -((self.start - end) // self.stride))
        return range(low, max(low, high))

    def count_below(self, block: Tensor, blocks: int) -> Tensor:
        """How many of ``blocks`` local blocks have a global number below each of ``block`` (any integer shape)."""
        return torch.div(self.start - block, self.stride, rounding_mode="floor").neg().clamp(0, blocks)


@dataclass(frozen=True)
class Span:
    """``blocks`` consecutive local blocks, the first one at ``local_begin``; ``map`` counts from the span's beginning."""

    local_begin: int
    blocks: int
    map: BlockMap

    @property
    def tokens(self) -> slice:
        """The span's rows in a rank's local tensors."""
        return slice(self.local_begin * BLOCK, (self.local_begin + self.blocks) * BLOCK)

    @property
    def first(self) -> int:
        """Lowest global block of the span."""
        return self.map.start

    @property
    def last(self) -> int:
        """Highest global block of the span."""
        return self.map.start + self.map.stride * (self.blocks - 1)

    def cut(self, begin: int, end: int) -> Span:
        """What local blocks ``[begin, end)`` have of the span (maybe nothing), counted from ``begin``."""
        low, high = max(begin, self.local_begin), min(end, self.local_begin + self.blocks)
        start = self.map.start + self.map.stride * (low - self.local_begin)
        return Span(low - begin, high - low, BlockMap(self.map.stride, start))

    def since(self, block: int) -> Span:
        """The part whose global blocks are not below ``block``; counted from where the span is."""
        before = max(0, -((self.first - block) // self.map.stride))
        start = self.map.start + self.map.stride * before
        return Span(self.local_begin + before, self.blocks - before, BlockMap(self.map.stride, start))

    def within(self, begin: int, end: int) -> Span:
        """The part (maybe nothing) whose global blocks lie in ``[begin, end)``; counted from where the span is."""
        inside = self.map.local_range(begin, end, self.blocks)
        start = self.map.start + self.map.stride * inside.start
        return Span(self.local_begin + inside.start, len(inside), BlockMap(self.map.stride, start))


@dataclass(frozen=True)
class Layout:
    """A sequence of ``ranks * blocks_per_rank`` blocks over ``ranks`` ranks.

    Every rank holds equally many blocks; build one with :meth:`for_blocks`, which says how much padding that takes. ``group``
    neighbouring ranks hold consecutive parts of one shard.
    """

    kind: LayoutKind
    ranks: int
    blocks_per_rank: int
    group: int = 1

    @classmethod
    def for_blocks(cls, kind: LayoutKind, ranks: int, blocks: int, group: int = 1) -> Layout:
        """The smallest layout of ``kind`` over ``ranks`` ranks, in groups of ``group``, that holds ``blocks`` blocks.

        Raises:
            SparseRingError: fewer than one rank or block, groups that do not divide the ranks, or an unknown kind.
        """
        if ranks < 1 or blocks < 1:
            raise SparseRingError(f"layout: needs at least one rank and one block, got {ranks} ranks, {blocks} blocks")
        if kind not in ("striped", "contiguous", "zigzag"):
            raise SparseRingError(f"layout: unknown kind {kind!r}; use 'striped', 'contiguous' or 'zigzag'")
        if group < 1 or ranks % group:
            raise SparseRingError(f"layout: groups of {group} ranks do not divide {ranks} ranks")
        per_rank = -(-blocks // ranks)
        if kind == "zigzag":
            per_rank += per_rank * group % 2
        return cls(kind, ranks, per_rank, group)

    def over_groups(self) -> Layout:
        """The layout over the groups, each of which counts as one rank."""
        return Layout(self.kind, self.ranks // self.group, self.blocks_per_rank * self.group)

    @property
    def blocks(self) -> int:
        """Blocks of the whole sequence, padding included."""
        return self.ranks * self.blocks_per_rank

    @property
    def local_tokens(self) -> int:
        """Tokens that each rank holds."""
        return self.blocks_per_rank * BLOCK

    def spans(self, rank: int) -> tuple[Span, ...]:
        """The spans of ``rank`` in local order; together they cover its local blocks."""
        n = self.blocks_per_rank
        if self.group > 1:
            place, part = divmod(rank, self.group)
            cut = (span.cut(part * n, (part + 1) * n) for span in self.over_groups().spans(place))
            return tuple(span for span in cut if span.blocks > 0)
        if self.kind == "striped":
            return (Span(0, n, BlockMap(self.ranks, rank)),)
        if self.kind == "contiguous":
            return (Span(0, n, BlockMap(1, rank * n)),)
        half = n // 2
        mirrored = 2 * self.ranks - 1 - rank
        return Span(0, half, BlockMap(1, rank * half)), Span(half, half, BlockMap(1, mirrored * half))

    def block_ids(self, rank: int) -> Tensor:
        """Global numbers of the rank's blocks in local order, int64 ``[blocks_per_rank]``."""
        return torch.cat([span.map.to_global(torch.arange(span.blocks)) for span in self.spans(rank)])

    def token_ids(self, rank: int) -> Tensor:
        """Global token ids of the rank's rows in local order, int64 ``[local_tokens]``."""
        return _token_ids(self, rank)

    def locate(self, tokens: Tensor, rank: int) -> tuple[Tensor, Tensor]:
        """Local rows of global token ids on ``rank`` (0 where absent), and which of them the rank holds."""
        blocks = torch.div(tokens, BLOCK, rounding_mode="floor")
        row = torch.zeros_like(tokens)
        held = torch.zeros_like(tokens, dtype=torch.bool)
        for span in self.spans(rank):
            local, present = span.map.to_local(blocks, span.blocks)
            row = torch.where(present, (span.local_begin + local) * BLOCK + tokens % BLOCK, row)
            held |= present
        return row, held

    def shard_rows(self, tokens: Tensor) -> Tensor:
        """Rows of global token ids in the shards of all ranks, one after the other: ``rank * local_tokens + local row``."""
        places = _block_places(self, tokens.device)
        return places[torch.div(tokens, BLOCK, rounding_mode="floor")] * BLOCK + tokens % BLOCK

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """The rank's part of a global tensor with ``blocks * BLOCK`` entries along ``dim``."""
        if x.shape[dim] != self.blocks * BLOCK:
            raise SparseRingError(
                f"layout: dimension {dim} has {x.shape[dim]} tokens, the layout holds {self.blocks * BLOCK}; "
                "pad the sequence first (SparseRing.sequence_batch does)"
            )
        return x.index_select(dim, self.token_ids(rank).to(x.device))

    def unshard(self, parts: SequenceOf[Tensor], dim: int = 0) -> Tensor:
        """The global tensor from the parts of all ranks (exact inverse of :meth:`shard`)."""
        if len(parts) != self.ranks:
            raise SparseRingError(f"layout: got the parts of {len(parts)} ranks, the layout has {self.ranks}")
        order = torch.cat([self.token_ids(rank) for rank in range(self.ranks)]).to(parts[0].device)
        inverse = torch.empty_like(order)
        inverse[order] = torch.arange(order.numel(), device=order.device)
        return torch.cat(list(parts), dim).index_select(dim, inverse)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # a cached tensor serves training, too, wherever it was first asked for
def _token_ids(layout: Layout, rank: int) -> Tensor:
    return (layout.block_ids(rank)[:, None] * BLOCK + torch.arange(BLOCK)).flatten()


@lru_cache(maxsize=32)
@torch.inference_mode(False)
def _block_places(layout: Layout, device: torch.device) -> Tensor:
    """Place of each global block in the shards of all ranks, one after the other, int64 ``[blocks]``."""
    order = torch.cat([layout.block_ids(rank) for rank in range(layout.ranks)])
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel())
    return places.to(device)
