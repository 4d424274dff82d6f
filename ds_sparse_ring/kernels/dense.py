"""Dense causal attention inside each document of one rank, with the best library that is installed.

The libraries are in ``dense_backends.py``, as are the shapes. A stream of n rows holds documents one after the other; each
is attended on its own, so that a stream of one document costs one call. Rows behind the last document are padding.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ds_sparse_ring.documents import Segment
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.kernels.contract import accumulator_dtype
from ds_sparse_ring.kernels.dense_backends import BACKENDS, DenseBackend, DenseCase, Gradients
from ds_sparse_ring.layout import BLOCK

__all__ = ["DenseAttention", "DenseCase", "DenseStatus", "available_dense", "best_dense", "document_rows", "find_dense"]


@dataclass(frozen=True)
class DenseStatus:
    """One library: its name, the installed version (None: not installed), and why it cannot be used (None: it can)."""

    name: str
    version: str | None
    why_not: str | None

    @property
    def usable(self) -> bool:
        """Whether it can be used for the case that was asked about."""
        return self.why_not is None


@dataclass(frozen=True)
class DenseAttention:
    """Dense causal attention by one library; `best_dense` makes one."""

    backend: DenseBackend

    @property
    def name(self) -> str:
        """The library's name in `available_dense`."""
        return self.backend.name

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, rows: SequenceOf[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attend.

        Args:
            q: ``[H, n, D]``; k, v: ``[K, n, D]``; any strides with contiguous rows of D.
            scale: multiplies q.k before the softmax.
            rows: how many rows each document takes, in stream order; None: one document of n rows.

        Returns:
            o ``[H, n, D]`` in the dtype of q and lse_nat ``[H, n]``; padding rows have o = 0 and lse = -inf. Strides are
            what the library gives.

        Raises:
            SparseRingError: documents that take more than n rows, or an empty one.
        """
        spans = _spans(rows, q.shape[1])
        if spans == [(0, q.shape[1])]:
            return self.backend.forward(q, k, v, scale)
        o = torch.zeros_like(q)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=accumulator_dtype(q.dtype), device=q.device)
        for begin, end in spans:
            q_, k_, v_ = (x[:, begin:end] for x in (q, k, v))
            o[:, begin:end], lse[:, begin:end] = self.backend.forward(q_, k_, v_, scale)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        scale: float,
        rows: SequenceOf[int] | None = None,
    ) -> Gradients:
        """Gradients of `forward`.

        Args:
            do, o: ``[H, n, D]`` in the dtype of q; lse: ``[H, n]``; as `forward` gave them.

        Returns:
            dq ``[H, n, D]``, dk and dv ``[K, n, D]`` in the dtype of q; zero in padding rows.
        """
        spans = _spans(rows, q.shape[1])
        if spans == [(0, q.shape[1])]:
            return self.backend.backward(do, q, k, v, o, lse, scale)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for begin, end in spans:
            do_, q_, k_, v_, o_, lse_ = (x[:, begin:end] for x in (do, q, k, v, o, lse))
            parts = self.backend.backward(do_, q_, k_, v_, o_, lse_, scale)
            for whole, part in zip((dq, dk, dv), parts, strict=True):
                whole[:, begin:end] = part
        return dq, dk, dv


def available_dense(case: DenseCase) -> list[DenseStatus]:
    """What is known about each library for ``case``, fastest first."""
    return [DenseStatus(b.name, b.version(), b.refusal(case)) for b in BACKENDS]


def best_dense(case: DenseCase, name: str | None = None) -> DenseAttention:
    """The fastest library that can be used for ``case``, or the one named.

    Raises:
        SparseRingError: an unknown name, or nothing that can be used; says why for each.
    """
    wanted = [b for b in BACKENDS if name in (None, b.name)]
    if not wanted:
        raise SparseRingError(f"dense attention: unknown library {name!r}; use one of {', '.join(b.name for b in BACKENDS)}")
    reasons = []
    for backend in wanted:
        why_not = backend.refusal(case)
        if why_not is None:
            return DenseAttention(backend)
        reasons.append(f"{backend.name}: {why_not}")
    raise SparseRingError(f"dense attention: no library can be used for {case}: {'; '.join(reasons)}")


@lru_cache(maxsize=64)
def find_dense(case: DenseCase, *, deterministic: bool = False) -> DenseAttention | None:
    """`best_dense`, or None where nothing can be used; ``deterministic``: torch's flag, on which what can be used depends."""
    return best_dense(case) if any(status.usable for status in available_dense(case)) else None


def document_rows(segments: tuple[Segment, ...]) -> list[int]:
    """Rows that each document of a stream takes, whole blocks; the blocks behind the last one are left out."""
    ends = {s.document_begin: s.end for s in segments if not s.is_padding}
    return [(end - begin) * BLOCK for begin, end in ends.items()]


def _spans(rows: SequenceOf[int] | None, total: int) -> list[tuple[int, int]]:
    spans, begin = [], 0
    for count in [total] if rows is None else rows:
        spans.append((begin, begin + count))
        begin += count
    if begin > total or any(begin >= end for begin, end in spans):
        raise SparseRingError(f"dense attention: documents of {rows} rows in a stream of {total}: each needs a row, all must fit")
    return spans
