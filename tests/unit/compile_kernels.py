"""Compiles the kernels that hold tiles in shared memory for sm_90, without a GPU, in the shapes that take most.

``compile_kernels.py attention`` or ``selection``; run by test_compile.py without Triton's interpreter.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_sparse_ring.kernels import hop_index, triton_backward, triton_forward, triton_tables
from ds_sparse_ring.kernels.triton_attention import tuning
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.select import tables as fields
from ds_sparse_ring.select import triton_compact as compact
from ds_sparse_ring.select.fast_probe import launch_options, mass_options, together
from ds_sparse_ring.select.triton_mass import mass_kernel, offset_mass_kernel
from ds_sparse_ring.select.triton_price import price_kernel
from ds_sparse_ring.select.triton_probe import lse_chunk_kernel

HOPPER_SHARED_BYTES = 227 * 1024
FLOATS = dict.fromkeys(("scale", "scale_log2"), "fp32")
LISTS = dict.fromkeys(("ptr", "column_ptr", "column_ids", "diagonal_ptr", "diagonals", "columns"), "*i64")
SUMS = dict.fromkeys(("lse", "delta", "dk", "dv"), "*fp32")
INTEGERS = {
    *("q_blocks", "k_blocks", "base", "q_stride", "q_start", "patterns", "group", "heads_per_pattern", "words", "column_words"),
    *(f"{x}_{axis}" for x in ("o", "lse", "dq", "dk", "dv") for axis in ("head", "row")),
    *("stride", "size"),
}
POINTERS = {
    **dict.fromkeys(("groups", "segments", "chunks", "offset_chunks", "key_blocks", "local_of"), "*i64"),
    **dict.fromkeys(("words", "diagonals", "histogram", "sums", "state", "above", "tied", "before", "counts"), "*i64"),
    "share": "*fp64",
    "needed": "*i8",
    **dict.fromkeys(("lse", "partials", "largest_out", "total_out", "anchors", "bounds", "columns", "mass"), "*fp32"),
}
SCALARS = {"k_head_stride": "i64", "high": "i64", "scale2": "fp32", "price": "fp32"}


def compile_kernel(kernel, kind: Callable[[str], str], constants: Mapping[str, object], options: Mapping[str, int]) -> int:
    """Shared memory in bytes that a kernel takes whose argument ``name`` is of ``kind(name)``."""
    signature = {name: "constexpr" if name in constants else kind(name) for name in kernel.arg_names}
    places = {name: (at,) for at, name in enumerate(kernel.arg_names)}
    multiples = [n for n, x in signature.items() if x.startswith("*") or n.endswith(("_row", "k_stride", "k_head_stride"))]
    aligned = {places[n]: [["tt.divisibility", 16]] for n in multiples}
    source = ASTSource(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(options)).metadata.shared


def warps(count: int) -> dict[str, int]:
    return {"num_warps": count}


def attention_kind(name: str, element: str, tile: int, padded: int) -> str:
    if name.endswith("_desc"):
        shape = [tile, padded] if name.startswith("column") else [1, BLOCK, padded]
        return f"tensordesc<{element}{shape}>"
    known = {**FLOATS, **LISTS, **SUMS, "o": f"*{element}", "dq": f"*{element}", **dict.fromkeys(INTEGERS, "i32")}
    return known.get(name, "*i32")


def selection_kind(name: str, element: str) -> str:
    return {"q_rows": f"*{element}", "k": f"*{element}", **POINTERS, **SCALARS}.get(name, "i32")


def attention() -> None:
    by_name = {
        "forward": triton_forward.forward_kernel,
        "dq": triton_backward.dq_kernel,
        "dkv": triton_backward.dkv_kernel,
        "dcolumns": triton_backward.dcolumns_kernel,
    }
    for element, dtype, head_size in [("bf16", torch.bfloat16, 128), ("fp16", torch.float16, 256), ("bf16", torch.bfloat16, 8)]:
        for name, kernel in by_name.items():
            padded = max(16, head_size)
            tune = tuning(name, dtype, padded)
            constants: dict[str, object] = {"D": head_size, "DP": padded, "TILE": tune.tile, "STAGES": tune.stages}
            constants |= {"PRECISION": None, "KIND": hop_index.VERTICAL_SLASH, "OWN": True, "COLUMNS": True, "OVERWRITE": True}
            used = {n: value for n, value in constants.items() if n in kernel.arg_names}
            shared = compile_kernel(
                kernel,
                partial(attention_kind, element=element, tile=tune.tile, padded=padded),
                used,
                tune.options,
            )
            what = f"{name}, {element}, head size {head_size}: {shared} bytes of shared memory"
            assert shared <= HOPPER_SHARED_BYTES, what
            print(what)
    tables = partial(attention_kind, element="bf16", tile=BLOCK, padded=128)
    compile_kernel(triton_tables.offsets_kernel, tables, {"CHUNK": 128}, warps(4))
    compile_kernel(triton_tables.columns_kernel, tables, {"TILE": BLOCK, "CHUNK": 256}, warps(4))


def selection() -> None:
    for element, bytes_each, head_size, per_pattern in [("bf16", 2, 128, 4), ("bf16", 2, 256, 1)]:
        options = launch_options(head_size, bytes_each, per_pattern)
        group = {"GROUP": 8, "D": options.pop("D"), "BLOCK_D": options.pop("BLOCK_D")}
        rows = {"HPP": per_pattern, "HEADS": together(head_size, bytes_each, per_pattern)}
        for kernel, more in [
            (lse_chunk_kernel, {"HEADS": together(head_size, bytes_each, 8), "BOUND": True}),
            (price_kernel, {**rows, "SKIP": True}),
            (price_kernel, {**rows, "SKIP": False}),
            (mass_kernel, {"HPP": per_pattern}),
        ]:
            own = mass_options(head_size, bytes_each) if kernel is mass_kernel else {}
            shared = compile_kernel(kernel, partial(selection_kind, element=element), group | more, options | own)
            what = f"{kernel.__name__}, {element}, head size {head_size}, {per_pattern} heads a pattern: {shared} bytes"
            assert shared <= HOPPER_SHARED_BYTES, what
            print(what)
    walk = {"SLOT": fields.SLOT, "SIZE": fields.TILES, "BLOCKS": 16}
    steps = {"BEGIN": fields.CHUNK_BEGIN, "END": fields.CHUNK_END, "CHUNKS": 16}
    counted, weighed = {"BITS": compact.COUNT_BITS, "MASS": False}, {"BITS": compact.MASS_BITS, "MASS": True}
    of_columns = {**walk, "OFFSETS": False}
    for kernel, constants in [
        (offset_mass_kernel, {"SHARED": False, "BLOCKS": 8}),
        (compact.radix_count_kernel, {**of_columns, **counted}),
        (compact.radix_count_kernel, {**of_columns, **weighed, "BLOCKS": 1}),
        (compact.radix_sum_kernel, {**steps, "WIDTH": 1 << compact.COUNT_BITS}),
        (compact.radix_step_kernel, {**steps, **counted, "SUMMED": False, "FIRST": True, "LAST": True}),
        (compact.radix_step_kernel, {**steps, **weighed, "SUMMED": False, "FIRST": True, "LAST": True}),
        (compact.mark_kernel, {**of_columns, "SINK_END": fields.SINK_END}),
        (compact.tie_count_kernel, {"BLOCKS": 16}),
        (compact.cut_ties_kernel, of_columns),
    ]:
        compile_kernel(kernel, partial(selection_kind, element="bf16"), constants, warps(4))


if __name__ == "__main__":
    {"attention": attention, "selection": selection}[sys.argv[1]]()
