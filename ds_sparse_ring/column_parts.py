"""Columns that are too many to be at hand at once: gathered, attended to and given back part after part, between the hops.

A part is an index of its own (`VerticalSlash.parts`), and what attention reads by it is merged into what the hops have made: a
kernel call on the queries of the part's segments, with one block of keys that lies behind them, so that they read its columns
alone. Parts are spread over the hops of a pass: each is gathered while some hops run, attended to behind them, and its gradients
go home during the next ones. The backward pass gathers them again, and a key that several parts read travels once for each.
Every rank has the same index, so all ranks do the same parts in the same order.

Shapes: H query heads, K key/value heads, n local tokens, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ds_sparse_ring.columns import ColumnGather, ColumnReturn
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.index import Index, VerticalSlash
from ds_sparse_ring.kernels import ColumnKV, Work
from ds_sparse_ring.kernels.contract import accumulator_dtype, columns_at_once
from ds_sparse_ring.layout import BLOCK, BlockMap
from ds_sparse_ring.ring_pass import RingPass


def parts_of(index: Index, k: Tensor) -> tuple[VerticalSlash, ...]:
    """The parts that an index's columns are done in, for keys ``[K, n, D]``; () if all are at hand at once."""
    return index.parts(columns_at_once(k.shape[2], k.dtype)) if isinstance(index, VerticalSlash) else ()


@dataclass(frozen=True)
class ColumnParts:
    """The columns of one layer, in parts.

    Attributes:
        indices: of `parts_of`. k, v: this rank's, ``[K, n, D]``; not looked at without parts. backward: which pass it is.
    """

    indices: tuple[VerticalSlash, ...]
    k: Tensor
    v: Tensor
    context: SequenceContext
    backward: bool = False

    def gather(self, number: int) -> ColumnGather:
        """The columns of a part; its distinct rows begin to be counted."""
        return ColumnGather(self.k, self.v, self.indices[number], self.context, backward=self.backward)

    def queries(self, number: int, scale: float) -> Iterator[tuple[slice, Work]]:
        """This rank's queries of a part's segments, and what a kernel does with them and with `unread` keys."""
        part = self.indices[number]
        begin, end = part.segments[0].begin, part.segments[-1].end
        for span in self.context.layout.spans(self.context.rank):
            queries = span.within(begin, end)
            if queries.blocks:
                stride, start = queries.map.stride, queries.map.start
                behind = start - (start - end) // stride * stride
                yield queries.tokens, Work(queries.map, BlockMap(stride, behind), part, scale)

    def unread(self) -> Tensor:
        """Keys, or values, that a kernel must be given: one block ``[K, BLOCK, D]``, behind all queries."""
        return self.k.new_zeros(self.k.shape[0], BLOCK, self.k.shape[2])


class _Walk(ABC):
    """The parts of one pass, spread over its ``hops``; without any, nothing happens. Collective."""

    def __init__(self, parts: ColumnParts, scale: float, ring: RingPass, hops: int) -> None:
        self._parts, self._scale, self._ring = parts, scale, ring
        self._hops, self._hop, self._done = hops, 0, 0
        self._counted: deque[ColumnGather] = deque()
        self._arriving: ColumnGather | None = None

    def start(self) -> None:
        """Before the kernels of a hop: the next part is under way meanwhile, and the rows of the one after it are counted."""
        parts = len(self._parts.indices)
        if self._arriving is not None or self._done == parts:
            return
        for number in range(self._done + len(self._counted), min(self._done + 2, parts)):
            self._counted.append(self._parts.gather(number))
        self._arriving = self._counted.popleft().start()

    def go_on(self) -> None:
        """Behind the kernels of a hop: attend to the parts whose turn it is."""
        self._hop += 1
        while self._done < self._hop * len(self._parts.indices) // self._hops:
            self.start()
            assert self._arriving is not None
            columns = self._arriving.wait()
            assert columns is not None, "a part has columns"
            self._arriving = None
            self._attend(self._done, columns)
            del columns  # the next part's take their place
            self._parts.indices[self._done].forget()
            self._done += 1

    @abstractmethod
    def _attend(self, number: int, columns: ColumnKV) -> None:
        """Do what the pass does with a part."""


class PartsForward(_Walk):
    """Merges the attention of q to the columns into o ``[H, n, D]`` and lse ``[H, n]``, in the accumulator's dtype."""

    def __init__(self, parts: ColumnParts, q: Tensor, o: Tensor, lse: Tensor, scale: float, ring: RingPass, hops: int) -> None:
        super().__init__(parts, scale, ring, hops)
        self._q, self._o, self._lse = q, o, lse

    def _attend(self, number: int, columns: ColumnKV) -> None:
        unread, kernel = self._parts.unread(), self._parts.context.kernel
        with self._ring.computing():
            for rows, work in self._parts.queries(number, self._scale):
                kernel.forward(self._q[:, rows], unread, unread, work, self._o[:, rows], self._lse[:, rows], columns)


class PartsBackward(_Walk):
    """Adds the columns' gradients to dq ``[H, n, D]``, in the accumulator's dtype, and to those of keys and values at last.

    Args:
        do: ``[H, n, D]``; lse, delta: ``[H, n]``, of whole rows.
    """

    def __init__(
        self,
        parts: ColumnParts,
        q: Tensor,
        do: Tensor,
        lse: Tensor,
        delta: Tensor,
        dq: Tensor,
        scale: float,
        ring: RingPass,
        hops: int,
    ) -> None:
        super().__init__(parts, scale, ring, hops)
        self._q, self._do, self._lse, self._delta, self._dq = q, do, lse, delta, dq
        self._returning: ColumnReturn | None = None
        apart = parts.indices and self._hops > 1  # else those of the only hop are at hand
        self._home = parts.k.new_zeros(2, *parts.k.shape, dtype=accumulator_dtype(q.dtype)) if apart else None

    def go_on(self) -> None:
        """See `_Walk.go_on`; the only hop's parts wait until `add_to`."""
        if self._hops > 1:
            super().go_on()

    def _attend(self, number: int, columns: ColumnKV) -> None:
        self._come_home()
        parts, acc = self._parts, accumulator_dtype(self._q.dtype)
        unread, context = parts.unread(), parts.context
        nothing = unread.new_zeros(2, *unread.shape, dtype=acc)
        self._returning = ColumnReturn(columns, acc, parts.k.shape[0], parts.indices[number], context)
        with self._ring.computing():
            for rows, work in parts.queries(number, self._scale):
                context.kernel.backward(
                    self._q[:, rows],
                    unread,
                    unread,
                    self._do[:, rows],
                    self._lse[:, rows],
                    self._delta[:, rows],
                    work,
                    self._dq[:, rows],
                    nothing[0],
                    nothing[1],
                    columns,
                    self._returning.rows,
                )
        self._returning.send()
        if context.axes.ring_size == 1:  # nothing is under way
            self._come_home()

    def _come_home(self) -> None:
        if self._returning is not None and self._home is not None:
            self._returning.add_to(self._home)
            self._returning = None

    def add_to(self, dkv: Tensor) -> None:
        """After the last hop: add all parts' gradients to this rank's, ``[2, K, n, D]`` in the accumulator's dtype."""
        home, self._home = self._home, dkv
        if self._hops == 1:
            super().go_on()
        self._come_home()
        if home is not None:
            dkv += home
