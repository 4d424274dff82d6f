"""The Triton kernels, compiled: every dtype, head size, index and feature, gradients included, against float64."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.bench.patterns import vertical_slash_pattern
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import mask
from ds_sparse_ring.kernels import get_kernel
from ds_sparse_ring.layout import BLOCK
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


KINDS = ["vertical-slash", "block-lists", "full"]
HALF = [torch.bfloat16, torch.float16]


@pytest.mark.parametrize(
    ("dtype", "head_size", "kind"),
    [(dtype, size, "vertical-slash") for dtype in HALF for size in (32, 40, 64, 96, 128, 256)]
    + [(dtype, size, kind) for dtype in HALF for size in (128, 256) for kind in KINDS[1:]]
    + [(torch.float32, 64, kind) for kind in KINDS],
)
def test_error_is_at_most_twice_that_of_pytorch_in_the_same_dtype(dtype: torch.dtype, head_size: int, kind: str) -> None:
    check_errors(get_kernel("triton"), kind, [700, 900], 4, 2, 1, dtype, head_size, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
def test_shapes_that_hurt(kind: str, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int) -> None:
    check_errors(get_kernel("triton"), kind, lengths, heads, kv_heads, shared, torch.bfloat16, head_size, device="cuda")


@pytest.mark.parametrize("shared", [1, 2, 8])
@pytest.mark.parametrize("head_size", [64, 96, 128, 256])
def test_overwriting_calls_read_nothing_of_their_outputs_and_write_the_input_dtype(shared: int, head_size: int) -> None:
    kernel = get_kernel("triton")
    check_errors(kernel, "vertical-slash", [1, 900, 64], 8, 1, shared, torch.bfloat16, head_size, device="cuda", overwrite=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_hops_of_a_ring_and_chunks_of_their_keys_add_up_to_the_whole(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    check_hops(get_kernel("triton"), kind, dtype, tolerance=tolerance, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_results_repeat_bit_for_bit(kind: str) -> None:
    sequence = make_sequence([3000, 5000])
    index = on_device(make_index(kind, sequence, 8, 1), torch.device("cuda"))
    q, k, v = (x.to("cuda", torch.bfloat16) for x in global_qkv(sequence, 8, 1, 128))
    first, *others = (run(get_kernel("triton"), q, k, v, make_gradient(q), index, 0.1, overwrite=True) for _ in range(6))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def test_a_long_sequence_is_right_where_offsets_exceed_32_bits_and_memory_stays_flat() -> None:
    """600K tokens and 32 heads of 128: 2.5e9 elements a tensor. Rows at the end are compared with dense rows in float64."""
    tokens, heads, size = 614400, 32, 128
    segments = make_segments([tokens], tokens // BLOCK, 16384)
    pattern = vertical_slash_pattern(segments, heads, density=0.003, column_density=0.001)
    index = on_device(pattern, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    q, do = (torch.randn(heads, tokens, size, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, tokens, size, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kernel, scale = get_kernel("triton"), size**-0.5
    memory = []
    for _ in range(20):
        o, _, dq, *_ = run(kernel, q, k, v, do, index, scale, overwrite=True)
        memory.append(torch.cuda.memory_allocated())
    assert len(set(memory[1:])) == 1, "memory grows"
    head, rows = heads - 1, torch.arange(tokens - 32, tokens, device="cuda")
    visible = mask(index, head, rows, torch.arange(tokens, device="cuda"))
    query, key, value = q[head, rows].double().requires_grad_(), k[0].double(), v[0].double()
    scores = (query @ key.T * scale).masked_fill(~visible, float("-inf"))
    expected = scores.softmax(-1) @ value
    expected.backward(do[head, rows].double())
    torch.testing.assert_close(o[head, rows].double(), expected, rtol=2e-2, atol=2e-3)
    assert query.grad is not None
    torch.testing.assert_close(dq[head, rows].double(), query.grad, rtol=2e-2, atol=2e-3)
