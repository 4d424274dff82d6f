"""Compiles the attention kernels for sm_90, without a GPU, in the shapes that take most. Run by test_kernel.py."""

from __future__ import annotations

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_sparse_ring.kernels import hop_index, triton_backward, triton_forward, triton_tables
from ds_sparse_ring.kernels.triton_attention import tuning
from ds_sparse_ring.layout import BLOCK

HOPPER_SHARED_BYTES = 227 * 1024
FLOATS = dict.fromkeys(("scale", "scale_log2"), "fp32")
LISTS = dict.fromkeys(("ptr", "column_ptr", "column_ids", "diagonal_ptr", "diagonals", "columns"), "*i64")
SUMS = dict.fromkeys(("lse", "delta", "dk", "dv"), "*fp32")
INTEGERS = {
    *("q_blocks", "k_blocks", "base", "q_stride", "q_start", "patterns", "group", "heads_per_pattern", "words", "column_words"),
    *(f"{x}_{axis}" for x in ("o", "lse", "dq", "dk", "dv") for axis in ("head", "row")),
    *("stride", "residue"),
}


def compile_kernel(kernel, constants: dict[str, object], warps: int, element: str, tile: int, padded: int) -> int:
    """Shared memory in bytes that the kernel takes."""
    signature = {name: _kind(name, element, tile, padded) for name in kernel.arg_names}
    places = {name: (at,) for at, name in enumerate(kernel.arg_names)}
    signature |= dict.fromkeys(constants, "constexpr")
    multiples = [n for n, kind in signature.items() if kind.startswith("*") or n.endswith("_row")]
    aligned = {places[n]: [["tt.divisibility", 16]] for n in multiples}
    source = ASTSource(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps}).metadata.shared


def _kind(name: str, element: str, tile: int, padded: int) -> str:
    if name.endswith("_desc"):
        shape = [tile, padded] if name.startswith("column") else [1, BLOCK, padded]
        return f"tensordesc<{element}{shape}>"
    known = {**FLOATS, **LISTS, **SUMS, "o": f"*{element}", "dq": f"*{element}", **dict.fromkeys(INTEGERS, "i32")}
    return known.get(name, "*i32")


def main() -> None:
    kernels = {
        "forward": triton_forward.forward_kernel,
        "dq": triton_backward.dq_kernel,
        "dkv": triton_backward.dkv_kernel,
        "dcolumns": triton_backward.dcolumns_kernel,
    }
    for element, dtype, head_size in [("bf16", torch.bfloat16, 128), ("fp16", torch.float16, 256), ("bf16", torch.bfloat16, 8)]:
        for name, kernel in kernels.items():
            padded = max(16, head_size)
            tune = tuning(name, dtype, padded)
            constants: dict[str, object] = {"D": head_size, "DP": padded, "TILE": tune.tile, "STAGES": tune.stages}
            constants |= {"PRECISION": None, "KIND": hop_index.VERTICAL_SLASH, "OWN": True, "COLUMNS": True, "OVERWRITE": True}
            used = {n: value for n, value in constants.items() if n in kernel.arg_names}
            shared = compile_kernel(kernel, used, tune.warps, element, tune.tile, padded)
            what = f"{name}, {element}, head size {head_size}: {shared} bytes of shared memory"
            assert shared <= HOPPER_SHARED_BYTES, what
            print(what)
    compile_kernel(triton_tables.offsets_kernel, {"CHUNK": 128}, 4, "bf16", BLOCK, 128)
    compile_kernel(triton_tables.columns_kernel, {"TILE": BLOCK, "CHUNK": 256}, 4, "bf16", BLOCK, 128)


if __name__ == "__main__":
    main()
