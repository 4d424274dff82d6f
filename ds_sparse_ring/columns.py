"""Columns on a ring: their keys and values come to every rank while the first hops run, their gradients go back during the last.

Both are sums over the ring, in a group of their own beside the ring's transfers. Every row of keys and values has one owner and
zeros elsewhere, so their sum is exact.

Shapes: C columns of the index over all segments and patterns, K key/value heads, n local tokens, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ds_sparse_ring.comm import Reduction
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import Index, VerticalSlash
from ds_sparse_ring.kernels import ColumnKV


class ColumnGather:
    """Keys and values of an index's columns on their way to every rank. Collective.

    Args:
        k, v: this rank's, ``[K, n, D]``.
    """

    def __init__(self, k: Tensor, v: Tensor, index: Index, context: SequenceContext) -> None:
        self._meter = context.meter
        self._sum: Reduction | None = None
        if isinstance(index, VerticalSlash) and index.column_values.numel():
            row, held, kv_head = _places(k, index, context)
            mine = k.new_empty(2, *row.shape, k.shape[2])
            for into, x in zip(mine, (k, v), strict=True):
                into.copy_(x[kv_head, row])
            self._sum = context.axes.column_sum(mine.masked_fill_(~held[:, None], 0))

    def wait(self) -> ColumnKV | None:
        """``[C, D]`` each; None if the index has no columns."""
        if self._sum is None:
            return None
        with self._meter.timed("columns"):
            both = self._sum.wait()
        return ColumnKV(both[0], both[1])


class ColumnReturn:
    """Gradients of the columns: summed up on this rank, then over the ring, then added where their keys and values live.

    Attributes:
        rows: to add to, ``[C, D]`` each; None without columns.
    """

    def __init__(self, columns: ColumnKV | None, dtype: torch.dtype, index: Index, context: SequenceContext) -> None:
        self._index, self._context = index, context
        self._both = None if columns is None else columns.k.new_zeros(2, *columns.k.shape, dtype=dtype)
        self.rows = None if self._both is None else ColumnKV(self._both[0], self._both[1])
        self._sum: Reduction | None = None

    def send(self) -> None:
        """This rank's part is complete. Collective."""
        if self._both is not None:
            self._sum = self._context.axes.column_sum(self._both)

    def add_to(self, dkv: Tensor, first: int = 0) -> None:
        """Wait for the others' parts and add the sum to this rank's gradients ``[2, K, m, D]`` of rows from ``first`` on."""
        if self._sum is None:
            return
        assert isinstance(self._index, VerticalSlash)
        with self._context.meter.timed("columns"):
            total = self._sum.wait()
        row, held, kv_head = _places(dkv[0], self._index, self._context)
        row, held = row - first, held & (row >= first) & (row < first + dkv.shape[2])
        place = torch.where(held, kv_head * dkv.shape[2] + row, -1)
        self._context.kernel.add_rows(dkv.flatten(1, 2), place, total)  # columns of several patterns, segments may be one token


def _places(k: Tensor, index: VerticalSlash, context: SequenceContext) -> tuple[Tensor, Tensor, Tensor]:
    """Local row of each column, whether this rank holds it, and its key/value head; ``[C]`` each."""
    row, held = context.layout.locate(index.column_values, context.rank)
    return row, held, index.column_kv_heads(k.shape[0])
