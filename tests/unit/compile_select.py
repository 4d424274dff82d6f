"""Compiles the kernels that hold tiles in shared memory for sm_90, without a GPU. Run by test_select_triton.py."""

from __future__ import annotations

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ds_sparse_ring.select import triton_probe as kernels
from ds_sparse_ring.select.fast import launch_options, together

HOPPER_SHARED_BYTES = 227 * 1024
POINTERS = {
    **dict.fromkeys(("groups", "segments", "chunks", "key_blocks", "words"), "*i64"),
    "needed": "*i8",
    **dict.fromkeys(("lse", "partials", "largest_out", "total_out", "anchors", "bounds", "mass_out", "out"), "*fp32"),
}
SCALARS = {"k_head_stride": "i64", "scale2": "fp32", "price": "fp32"}


def compile_kernel(kernel, element: str, constants: dict[str, int], options: dict[str, int]) -> int:
    """Shared memory in bytes that the kernel takes."""
    kinds = {"q_rows": f"*{element}", "k": f"*{element}", **POINTERS, **SCALARS}
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in kernel.arg_names}
    places = {name: (at,) for at, name in enumerate(kernel.arg_names)}
    aligned = {places[n]: [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*") or "stride" in n}
    source = ASTSource(kernel, signature, {places[n]: value for n, value in constants.items()}, aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).metadata.shared


def main() -> None:
    for element, bytes_each, head_size, per_pattern in [("bf16", 2, 128, 4), ("bf16", 2, 256, 1)]:
        options = launch_options(head_size, bytes_each, per_pattern)
        group = {"GROUP": 8, "D": options.pop("D"), "BLOCK_D": options.pop("BLOCK_D")}
        rows = {"HPP": per_pattern, "HEADS": together(head_size, bytes_each, per_pattern)}
        for kernel, more in [
            (kernels.lse_chunk_kernel, {"HEADS": together(head_size, bytes_each, 8), "BOUND": True}),
            (kernels.price_kernel, {**rows, "SKIP": True}),
            (kernels.price_kernel, {**rows, "SKIP": False}),
            (kernels.column_mass_kernel, rows),
            (kernels.probability_kernel, {"HPP": per_pattern}),
        ]:
            shared = compile_kernel(kernel, element, group | more, options)
            what = f"{kernel.__name__}, {element}, head size {head_size}, {per_pattern} heads a pattern: {shared} bytes"
            assert shared <= HOPPER_SHARED_BYTES, what
            print(what)


if __name__ == "__main__":
    main()
