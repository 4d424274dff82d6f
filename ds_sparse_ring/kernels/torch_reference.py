"""The reference backend: vertical-slash attention in plain PyTorch, to learn the method from and to test the others against.

For each segment and pattern the span's query blocks are taken in tiles. A tile's work is a list of *slices* of at most
``TILE_ELEMENTS`` scores: either the key blocks that it reads (gathered, one list per query block, because a diagonal meets
another key block in each) or the columns (the same compact keys for all). Forward merges each slice by its log-sum-exp;
backward recomputes its probabilities from the final one. Only active blocks are computed, in the accumulator's dtype.

Shapes: b query blocks of a tile, G heads of a pattern, T = BLOCK rows of a block, X keys of a slice, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.kernels.contract import ColumnKV, Work, accumulator_dtype, empty_result, merge
from ds_sparse_ring.layout import BLOCK

TILE_BLOCKS = 8
"""Query blocks of a tile: few, so that early ones do not carry the keys of late ones."""
TILE_ELEMENTS = 1 << 21
"""Most scores (b * G * T * X) that one slice holds at once: bounds the memory of the reference."""


@dataclass(frozen=True)
class _Tile:
    """Query blocks ``rows`` (local) of the ``heads`` of one pattern, whose keys are in key/value head ``kv_head``."""

    heads: slice
    kv_head: int
    segment: int
    pattern: int
    rows: range

    def take(self, x: Tensor) -> Tensor:
        """``[H, n, ...]`` -> ``[G, b * T, ...]``, a view."""
        return x[self.heads, self.rows.start * BLOCK : self.rows.stop * BLOCK]


@dataclass(frozen=True)
class _Slice:
    """Keys of a tile. ``blocks`` ``[b, L]`` are local key blocks per query block, or None for columns ``column_slice``.

    ``visible`` broadcasts to ``[b, 1, T, X]``.
    """

    blocks: Tensor | None
    column_slice: slice
    visible: Tensor

    def gather(self, x: Tensor, column_x: Tensor | None, kv_head: int) -> Tensor:
        """The slice's rows of keys or values: ``[b, 1, X, D]``, or ``[1, 1, X, D]`` for columns."""
        if self.blocks is None:
            assert column_x is not None
            return column_x[self.column_slice][None, None]
        per_block = x[kv_head].unflatten(0, (-1, BLOCK))[self.blocks]  # [b, L, T, D]
        return per_block.flatten(1, 2).unsqueeze(1)

    def scatter_add(self, out: Tensor, column_out: Tensor | None, kv_head: int, grad: Tensor) -> None:
        """Add ``grad`` ``[b, G, X, D]``, summed over heads, to where :meth:`gather` read."""
        if self.blocks is None:
            assert column_out is not None
            column_out[self.column_slice] += grad.sum((0, 1))
            return
        per_block = grad.sum(1).unflatten(1, (-1, BLOCK)).flatten(0, 1)
        out[kv_head].unflatten(0, (-1, BLOCK)).index_add_(0, self.blocks.flatten(), per_block)


class TorchKernel:
    """The kernel contract in plain PyTorch: float32 and float64 exactly, half precisions computed in float32."""

    name = "torch"

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        work: Work,
        o_acc: Tensor,
        lse_acc: Tensor,
        columns: ColumnKV | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """See `Kernel.forward`."""
        if overwrite:
            o, lse = empty_result(q)
            self.forward(q, k, v, work, o, lse, columns)
            o_acc.copy_(o)
            lse_acc.copy_(lse)
            return
        acc = accumulator_dtype(q.dtype)
        for tile in _tiles(q, k, work):
            for keys in _slices(tile, work, k, columns is not None):
                scores = _scores(tile, keys, q, k, columns, work.scale, acc)  # [b, G, T, X]
                largest = scores.amax(-1, keepdim=True)
                largest = torch.where(torch.isinf(largest), torch.zeros_like(largest), largest)
                weights = (scores - largest).exp()
                total = weights.sum(-1, keepdim=True)
                values = keys.gather(v, columns.v if columns else None, tile.kv_head).to(acc)
                o = (weights @ values) / torch.where(total > 0, total, torch.ones_like(total))
                lse = (largest + total.log()).squeeze(-1)
                merge(tile.take(o_acc), tile.take(lse_acc), _as_rows(o), _as_rows(lse))

    def backward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        work: Work,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        columns: ColumnKV | None = None,
        d_columns: ColumnKV | None = None,
        *,
        overwrite: bool = False,
    ) -> None:
        """See `Kernel.backward`."""
        acc = accumulator_dtype(q.dtype)
        if overwrite:
            fresh = torch.zeros(q.shape, dtype=acc, device=q.device)
            self.backward(q, k, v, do, lse, delta, work, fresh, dk, dv, columns, d_columns)
            dq.copy_(fresh)
            return
        for tile in _tiles(q, k, work):
            rows_lse = _as_blocks(tile.take(lse))[..., None]
            rows_lse = torch.where(torch.isinf(rows_lse), torch.zeros_like(rows_lse), rows_lse)
            rows_do, rows_delta = _as_blocks(tile.take(do)).to(acc), _as_blocks(tile.take(delta))[..., None]
            rows_q = _as_blocks(tile.take(q)).to(acc)
            for keys in _slices(tile, work, k, columns is not None):
                # a row without any key has only -inf scores here, so its probabilities are exactly 0
                probabilities = (_scores(tile, keys, q, k, columns, work.scale, acc) - rows_lse).exp()
                values = keys.gather(v, columns.v if columns else None, tile.kv_head).to(acc)
                d_scores = probabilities * (rows_do @ values.mT - rows_delta) * work.scale
                rows_k = keys.gather(k, columns.k if columns else None, tile.kv_head).to(acc)
                tile.take(dq).add_(_as_rows(d_scores @ rows_k))
                keys.scatter_add(dk, d_columns.k if d_columns else None, tile.kv_head, d_scores.mT @ rows_q)
                keys.scatter_add(dv, d_columns.v if d_columns else None, tile.kv_head, probabilities.mT @ rows_do)

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        """See `Kernel.delta`."""
        acc = accumulator_dtype(o.dtype)
        return (do.to(acc) * o.to(acc)).sum(-1)

    def add_rows(self, out: Tensor, place: Tensor, x: Tensor) -> None:
        """See `Kernel.add_rows`."""
        x, place = x.masked_fill(place[:, None] < 0, 0), place.clamp(min=0)
        for part, rows in zip(out, x, strict=True):
            # repeated places are summed in a fixed order by index_put_ on a GPU, by index_add_ on the CPU
            if part.is_cuda:
                part.index_put_((place,), rows, accumulate=True)
            else:
                part.index_add_(0, place, rows)


def _tiles(q: Tensor, k: Tensor, work: Work) -> Iterator[_Tile]:
    """Cut a query span into tiles: one segment, one pattern, at most ``TILE_BLOCKS`` query blocks."""
    index, group = work.index, work.index.heads_per_pattern
    queries_per_kv = q.shape[0] // k.shape[0]
    blocks = q.shape[1] // BLOCK
    for s, segment in enumerate(index.segments):
        rows = work.q_map.local_range(segment.begin, segment.end, blocks)
        for p in range(index.patterns):
            for begin in range(rows.start, rows.stop, TILE_BLOCKS):
                heads = slice(p * group, (p + 1) * group)
                yield _Tile(heads, heads.start // queries_per_kv, s, p, range(begin, min(begin + TILE_BLOCKS, rows.stop)))


def _slices(tile: _Tile, work: Work, k: Tensor, with_columns: bool) -> Iterator[_Slice]:
    """The active keys of a tile in slices of at most TILE_ELEMENTS scores (at least one diagonal or column each)."""
    index = work.index
    q_blocks = work.q_map.to_global(torch.arange(tile.rows.start, tile.rows.stop, device=k.device))
    per_key = len(tile.rows) * index.heads_per_pattern * BLOCK

    target, counts = index.key_blocks(tile.segment, tile.pattern, q_blocks)  # [b, L]
    local, present = work.k_map.to_local(target, k.shape[1] // BLOCK)
    present &= counts
    met = present.any(0)  # only every R-th diagonal meets a pair of ranks of a striped ring
    local, present, earlier = local[:, met], present[:, met], (target < q_blocks[:, None])[:, met]
    triangle = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=k.device).tril()
    step = max(1, TILE_ELEMENTS // (per_key * BLOCK))
    for begin in range(0, local.shape[1], step):
        part = slice(begin, begin + step)
        visible = present[:, None, part, None] & (earlier[:, None, part, None] | triangle[None, :, None, :])
        yield _Slice(local[:, part], slice(0, 0), visible.flatten(2)[:, None])  # [b, 1, T, L * T]

    if not with_columns:
        return
    columns = index.column_slice(tile.segment, tile.pattern)
    step = max(1, TILE_ELEMENTS // per_key)
    for begin in range(0, columns.stop - columns.start, step):
        part = slice(begin, begin + step)
        counted = index.columns_counted(tile.segment, tile.pattern, q_blocks, part)
        if counted.any():
            at = columns.start + begin
            yield _Slice(None, slice(at, at + counted.shape[1]), counted[:, None, None, :])


def _scores(tile: _Tile, keys: _Slice, q: Tensor, k: Tensor, columns: ColumnKV | None, scale: float, acc: torch.dtype) -> Tensor:
    """Scaled scores ``[b, G, T, X]``, -inf where the index has no entry."""
    rows_k = keys.gather(k, columns.k if columns else None, tile.kv_head).to(acc)
    scores = (_as_blocks(tile.take(q)).to(acc) * scale) @ rows_k.mT
    return scores.masked_fill_(~keys.visible, float("-inf"))


def _as_blocks(x: Tensor) -> Tensor:
    """``[G, b * T, ...]`` -> ``[b, G, T, ...]``."""
    return x.unflatten(1, (-1, BLOCK)).transpose(0, 1)


def _as_rows(x: Tensor) -> Tensor:
    """``[b, G, T, ...]`` -> ``[G, b * T, ...]``."""
    return x.transpose(0, 1).flatten(1, 2)
