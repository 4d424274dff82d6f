"""The CUDA C++ backend for Hopper GPUs: the kernels of ``csrc/cuda``, and Triton's kernels for all that they do not do.

They do bfloat16 and float16, head sizes 64 and 128, every kind of index. The rest is done by Triton's kernels, which read the
same tables of `hop_index`: float32 and other head sizes. Gradients repeat bit for bit only with
``torch.use_deterministic_algorithms(True)``; they are Triton's then, too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.index import BlockLists, VerticalSlash
from ds_sparse_ring.kernels import hop_index
from ds_sparse_ring.kernels.contract import ColumnKV, Work, heads_of_sums
from ds_sparse_ring.kernels.triton_attention import TritonKernel
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.op_builder import CUDAAttentionBuilder

_HEAD_SIZES = (64, 128)
_COLUMN_TILE = 128  # of the backward pass


class CudaKernel(TritonKernel):
    """The kernel contract in CUDA C++ where that is faster, else in Triton."""

    name = "cuda"

    def __init__(self, *, spare_multiprocessors: int = 0) -> None:
        """Load the op, compiling it if that has not been done yet (about a minute).

        Args:
            spare_multiprocessors: are left to kernels that run beside attention, which occupies all others until it ends; not by
                `mark_wanted`, a block a tile, beside which no hop is under way.

        Raises:
            RuntimeError: it cannot be compiled here.
            SparseRingError: there is no GPU.
        """
        super().__init__()
        self._op: Any = CUDAAttentionBuilder().load()
        self._spare = spare_multiprocessors

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
        if not _offered(q, v):
            return super().forward(q, k, v, work, o_acc, lse_acc, columns, overwrite=overwrite)
        column_k, column_v = (columns.k, columns.v) if columns is not None else (None, None)
        tables = self._tables(work, q.shape[1] // BLOCK, k.shape[1] // BLOCK, q.device, columns is not None)
        self._op.forward(tables, q, k, v, o_acc, lse_acc, column_k, column_v, work.scale, overwrite, self._spare)

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
        if not _offered(q, v) or torch.are_deterministic_algorithms_enabled():
            return super().backward(q, k, v, do, lse, delta, work, dq, dk, dv, columns, d_columns, overwrite=overwrite)
        column_k, column_v = (columns.k, columns.v) if columns is not None else (None, None)
        d_column_k, d_column_v = (d_columns.k, d_columns.v) if d_columns is not None else (None, None)
        tables = self._tables(work, q.shape[1] // BLOCK, k.shape[1] // BLOCK, q.device, columns is not None)
        do, lse, delta = do.to(q.dtype), lse.float().contiguous(), delta.float().contiguous()

        def add(sums: Tensor, first_head: int, overwrite: bool) -> None:
            self._op.backward(
                tables, q, k, v, do, lse, delta, sums, dk, dv,
                column_k, column_v, d_column_k, d_column_v, work.scale, overwrite, first_head, self._spare,
            )  # fmt: skip

        if dq.dtype == torch.float32:
            return add(dq, 0, overwrite)
        heads, group = q.shape[0], q.shape[0] // k.shape[0]
        step = group * heads_of_sums(k.shape[0], 4 * group * q[0].numel())
        sums = torch.empty((min(step, heads), *q.shape[1:]), dtype=torch.float32, device=q.device)
        for first in range(0, heads, step):
            of_call = dq[first : first + step]
            part = sums[: len(of_call)]
            if not overwrite:
                part.copy_(of_call)
            add(part, first, overwrite)
            of_call.copy_(part)

    def marks_wanted(self, q: Tensor, scale: float) -> bool:
        """Whether `mark_wanted` knows such queries."""
        return _offered(q, q) and scale > 0

    def mark_wanted(
        self, words: Tensor, q: Tensor, k: Tensor, rows: list[Tensor], patterns: int, window: int, scale: float, price: float
    ) -> None:
        """Set the bits of the keys that queries want, see ``select/every_query.py``.

        Args:
            words: int64, bits by slot. q: ``[H, n, D]``; k: ``[K, N, D]``, keys of the whole sequence.
            rows: global number, first block of the document, valid tokens, first slot and slots of a pattern of each query block,
                int64 ``[n / BLOCK]``.
            window: blocks that a query block reads anyway.
            price: share of the sum from which on a key is wanted.
        """
        self._op.mark_wanted(words, q, k, rows, patterns, window, scale, price)

    def _tables(self, work: Work, q_blocks: int, k_blocks: int, device: torch.device, with_columns: bool) -> Any:
        """Addresses of the tables of a hop; the op keeps them alive. Cached with the index, as the tables are."""
        index = work.index
        if not isinstance(index, VerticalSlash | BlockLists):
            return self._make_tables(work, q_blocks, k_blocks, device, with_columns)
        key = ("cuda", work.q_map, work.k_map, q_blocks, k_blocks, with_columns)
        return index.derived(key, lambda: self._make_tables(work, q_blocks, k_blocks, device, with_columns))

    def _make_tables(self, work: Work, q_blocks: int, k_blocks: int, device: torch.device, with_columns: bool) -> Any:
        index, q_map = work.index, work.q_map
        spans = hop_index.spans(work, q_blocks, k_blocks, device)
        bits, of_columns, lists = None, [], []
        if isinstance(index, VerticalSlash):
            bits = hop_index.offsets(index, q_map.stride, spans.residue).bits
            if with_columns:
                table = hop_index.columns(index, q_map, q_blocks, spans.segments, _COLUMN_TILE)
                bits_of_all = hop_index.offsets(index, 1, 0).bits
                of_columns = [table.ptr, table.ids, table.end, bits_of_all, table.tile_row, table.tile_begin]
        elif isinstance(index, BlockLists):
            rows = hop_index.lists(index, work, q_blocks, k_blocks)
            lists = [rows.ptr, rows.values, rows.t_ptr, rows.t_values]
        return self._op.HopTables(
            spans.base, spans.own, q_map.stride, q_map.start, q_blocks, k_blocks, index.patterns, index.heads_per_pattern,
            spans.segments, spans.q_segment, spans.k_segments, bits, of_columns, lists,
        )  # fmt: skip


def _offered(q: Tensor, v: Tensor) -> bool:
    return q.dtype in (torch.bfloat16, torch.float16) and q.shape[2] == v.shape[2] in _HEAD_SIZES
