"""Columns on a ring: their keys and values come to every rank while the first hops run, their gradients go back during the last.

All of an index, or those of a part that is an index of its own (`column_parts`).

Columns of several segments and patterns are often the same: one token of one key/value head, a *row*. Only distinct rows travel,
in a group of their own beside the ring's transfers. Each is sent by the one rank that holds it, and put in the order of the
columns where it arrives; gradients are first summed up over this rank's columns, in their order, and every rank gets the sums of
its own rows. All ranks send equally many rows, as many as the one that has most of them: in a striped layout they all have about
as many. That number is all that the host waits for, once per index.

Shapes: C columns of the index over all segments and patterns, K key/value heads, n local tokens, D head size, R ranks of the
ring, m rows of the rank that has most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ds_sparse_ring.comm import Arrival, Place
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import Index, VerticalSlash
from ds_sparse_ring.kernels import ColumnKV
from ds_sparse_ring.layout import Layout
from ds_sparse_ring.streams import HostNumber


class ColumnGather:
    """Keys and values of an index's columns on their way to every rank. Collective.

    Args:
        k, v: this rank's, ``[K, n, D]``. index: None: no columns. backward: for which pass, for messages.
    """

    def __init__(self, k: Tensor, v: Tensor, index: Index | None, context: SequenceContext, *, backward: bool = False) -> None:
        self._kv, self._context = (k, v), context
        self._place = Place(context.layer, backward)
        self._columns: ColumnKV | None = None
        self._arriving: tuple[Arrival[Tensor], Tensor] | None = None
        self._index = index if isinstance(index, VerticalSlash) and index.column_values.numel() else None
        if self._index is not None and context.axes.ring_size > 1:
            _Distinct.of(self._index, k.shape[0], context)  # begins to count

    def start(self) -> ColumnGather:
        """Send this rank's, once; here the host waits for the number of rows if it does not know it yet."""
        if self._index is None:
            return self
        (k, v), index, context = self._kv, self._index, self._context
        if context.axes.ring_size == 1:
            kv_head, token = index.column_kv_heads(k.shape[0]), index.column_values
            self._columns = ColumnKV(_rows(k, kv_head, token), _rows(v, kv_head, token))
        else:
            distinct = _Distinct.of(index, k.shape[0], context)
            held = distinct.held()[0]
            kv_head, row = torch.div(held, k.shape[1], rounding_mode="floor"), held % k.shape[1]
            mine = torch.stack([_rows(k, kv_head, row), _rows(v, kv_head, row)], 1)
            arrival = context.axes.column_gather(mine, self._place)
            context.meter.count("sent_columns_bytes", arrival.sent_bytes)
            self._arriving = arrival, distinct.slots()
        self._index = None
        return self

    def wait(self) -> ColumnKV | None:
        """``[C, D]`` each; None if the index has no columns."""
        self.start()
        if self._arriving is not None:
            arrival, slots = self._arriving
            with self._context.meter.timed("columns"):
                both = arrival.wait()
            self._columns = ColumnKV(both[:, 0].index_select(0, slots), both[:, 1].index_select(0, slots))
            self._arriving = None
        return self._columns


class ColumnReturn:
    """Gradients of the columns: summed up on this rank, then over the ring, then added where their keys and values live.

    Args:
        columns: what they are gradients of. dtype: of the sums, the accumulator's. kv_heads: K.

    Attributes:
        rows: to add to until they are sent, ``[C, D]`` each in the accumulator's dtype; None without columns.
    """

    def __init__(
        self, columns: ColumnKV | None, dtype: torch.dtype, kv_heads: int, index: Index, context: SequenceContext
    ) -> None:
        self._index, self._context, self._kv_heads = index, context, kv_heads
        self._both = None if columns is None else columns.k.new_zeros(2, *columns.k.shape, dtype=dtype)
        self.rows = None if self._both is None else ColumnKV(self._both[0], self._both[1])
        self._sums: tuple[Arrival[Tensor], Tensor] | None = None

    def send(self) -> None:
        """This rank's part is complete. Collective."""
        axes, kernel = self._context.axes, self._context.kernel
        if self._both is None or axes.ring_size == 1:
            return
        assert isinstance(self._index, VerticalSlash)
        distinct = _Distinct.of(self._index, self._kv_heads, self._context)
        held, counts = distinct.held()
        sums = self._both.new_zeros(axes.ring_size * held.numel(), 2, self._both.shape[2])
        kernel.add_rows(sums.transpose(0, 1), distinct.slots(), self._both)
        self._both = self.rows = None
        arrival = axes.column_shares(sums, Place(self._context.layer, backward=True))
        self._context.meter.count("sent_columns_bytes", arrival.sent_bytes)
        self._sums = arrival, torch.where(counts, held, -1)

    def add_to(self, dkv: Tensor, first: int = 0) -> None:
        """Wait for the others' parts and add the sum to this rank's gradients ``[2, K, m, D]`` of rows from ``first`` on."""
        if self._sums is not None:
            arrival, place = self._sums
            with self._context.meter.timed("columns"):
                total = arrival.wait().transpose(0, 1)
        elif self._both is not None:
            assert isinstance(self._index, VerticalSlash)
            tokens = self._context.layout.local_tokens
            place, total = self._index.column_kv_heads(self._kv_heads) * tokens + self._index.column_values, self._both
        else:
            return
        self._context.kernel.add_rows(dkv.flatten(1, 2), self._within(place, first, dkv.shape[2]), total)

    def _within(self, place: Tensor, first: int, rows: int) -> Tensor:
        """Places ``[K * n]`` as places ``[K * rows]`` of a page that begins with row ``first``; -1 outside of it."""
        tokens = self._context.layout.local_tokens
        if rows == tokens:
            return place
        kv_head, row = torch.div(place, tokens, rounding_mode="floor"), place % tokens - first
        return torch.where((place >= 0) & (row >= 0) & (row < rows), kv_head * rows + row, -1)


@dataclass(frozen=True)
class _Distinct:
    """The distinct rows that an index's columns name. They travel rank after rank, by head and token.

    Attributes:
        rank, place: int32 ``[C]``: who holds a column's row, and which of that rank's rows it is.
        through: int32 ``[K * n]``, how many of this rank's keys are named up to each of them.
        most: m.
    """

    rank: Tensor
    place: Tensor
    through: Tensor
    most: HostNumber

    @classmethod
    def of(cls, index: VerticalSlash, kv_heads: int, context: SequenceContext) -> _Distinct:
        """Made once a pass; ``kv_heads``: K."""
        layout = context.layout
        return index.derived(("rows", layout, kv_heads), lambda: cls._of(index, layout, kv_heads, context.rank))

    @classmethod
    def _of(cls, index: VerticalSlash, layout: Layout, kv_heads: int, here: int) -> _Distinct:
        tokens = layout.local_tokens
        row = layout.shard_rows(index.column_values)
        rank = torch.div(row, tokens, rounding_mode="floor")
        at = row + (rank * (kv_heads - 1) + index.column_kv_heads(kv_heads)) * tokens  # rows of rank, head, local token
        named = torch.zeros(layout.ranks * kv_heads * tokens, dtype=torch.int32, device=row.device)
        through = named.index_fill_(0, at, 1).view(layout.ranks, -1).cumsum(1, dtype=torch.int32)
        most = index.noted(("rows", layout, kv_heads), lambda: HostNumber(through[:, -1].max()))
        return cls(rank.int(), through.view(-1)[at] - 1, through[here].clone(), most)

    def slots(self) -> Tensor:
        """Place of each column's row among the ``R * m`` of all ranks, int32 ``[C]``."""
        return self.rank * self.most.get() + self.place

    def held(self) -> tuple[Tensor, Tensor]:
        """This rank's rows as places in its keys ``[K * n]``, int64 ``[m]``, and which of them count; the others fill up to m."""
        number = torch.arange(1, self.most.get() + 1, dtype=torch.int32, device=self.through.device)
        return torch.searchsorted(self.through, number).clamp(max=self.through.numel() - 1), number <= self.through[-1]


def _rows(x: Tensor, kv_head: Tensor, row: Tensor) -> Tensor:
    """Rows of ``[K, n, D]``, contiguous ``[len(row), D]``, in one pass wherever heads stand in memory."""
    (heads, tokens, size), (head_step, row_step, step) = x.shape, x.stride()
    if step != 1 or head_step % size or row_step % size:
        return x[kv_head, row]
    head_step, row_step = head_step // size, row_step // size
    memory = x.as_strided(((heads - 1) * head_step + (tokens - 1) * row_step + 1, size), (size, 1))
    return memory.index_select(0, kv_head * head_step + row * row_step)
