"""The C++ backend for CPUs: the kernel contract over ``torch.ops.ds_sparse_ring_cpu``, see ``csrc/cpu``.

The kernels compute in float32. bfloat16 is converted on the way in, as the reference does. float64 and float16 are left to the
reference: they are for tests, and exact there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ds_sparse_ring.index import BlockLists, FullIndex, VerticalSlash
from ds_sparse_ring.kernels.contract import ColumnKV, Work
from ds_sparse_ring.kernels.torch_reference import TorchKernel
from ds_sparse_ring.op_builder import CPUAttentionBuilder

_ALIGNMENT = 16  # head sizes are padded to full vectors
_COMPILED = (torch.float32, torch.bfloat16)


class CPUKernel(TorchKernel):
    """The kernel contract in C++ with OpenMP and AVX-512, AVX2 or neither, whichever the processor has."""

    name = "cpu"

    def __init__(self, *, instruction_set: str = "") -> None:
        """Load the op, compiling it if that has not been done yet (about half a minute).

        Args:
            instruction_set: "avx512", "avx2" or "baseline"; the best one by default.

        Raises:
            RuntimeError: it cannot be compiled here.
        """
        CPUAttentionBuilder().load()
        self._instruction_set = instruction_set

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
        if q.dtype not in _COMPILED or overwrite:
            return super().forward(q, k, v, work, o_acc, lse_acc, columns, overwrite=overwrite)
        o, lse = _padded(o_acc), lse_acc.contiguous()
        torch.ops.ds_sparse_ring_cpu.forward(
            *_call(q, k, v), *_geometry(work), work.scale, *_columns(columns), o, lse, self._instruction_set
        )
        _copy_back((o_acc, o), (lse_acc, lse))

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
        if q.dtype not in _COMPILED or overwrite:
            return super().backward(q, k, v, do, lse, delta, work, dq, dk, dv, columns, d_columns, overwrite=overwrite)
        out = [_padded(x) for x in (dq, dk, dv)]
        column_out = _columns(d_columns)
        torch.ops.ds_sparse_ring_cpu.backward(
            *_call(q, k, v, do),
            lse.contiguous(),
            delta.contiguous(),
            *_geometry(work),
            work.scale,
            *_columns(columns),
            *out,
            *column_out,
            self._instruction_set,
        )
        _copy_back(*zip((dq, dk, dv), out, strict=True))
        if d_columns is not None:
            _copy_back(*zip((d_columns.k, d_columns.v), column_out, strict=True))


def _padded(x: Tensor) -> Tensor:
    """Contiguous float32 with a head size that is a multiple of 16; ``x`` itself if it is that already."""
    missing = -x.shape[-1] % _ALIGNMENT
    return F.pad(x.float(), (0, missing)) if missing else x.float().contiguous()


def _call(*tensors: Tensor) -> list[Tensor]:
    return [_padded(x) for x in tensors]


def _columns(columns: ColumnKV | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if columns is None else (_padded(columns.k), _padded(columns.v))


def _copy_back(*pairs: tuple[Tensor, Tensor | None]) -> None:
    """What the op wrote into a padded or contiguous copy goes where the caller wants it."""
    for wanted, written in pairs:
        if written is not None and written is not wanted:
            wanted.copy_(written[..., : wanted.shape[-1]])


def _geometry(work: Work) -> tuple[list[int], list[int], list[Tensor]]:
    """Maps, shape and tensors of the index, as the op takes them (see ``make_problem`` in bindings.cpp)."""
    index = work.index
    segments = torch.tensor([[s.begin, s.end, s.document_begin, int(s.is_padding)] for s in index.segments])
    if isinstance(index, FullIndex):
        kind, tensors = 0, []
    elif isinstance(index, VerticalSlash):
        kind, tensors = 1, [index.diagonal_ptr, index.diagonal_values, index.column_ptr, index.column_values]
    elif isinstance(index, BlockLists):
        kind, tensors = 2, [index.block_ptr, index.block_values]
    else:
        raise TypeError(f"the CPU kernel does not know {type(index).__name__}")
    maps = [work.q_map.stride, work.q_map.start, work.k_map.stride, work.k_map.start]
    return maps, [kind, index.patterns, index.heads_per_pattern, index.segments[-1].end], [segments, *tensors]
