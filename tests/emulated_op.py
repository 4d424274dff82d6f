"""The CUDA kernels on a CPU: their sources, but for the files that name Hopper's instructions, compiled over an emulation.

``emulation/`` has those files: barriers, the copy engine and matrix products as the hardware does them, in threads that
run in turns at random paces. So an index that is walked wrongly, a barrier that waits for ever, a stage that is read too early
or a swizzle that is wrong are found without a GPU. What it cannot find: whether ptxas and the hardware agree.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_sparse_ring.kernels.cuda_attention import CudaKernel
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.op_builder.builder import CSRC

EMULATION = Path(__file__).parent / "emulation"


def build(folder: Path) -> ctypes.CDLL:
    """The kernel and the emulation as a library, compiled in an empty folder."""
    for source in [*(CSRC / "cuda").glob("*.cuh"), *EMULATION.iterdir()]:
        shutil.copy(source, folder)  # the emulation's files take the place of those of the same name
    command = ["c++", "-std=c++17", "-O2", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-shared", "-fPIC", f"-I{folder}"]
    library = folder / "library.so"
    done = subprocess.run(
        [*command, str(folder / "library.cpp"), "-o", str(library)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    loaded = ctypes.CDLL(str(library))
    for function in (loaded.emulated_forward, loaded.emulated_backward, loaded.emulated_wanted):
        function.restype = ctypes.c_char_p
    return loaded


class EmulatedTables:
    """In place of the op's class of that name."""

    def __init__(self, *given: Any) -> None:
        (
            self.base, self.own, self.q_stride, self.q_start, self.q_blocks, self.k_blocks, self.patterns,
            self.heads_per_pattern, self.segments, self.q_segment, self.k_segments, self.bits, columns, lists,
        ) = given  # fmt: skip
        self.columns, self.column_tiles = columns[:4], columns[4:]
        self.lists, self.readers = lists[:2], lists[2:]
        self.full = self.bits is None and not lists


class EmulatedOp:
    """In place of the op's module."""

    HopTables = EmulatedTables

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self.calls = 0

    def forward(
        self, tables: EmulatedTables, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, column_k: Tensor | None,
        column_v: Tensor | None, scale: float, overwrite: bool, spare_multiprocessors: int,
    ) -> None:  # fmt: skip
        """See ``forward`` in bindings.cpp."""
        heads, kv_heads, shared = q.shape[0], k.shape[0], tables.heads_per_pattern
        columns = tables.columns if column_k is not None else []
        output = 2 if not overwrite else 1 if o.dtype == torch.float32 else 0
        numbers = [q.dtype == torch.float16, q.shape[2], heads, kv_heads, tables.q_blocks, tables.k_blocks, shared]
        numbers += [math.gcd(shared, heads // kv_heads), output, tables.full, tables.own, tables.base]
        numbers += [tables.q_stride, tables.q_start]
        numbers += [tables.patterns, 0 if tables.bits is None else tables.bits.shape[1], columns[3].shape[1] if columns else 0]
        numbers += [tables.segments.data_ptr(), tables.q_segment.data_ptr(), 0 if tables.bits is None else tables.bits.data_ptr()]
        numbers += [x.data_ptr() for x in tables.lists] or [0] * 2
        numbers += [x.data_ptr() for x in columns] or [0] * 4
        numbers += [columns[1].numel() if columns else 0]
        numbers += [o.data_ptr(), *o.stride()[:2], lse.data_ptr(), lse.stride(0)]
        for x in (q, k, v):
            numbers += [x.data_ptr(), *x.stride()[:2]]
        for rows in (column_k, column_v):
            numbers += [0] * 3 if rows is None else [rows.data_ptr(), 0, rows.stride(0)]
        failure = self._library.emulated_forward((ctypes.c_int64 * len(numbers))(*map(int, numbers)), ctypes.c_double(scale))
        assert not failure, failure.decode()
        self.calls += 1

    def backward(
        self, tables: EmulatedTables, q: Tensor, k: Tensor, v: Tensor, do: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
        dk: Tensor, dv: Tensor, column_k: Tensor | None, column_v: Tensor | None, d_column_k: Tensor | None,
        d_column_v: Tensor | None, scale: float, overwrite: bool, first_head: int, spare_multiprocessors: int,
    ) -> None:  # fmt: skip
        """See ``backward`` in bindings.cpp."""
        columns = tables.columns if column_k is not None else []
        if overwrite:
            dq.zero_()
        numbers = [q.dtype == torch.float16, q.shape[2], q.shape[0], k.shape[0], tables.q_blocks, tables.k_blocks]
        numbers += [tables.heads_per_pattern, first_head, first_head + dq.shape[0], tables.full, tables.own, tables.base]
        numbers += [tables.q_stride, tables.q_start]
        numbers += [tables.patterns, 0 if tables.bits is None else tables.bits.shape[1], columns[3].shape[1] if columns else 0]
        numbers += [tables.segments.data_ptr(), tables.k_segments.data_ptr()]
        numbers += [0 if tables.bits is None else tables.bits.data_ptr()]
        numbers += [x.data_ptr() for x in tables.readers] or [0] * 2
        numbers += [x.data_ptr() for x in (*columns, *tables.column_tiles)] if columns else [0] * 6
        numbers += [tables.column_tiles[0].numel(), columns[1].numel()] if columns else [0] * 2
        for rows in (lse, delta):
            numbers += [rows.data_ptr(), rows.stride(0)]
        for x in (dk, dv):
            numbers += [x.data_ptr(), *x.stride()[:2]]
        numbers += [0 if x is None else x.data_ptr() for x in (d_column_k, d_column_v)]
        for x in (q, do, dq, k, v):
            numbers += [x.data_ptr(), *x.stride()[:2]]
        for column in (column_k, column_v):
            numbers += [0] * 3 if column is None else [column.data_ptr(), 0, column.stride(0)]
        failure = self._library.emulated_backward((ctypes.c_int64 * len(numbers))(*map(int, numbers)), ctypes.c_double(scale))
        assert not failure, failure.decode()
        self.calls += 1

    def mark_wanted(
        self, words: Tensor, q: Tensor, k: Tensor, rows: list[Tensor], patterns: int, window: int, scale: float, price: float
    ) -> None:
        """See ``mark_wanted`` in bindings.cpp."""
        numbers = [q.dtype == torch.float16, q.shape[2], q.shape[0], k.shape[0], q.shape[1] // BLOCK, k.shape[1]]
        numbers += [q.shape[0] // patterns, window, *(x.data_ptr() for x in rows), words.data_ptr()]
        for x in (q, k):
            numbers += [x.data_ptr(), *x.stride()[:2]]
        given = (ctypes.c_int64 * len(numbers))(*map(int, numbers))
        failure = self._library.emulated_wanted(given, ctypes.c_double(scale), ctypes.c_double(price))
        assert not failure, failure.decode()
        self.calls += 1


class EmulatedKernel(CudaKernel):
    """The backend "cuda" with the emulated op, on a CPU. Triton's interpreter makes the tables."""

    def __init__(self, op: EmulatedOp) -> None:
        self._op: Any = op
        self._spare = 0
