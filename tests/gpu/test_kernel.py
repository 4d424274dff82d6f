"""The Triton kernels, compiled: every dtype, head size, index and feature, gradients included, against float64."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.kernels import get_kernel
from tests.kernel_checks import (
    SHAPES,
    check_errors,
    check_hops,
    make_gradient,
    make_index,
    make_sequence,
    on_device,
    run,
)
from tests.unit.reference import global_qkv

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("head_size", [32, 40, 64, 96, 128, 256])
@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
def test_error_is_at_most_twice_that_of_pytorch_in_the_same_dtype(dtype: torch.dtype, head_size: int, kind: str) -> None:
    check_errors(get_kernel("triton"), kind, [700, 900], 4, 2, 1, dtype, head_size, device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
def test_shapes_that_hurt(
    dtype: torch.dtype, kind: str, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int
) -> None:
    check_errors(get_kernel("triton"), kind, lengths, heads, kv_heads, shared, dtype, head_size, device="cuda")


@pytest.mark.parametrize("shared", [1, 2, 8])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_overwriting_calls_read_nothing_of_their_outputs_and_write_the_input_dtype(shared: int, head_size: int) -> None:
    kernel = get_kernel("triton")
    check_errors(kernel, "vertical-slash", [1, 900, 64], 8, 1, shared, torch.bfloat16, head_size, device="cuda", overwrite=True)


@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_hops_of_a_ring_and_chunks_of_their_keys_add_up_to_the_whole(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    check_hops(get_kernel("triton"), kind, dtype, tolerance=tolerance, device="cuda")


@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
def test_results_repeat_bit_for_bit(kind: str) -> None:
    sequence = make_sequence([3000, 5000])
    index = on_device(make_index(kind, sequence, 8, 1), torch.device("cuda"))
    q, k, v = (x.to("cuda", torch.bfloat16) for x in global_qkv(sequence, 8, 1, 128))
    first, *others = (run(get_kernel("triton"), q, k, v, make_gradient(q), index, 0.1, overwrite=True) for _ in range(6))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
