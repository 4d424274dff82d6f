"""The GPU kernels, compiled: every dtype, head size, index and feature, gradients included, against float64."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.bench.patterns import vertical_slash_pattern
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import mask
from ds_sparse_ring.kernels import GPU_BACKENDS, Kernel, Work, get_kernel
from ds_sparse_ring.layout import BLOCK, BlockMap
from ds_sparse_ring.op_builder import CUDAAttentionBuilder
from tests.kernel_checks import (
    SHAPES,
    check_errors,
    check_hops,
    column_kv,
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
CUDA_CASES = [(dtype, size) for dtype in HALF for size in (64, 128)]
"""What the CUDA kernels do themselves."""


def kernel_named(backend: str) -> Kernel:
    """The backend, or a skip with the reason why it cannot be had here."""
    builder = CUDAAttentionBuilder()
    if backend == "cuda" and not builder.is_available():
        pytest.skip(str(builder.error_log))
    return get_kernel(backend)


@pytest.mark.parametrize(
    ("backend", "dtype", "head_size", "kind"),
    [("triton", dtype, size, "vertical-slash") for dtype in HALF for size in (32, 40, 64, 96, 128, 256)]
    + [("triton", dtype, size, kind) for dtype in HALF for size in (128, 256) for kind in KINDS[1:]]
    + [("triton", torch.float32, 64, kind) for kind in KINDS]
    + [("cuda", dtype, size, kind) for dtype, size in CUDA_CASES for kind in KINDS]
    + [("cuda", torch.bfloat16, 96, "vertical-slash")],  # Triton's, in its place
)
def test_error_is_at_most_twice_that_of_pytorch_in_the_same_dtype(
    backend: str, dtype: torch.dtype, head_size: int, kind: str
) -> None:
    check_errors(kernel_named(backend), kind, [700, 900], 4, 2, 1, dtype, head_size, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
def test_shapes_that_hurt(kind: str, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int) -> None:
    check_errors(get_kernel("triton"), kind, lengths, heads, kv_heads, shared, torch.bfloat16, head_size, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "head_size"), CUDA_CASES)
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "_"), SHAPES)
def test_shapes_that_hurt_in_cuda(
    kind: str, dtype: torch.dtype, head_size: int, lengths: list[int], heads: int, kv_heads: int, shared: int, _: int
) -> None:
    check_errors(kernel_named("cuda"), kind, lengths, heads, kv_heads, shared, dtype, head_size, device="cuda")


@pytest.mark.parametrize("segment_tokens", [128, 16384])
@pytest.mark.parametrize(("kind", "shared"), [("block-lists", 1), ("block-lists", 4), ("long-lists", 1)])
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_lists_longer_than_a_warp_is_wide(backend: str, kind: str, shared: int, segment_tokens: int) -> None:
    check_errors(
        kernel_named(backend), kind, [6000, 2100], 4, 1, shared, torch.bfloat16, 128, device="cuda", segment_tokens=segment_tokens
    )


@pytest.mark.parametrize("shared", [1, 2, 8])
@pytest.mark.parametrize(
    ("backend", "dtype", "head_size"),
    [("triton", torch.bfloat16, size) for size in (64, 96, 128, 256)] + [("cuda", *case) for case in CUDA_CASES],
)
def test_overwriting_calls_read_nothing_of_their_outputs_and_write_the_input_dtype(
    backend: str, dtype: torch.dtype, head_size: int, shared: int
) -> None:
    kernel = kernel_named(backend)
    for kind in ("vertical-slash", "block-lists"):
        check_errors(kernel, kind, [1, 900, 64], 8, 1, shared, dtype, head_size, device="cuda", overwrite=True)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("backend", "dtype", "head_size", "tolerance"),
    [("triton", torch.float32, 32, 1e-5), ("triton", torch.bfloat16, 32, 3e-2)]
    + [("cuda", dtype, size, 3e-2) for dtype, size in CUDA_CASES],
)
def test_hops_of_a_ring_and_chunks_of_their_keys_add_up_to_the_whole(
    backend: str, kind: str, dtype: torch.dtype, head_size: int, tolerance: float
) -> None:
    check_hops(kernel_named(backend), kind, dtype, tolerance=tolerance, device="cuda", head_size=head_size)


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_results_repeat_bit_for_bit(backend: str, kind: str) -> None:
    sequence = make_sequence([3000, 5000])
    index = on_device(make_index(kind, sequence, 8, 1), torch.device("cuda"))
    q, k, v = (x.to("cuda", torch.bfloat16) for x in global_qkv(sequence, 8, 1, 128))
    first, *others = (run(kernel_named(backend), q, k, v, make_gradient(q), index, 0.1, overwrite=True) for _ in range(6))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize(("dtype", "head_size"), CUDA_CASES)
def test_the_cuda_kernel_takes_what_models_and_ring_buffers_give_it(dtype: torch.dtype, head_size: int) -> None:
    """Heads beside each other in a row, slices, and rows that the copy engine cannot read: the same bits as contiguous ones."""
    sequence, kernel = make_sequence([500, 900]), kernel_named("cuda")
    index = on_device(make_index("vertical-slash", sequence, 4, 1), torch.device("cuda"))
    q, k, v = (x.to("cuda", dtype) for x in global_qkv(sequence, 4, 2, head_size))
    work = Work(BlockMap(1, 0), BlockMap(1, 0), index, 0.1)

    def forward(given: list[torch.Tensor]) -> list[torch.Tensor]:
        o, lse = torch.empty_like(q), torch.empty(q.shape[:2], device="cuda")
        kernel.forward(given[0], given[1], given[2], work, o, lse, column_kv(k, v, index, 4), overwrite=True)
        return [o, lse]

    expected = forward([q, k, v])
    beside = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    sliced = [torch.cat([x, x], 1)[:, x.shape[1] :] for x in (q, k, v)]
    odd = [torch.empty(*x.shape[:2], head_size + 1, device="cuda", dtype=dtype)[..., 1:].copy_(x) for x in (q, k, v)]
    for given in (beside, sliced, odd):
        assert all(torch.equal(a, b) for a, b in zip(forward(given), expected, strict=True))


def test_the_cuda_kernel_leaves_multiprocessors_to_others_with_the_same_result() -> None:
    kernel_named("cuda")
    from ds_sparse_ring.kernels.cuda_attention import CudaKernel

    for spare in (8, 1000):
        check_errors(
            CudaKernel(spare_multiprocessors=spare), "vertical-slash", [900], 4, 2, 1, torch.bfloat16, 128, device="cuda"
        )


@pytest.mark.parametrize("backend", GPU_BACKENDS)
def test_a_long_sequence_is_right_where_offsets_exceed_32_bits_and_memory_stays_flat(backend: str) -> None:
    """600K tokens and 32 heads of 128: 2.5e9 elements a tensor. Rows at the end are compared with dense rows in float64."""
    tokens, heads, size = 614400, 32, 128
    segments = make_segments([tokens], tokens // BLOCK, 16384)
    pattern = vertical_slash_pattern(segments, heads, density=0.003, column_density=0.001)
    index = on_device(pattern, torch.device("cuda"))
    generator = torch.Generator("cuda").manual_seed(0)
    q, do = (torch.randn(heads, tokens, size, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (torch.randn(1, tokens, size, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    kernel, scale = kernel_named(backend), size**-0.5
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
