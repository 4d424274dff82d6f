"""The kernel contract, and the merge of partial results that every backend shares.

A kernel call covers one span of query blocks and one span of key blocks (affine maps to global blocks) and everything that the
*global* index says about them. Results are merged into accumulators, so the order of calls does not matter and one kernel
serves a single device, a ring hop, a chunk from host memory.

Shapes: H query heads, K key/value heads (H a multiple of K), n query rows, m key rows (multiples of BLOCK), C columns of the
index over all segments and patterns, D head size. q, k, v: any floating dtype; accumulators: float32, or float64 for float64
inputs. ``lse_nat`` is the natural logarithm of the sum of exponentials of the scaled scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import Index
from ds_sparse_ring.layout import BlockMap


@dataclass(frozen=True)
class ColumnKV:
    """Keys and values of the index's columns, gathered into contiguous rows in the order of ``index.column_values``.

    ``k``, ``v``: ``[C, D]`` in the input's dtype. Row c belongs to the key/value head of its column's pattern.
    """

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Work:
    """What a call covers: all that the index says about a span of queries and a span of keys.

    Attributes:
        q_map, k_map: the spans; global block = stride * local + start. index: global. scale: multiplies q.k before the softmax.
    """

    q_map: BlockMap
    k_map: BlockMap
    index: Index
    scale: float

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise SparseRingError(f"attention: the softmax scale must be positive, got {self.scale}")


class Kernel(Protocol):
    """A backend. Both methods write into their accumulators and return nothing."""

    name: str

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
        """Merge the attention of q over the span's active keys (and over ``columns``, if given) into the accumulators.

        Args:
            q: ``[H, n, D]``; k, v: ``[K, m, D]``.
            o_acc: ``[H, n, D]`` normalised output so far; lse_acc: ``[H, n]`` its lse_nat.
            columns: given in exactly one call per query span and index; those of parts of an index
                (`VerticalSlash.parts`) in calls of their own, with keys behind all queries. Rows without an active key keep
                o = 0, lse = -inf.
            overwrite: this is the first call of its rows: whatever the accumulators hold is overwritten. ``o_acc`` may then have
                the input's dtype, if no other call follows.
        """

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
        """Add the gradients of the same work to ``dq`` ``[H, n, D]``, ``dk``, ``dv`` ``[K, m, D]`` and ``d_columns``.

        Args:
            do: ``[H, n, D]``; lse: ``[H, n]`` lse_nat of the whole row (all calls merged);
            delta: ``[H, n]`` row sums of do * o, see :meth:`delta`. lse, delta and the outputs: in the accumulator's dtype.
            overwrite: as for :meth:`forward`, for ``dq`` alone.
        """

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        """Row sums of do * o in the accumulator's dtype: ``[H, n, D]`` twice -> ``[H, n]``."""

    def add_rows(self, out: Tensor, place: Tensor, x: Tensor) -> None:
        """``out[:, place[i]] += x[:, i]`` where ``place[i]`` is not negative; repeats bit for bit.

        Args:
            out: ``[parts, rows, D]``; place: int32 or int64 ``[C]``; x: ``[parts, C, D]``.
        """


def accumulator_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64 inputs, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


SUMS_BYTES = 1 << 30
"""What a backend takes for fp32 sums of gradients of queries, if the gradients are in half precision: see `heads_of_sums`."""


def heads_of_sums(kv_heads: int, nbytes: int) -> int:
    """For how many key/value heads at a time these sums are made: one at least.

    Args:
        nbytes: sums of one key/value head, those of all query heads that share it.
    """
    return min(kv_heads, max(1, SUMS_BYTES // nbytes))


PART_BYTES = 8 << 30
"""What keys and values of columns that are at hand at once take, with their gradients: see `columns_at_once`."""


def columns_at_once(head_size: int, dtype: torch.dtype) -> int:
    """How many columns a part of an index has at most, unless a single row of it has more."""
    return max(1, PART_BYTES // (2 * head_size * (dtype.itemsize + accumulator_dtype(dtype).itemsize)))


def empty_result(q: Tensor) -> tuple[Tensor, Tensor]:
    """Accumulators without any key for queries ``[H, n, D]``: o = 0, lse = -inf."""
    o = torch.zeros(q.shape, dtype=accumulator_dtype(q.dtype), device=q.device)
    return o, o.new_full(q.shape[:2], float("-inf"))


def merge(o_acc: Tensor, lse_acc: Tensor, o: Tensor, lse: Tensor) -> None:
    """Merge a normalised partial result into the accumulators, in place.

    Two rows without a key (lse = -inf) merge into such a row: the weights are taken against a finite maximum, so that
    -inf - -inf never occurs, and large gaps underflow to 0 instead of overflowing. FlashAttention 2 writes lse = +inf for a row
    without a key, whose weight would erase what others found: it is such a row, on either side.
    """
    lse_acc.masked_fill_(lse_acc == float("inf"), float("-inf"))
    lse = lse.masked_fill(lse == float("inf"), float("-inf"))
    largest = torch.maximum(lse_acc, lse)
    finite = torch.where(torch.isinf(largest), torch.zeros_like(largest), largest)
    weight_acc, weight = (lse_acc - finite).exp(), (lse - finite).exp()
    total = weight_acc + weight
    divisor = torch.where(total > 0, total, torch.ones_like(total))
    o_acc.mul_((weight_acc / divisor)[..., None]).add_(o * (weight / divisor)[..., None])
    lse_acc.copy_(torch.where(total > 0, finite + divisor.log(), torch.full_like(total, float("-inf"))))
