"""The Triton backend: the kernel contract for GPUs, from the implicit index.

bfloat16, float16 and float32 (computed exactly, without matrix units; up to head size 128), head sizes up to 256 that are
multiples of 8, any grouping of heads. float64 is left to the reference. The backward pass has no atomics: it repeats bit for bit.

A value that is not a number may reach more rows than those that read its key: those that share a tile of columns with it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import BlockLists, VerticalSlash
from ds_sparse_ring.kernels import hop_index
from ds_sparse_ring.kernels.contract import ColumnKV, Work
from ds_sparse_ring.kernels.torch_reference import TorchKernel
from ds_sparse_ring.kernels.triton_backward import add_rows_kernel, dcolumns_kernel, delta_kernel, dkv_kernel, dq_kernel
from ds_sparse_ring.kernels.triton_forward import forward_kernel
from ds_sparse_ring.layout import BLOCK

_ALIGNMENT = 16  # bytes, of rows that the copy engine reads


@dataclass(frozen=True)
class Tuning:
    """Launch parameters of a kernel.

    Attributes:
        tile: keys per tile of columns. stages: depth of the software pipeline. warps: of a program. registers: a thread has at
            most so many; None: as the compiler likes.
    """

    tile: int
    stages: int
    warps: int
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """Of a launch; only CUDA knows a bound on registers."""
        bound = {} if self.registers is None or torch.version.hip is not None else {"maxnreg": self.registers}
        return {"num_warps": self.warps, **bound}


def tuning(kernel: str, dtype: torch.dtype, padded_head: int) -> Tuning:
    """Launch parameters of ``forward``, ``dq``, ``dkv`` or ``dcolumns``, chosen on an H200 (docs/measurements.md)."""
    if dtype == torch.float32:  # only to be right, and to fit
        return Tuning(32, 1, 8)
    if padded_head > 128:
        return Tuning(64, 1, 8)
    return Tuning(128, 1, 4, registers=168) if kernel == "forward" else Tuning(64, 2, 4)


class TritonKernel(TorchKernel):
    """The kernel contract in Triton."""

    name = "triton"

    def __init__(self) -> None:
        """Nothing is compiled yet: kernels are, when a shape is first used.

        Raises:
            SparseRingError: there is no GPU.
        """
        if not torch.cuda.is_available() and isinstance(forward_kernel, triton.JITFunction):  # not in Triton's interpreter
            raise SparseRingError(
                'sparse_ring.backend: "triton" needs a GPU that torch can use; leave the key out for the fastest kernels here'
            )

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
        if not _compiled(q):
            return super().forward(q, k, v, work, o_acc, lse_acc, columns, overwrite=overwrite)
        call = _Call(q, k, v, work, columns)
        call.add(o=o_acc, lse=lse_acc, **_strides(o=o_acc), lse_head=lse_acc.stride(0), OVERWRITE=overwrite)
        call.launch("forward", forward_kernel, q.shape[0] * call.q_blocks)

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
        if not _compiled(q):
            return super().backward(q, k, v, do, lse, delta, work, dq, dk, dv, columns, d_columns, overwrite=overwrite)
        call = _Call(q, k, v, work, columns)
        call.add(do_desc=_block_descriptor(do.to(q.dtype)), lse=lse.float().contiguous(), delta=delta.float().contiguous())
        call.add(dq=dq, dk=dk, dv=dv, **_strides(dq=dq, dk=dk, dv=dv), OVERWRITE=overwrite)
        call.launch("dq", dq_kernel, q.shape[0] * call.q_blocks)
        call.launch("dkv", dkv_kernel, k.shape[0] * call.k_blocks)
        if d_columns is not None and d_columns.k.shape[0]:
            call.add(dk=d_columns.k, dv=d_columns.v)
            call.launch("dcolumns", dcolumns_kernel, call.column_tiles("dcolumns"))

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        """See `Kernel.delta`."""
        if not _compiled(o):
            return super().delta(do, o)
        out = torch.empty(o.shape[:2], dtype=torch.float32, device=o.device)
        grid = (o.shape[1] // BLOCK, o.shape[0])
        with torch.cuda.device_of(o):
            delta_kernel[grid](do, o, out, *do.stride(), *o.stride(), o.shape[1], D=o.shape[2], DP=_padded(o.shape[2]))
        return out

    def add_rows(self, out: Tensor, place: Tensor, x: Tensor) -> None:
        """See `Kernel.add_rows`."""
        if out.dtype != torch.float32:
            return super().add_rows(out, place, x)
        if out.shape[1] < 1 << 31:
            place = place.int()  # half the passes of a sort
        place, order = place.sort(stable=True)
        with torch.cuda.device_of(out):
            add_rows_kernel[(place.numel(), out.shape[0])](
                out, place, order, x, place.numel(), *out.stride()[:2], *x.stride()[:2], D=out.shape[2],
                DP=_padded(out.shape[2]), num_warps=1,
            )  # fmt: skip


def _compiled(q: Tensor) -> bool:
    """What the kernels are compiled for; all else is left to the reference. float32 tiles of head size 256 do not fit."""
    return q.dtype in (torch.bfloat16, torch.float16) or (q.dtype == torch.float32 and q.shape[2] <= 128)


class _Call:
    """The arguments of a call by name; each kernel takes those that it names."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, work: Work, columns: ColumnKV | None) -> None:
        _check(q, k, v)
        if columns is not None and columns.k.shape[0] == 0:
            columns = None
        self.q_blocks, self.k_blocks = q.shape[1] // BLOCK, k.shape[1] // BLOCK
        self._dtype, self._work, self._columns = q.dtype, work, columns
        self._tiled: dict[int, dict[str, Any]] = {}
        self._spans = hop_index.spans(work, self.q_blocks, self.k_blocks, q.device)
        index, self._padded = work.index, _padded(q.shape[2])
        self._arguments: dict[str, Any] = {
            "q_desc": _block_descriptor(q),
            "k_desc": _block_descriptor(k),
            "v_desc": _block_descriptor(v),
            "q_blocks": self.q_blocks,
            "k_blocks": self.k_blocks,
            "q_stride": work.q_map.stride,
            "q_start": work.q_map.start,
            "base": self._spans.base,
            "segments": self._spans.segments,
            "q_segment": self._spans.q_segment,
            "k_segments": self._spans.k_segments,
            "patterns": index.patterns,
            "scale": work.scale,
            "scale_log2": work.scale / math.log(2),
            "group": q.shape[0] // k.shape[0],
            "heads_per_pattern": index.heads_per_pattern,
            "D": q.shape[2],
            "DP": self._padded,
            "KIND": hop_index.kind_of(index),
            "OWN": self._spans.own,
            "COLUMNS": columns is not None,
            "PRECISION": "ieee" if q.dtype == torch.float32 else None,
        }

    def add(self, **arguments: Any) -> None:
        self._arguments |= arguments

    def launch(self, name: str, kernel: Any, programs: int) -> None:
        tune = tuning(name, self._dtype, self._padded)
        named = self._arguments | self._lists(transposed=name == "dkv") | self._column_arguments(tune.tile)
        named |= {"TILE": tune.tile, "STAGES": tune.stages}
        with torch.cuda.device_of(self._arguments["lse"]):
            kernel[(programs,)](**{a: named[a] for a in kernel.arg_names}, **tune.options)

    def column_tiles(self, name: str) -> int:
        """Programs that cover all tiles of columns."""
        return self._column_table(tuning(name, self._dtype, self._padded).tile).tile_row.numel()

    def _lists(self, *, transposed: bool) -> dict[str, Any]:
        """Which key blocks query blocks read, in the form of the index's kind; what a kind has not, no kernel reads."""
        work, index, unused = self._work, self._work.index, self._spans.segments
        if isinstance(index, VerticalSlash):
            offsets = hop_index.offsets(index, work.q_map.stride, self._spans.residue)
            return vars(offsets) | {"words": offsets.bits.shape[1]}
        ptr, values = unused, unused
        if isinstance(index, BlockLists):
            lists = hop_index.lists(index, work, self.q_blocks, self.k_blocks)
            ptr, values = (lists.t_ptr, lists.t_values) if transposed else (lists.ptr, lists.values)
        return {"ptr": ptr, "values": values, "bits": unused, "before": unused, "words": 1}

    def _column_table(self, tile: int) -> hop_index.Columns:
        work, index = self._work, self._work.index
        assert isinstance(index, VerticalSlash)
        return hop_index.columns(index, work.q_map, self.q_blocks, self._spans.segments, tile)

    def _column_arguments(self, tile: int) -> dict[str, Any]:
        if self._columns is None:
            unused, block = self._spans.segments, self._arguments["k_desc"]
            tables = dict.fromkeys(("ptr", "ids", "end", "bits"), unused)
            return {f"column_{name}": x for name, x in tables.items()} | {
                "column_k_desc": block,
                "column_v_desc": block,
                "column_words": 1,
            }
        if tile in self._tiled:
            return self._tiled[tile]
        table, index = self._column_table(tile), self._work.index
        assert isinstance(index, VerticalSlash)
        bits = hop_index.offsets(index, 1, 0).bits
        self._tiled[tile] = {
            "column_k_desc": _column_descriptor(self._columns.k, tile),
            "column_v_desc": _column_descriptor(self._columns.v, tile),
            "column_ptr": table.ptr,
            "column_ids": table.ids,
            "column_end": table.end,
            "column_bits": bits,
            "column_words": bits.shape[1],
            "tile_row": table.tile_row,
            "tile_begin": table.tile_begin,
        }
        return self._tiled[tile]


@lru_cache
def _padded(head_size: int) -> int:
    """Head size of tiles: a power of two that matrix units take."""
    return max(16, int(triton.next_power_of_2(head_size)))


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.shape[2] % 8 or q.shape[2] > 256 or v.shape != k.shape:
        raise SparseRingError(
            f"the Triton kernels take head sizes up to 256 that are multiples of 8, the same for keys and values; got "
            f'{q.shape[2]} (q, k) and {v.shape[2]} (v). Set "backend": "torch" to do without them'
        )


def _block_descriptor(x: Tensor) -> Any:
    """One block of tokens of one head of ``[heads, tokens, D]``; what lies behind D reads as 0."""
    x = _readable(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, BLOCK, _padded(x.shape[2])])


def _column_descriptor(x: Tensor, tile: int) -> Any:
    x = _readable(x)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tile, _padded(x.shape[1])])


def _readable(x: Tensor) -> Tensor:
    """``x``, or a copy if the copy engine cannot read it: rows contiguous, all else at multiples of 16 bytes."""
    steps = [x.data_ptr(), *(step * x.element_size() for step in x.stride()[:-1])]
    fits = x.stride(-1) == 1 and all(step > 0 and step % _ALIGNMENT == 0 for step in steps)
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _strides(**tensors: Tensor) -> dict[str, int]:
    """``name_head`` and ``name_row`` of tensors ``[heads, rows, D]``."""
    return {f"{name}_{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate(("head", "row"))}
