"""The kernel contract: every backend against float64 dense attention on shapes that hurt, gradients always."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import FullIndex
from ds_sparse_ring.kernels import Work, get_kernel, torch_reference
from ds_sparse_ring.kernels.contract import merge
from ds_sparse_ring.kernels.cpu import CPUKernel
from ds_sparse_ring.layout import BlockMap
from tests.kernel_checks import (
    SHAPES,
    check_errors,
    check_hops,
    column_kv,
    dense_reference,
    make_gradient,
    make_index,
    make_sequence,
    run,
)

from .reference import dense_mask, global_qkv, random_index

# in Triton's interpreter, which gives garbage for bfloat16; on a GPU see tests/gpu
BACKENDS = ["torch", "cpu"] + ([] if torch.cuda.is_available() else ["triton"])
INSTRUCTION_SETS = ["avx512", "avx2", "baseline"]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
def test_float64_results_equal_dense_masked_attention(
    backend: str, kind: str, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int
) -> None:
    sequence = make_sequence(lengths)
    index = make_index(kind, sequence, heads // shared, shared)
    q, k, v = global_qkv(sequence, heads, kv_heads, head_size)
    do, scale = make_gradient(q), head_size**-0.5
    visible = dense_mask(index, heads, q.shape[1])
    o, lse, *grads = run(get_kernel(backend), q, k, v, do, index, scale)
    expected_o, *expected = dense_reference(q, k, v, do, visible, scale, torch.float64)
    scores = ((q @ k.repeat_interleave(heads // kv_heads, 0).mT) * scale).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, expected_o, rtol=1e-11, atol=1e-12)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [32, 40, 64, 96, 128, 256])
@pytest.mark.slow(backend=["triton"], dtype=[torch.float32])
def test_error_is_at_most_twice_that_of_pytorch_in_the_same_dtype(backend: str, dtype: torch.dtype, head_size: int) -> None:
    if backend == "triton" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter multiplies bfloat16 wrongly")
    if backend == "triton" and head_size not in ((40,) if dtype == torch.float32 else (96,)):
        pytest.skip("the interpreter is slow, and kernels compile for all sizes on a GPU")
    check_errors(get_kernel(backend), "vertical-slash", [700], 4, 2, 1, dtype, head_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_overwriting_calls_read_nothing_of_their_outputs_and_write_the_input_dtype(backend: str, dtype: torch.dtype) -> None:
    check_errors(get_kernel(backend), "vertical-slash", [130, 1, 257, 64], 4, 2, 2, dtype, 32, overwrite=True)


@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
@pytest.mark.slow(heads=[8], kind=["block-lists", "full"])
@pytest.mark.slow(heads=[8], shared=[1])
def test_triton_kernels_err_no_more_than_pytorch_on_shapes_that_hurt(
    kind: str, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int
) -> None:
    if "triton" not in BACKENDS:
        pytest.skip("runs compiled: see tests/gpu")
    check_errors(get_kernel("triton"), kind, lengths, heads, kv_heads, shared, torch.float32, head_size)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
def test_cpu_kernels_of_every_instruction_set_and_index_err_no_more_than_pytorch(
    instruction_set: str, kind: str, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int
) -> None:
    if INSTRUCTION_SETS.index(instruction_set) < INSTRUCTION_SETS.index(torch.ops.ds_sparse_ring_cpu.best_isa()):
        pytest.skip(f"this processor has no {instruction_set}")
    kernel = CPUKernel(instruction_set=instruction_set)
    check_errors(kernel, kind, lengths, heads, kv_heads, shared, torch.float32, head_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [90.0, 3e4])
def test_huge_logits_stay_finite_and_right(backend: str, size: float) -> None:
    sequence = make_sequence([500])
    index = random_index(sequence, 2, 1, columns=9, diagonals=4)
    q, k, v = global_qkv(sequence, 2, 1, 16)
    q, do = q * size, make_gradient(q)
    visible = dense_mask(index, 2, q.shape[1])
    results = run(get_kernel(backend), q.float(), k.float(), v.float(), do.float(), index, 0.25)
    assert all(torch.isfinite(x).all() for x in results)
    exact = dense_reference(q.float(), k.float(), v.float(), do.float(), visible, 0.25, torch.float64)
    same = dense_reference(q.float(), k.float(), v.float(), do.float(), visible, 0.25, torch.float32)
    # a float32 log-sum-exp of that size is rounded to this, and probabilities inherit it
    rounding = torch.finfo(torch.float32).eps * float((q.abs().amax() * k.abs().amax()) * 0.25 * 16)
    for got, single, true in zip([results[0], *results[2:]], same, exact, strict=True):
        assert (got - true).abs().max() <= 2 * (single - true).abs().max() + rounding * true.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_a_key_give_zero_minus_infinity_and_no_gradient(backend: str, dtype: torch.dtype) -> None:
    """The keys of a later part of the sequence hold nothing for earlier queries (every ring hop has such rows)."""
    sequence = make_sequence([512])
    index = FullIndex(sequence.segments, 2)
    q, k, v = (x[:, :256] for x in global_qkv(sequence, 2, 1, 16, dtype=dtype))
    o, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=q.dtype)
    work = Work(BlockMap(1, 0), BlockMap(1, 2), index, 0.25)  # queries are blocks 0..3, keys blocks 2..5
    kernel = get_kernel(backend)
    kernel.forward(q, k, v, work, o, lse)
    assert (o[:, :128] == 0).all() and torch.isneginf(lse[:, :128]).all()
    assert torch.isfinite(lse[:, 128:]).all()
    do = torch.ones_like(q)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    kernel.backward(q, k, v, do, lse, (do * o).sum(-1), work, dq, dk, dv)
    assert (dq[:, :128] == 0).all() and all(torch.isfinite(x).all() for x in (dq, dk, dv))
    assert (dk[:, 128:] == 0).all(), "key blocks 4 and 5 are in the future of every query"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-12)])
def test_pieces_in_any_order_merge_to_the_whole(backend: str, dtype: torch.dtype, tolerance: float) -> None:
    """Key ranges with signed offsets, as host chunks have them, and strided maps, as a ring has."""
    if backend == "triton":
        pytest.skip("needs maps of one stride: see the next test")
    sequence = make_sequence([640])
    index = random_index(sequence, 2, 1, columns=11, diagonals=4)
    q, k, v = global_qkv(sequence, 2, 2, 32, dtype=dtype)
    kernel, scale = get_kernel(backend), 32**-0.5
    whole, whole_lse, *_ = run(kernel, q, k, v, torch.zeros_like(q), index, scale)
    columns = column_kv(k, v, index, 2)
    o, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=q.dtype)
    k_blocks, v_blocks = k.unflatten(1, (-1, 64)), v.unflatten(1, (-1, 64))
    q_blocks, o_blocks, lse_blocks = q.unflatten(1, (-1, 64)), o.unflatten(1, (-1, 64)), lse.unflatten(1, (-1, 64))
    for part in (1, 0):  # query blocks 5..9, then 0..4
        rows = slice(5 * part, 5 * part + 5)
        for residue in (2, 0, 1):  # key blocks = residue mod 3
            keys, values = (x[:, residue::3].flatten(1, 2) for x in (k_blocks, v_blocks))
            piece_o, piece_lse = o_blocks[:, rows].flatten(1, 2), lse_blocks[:, rows].flatten(1)
            kernel.forward(
                q_blocks[:, rows].flatten(1, 2), keys, values, Work(BlockMap(1, 5 * part), BlockMap(3, residue), index, scale),
                piece_o, piece_lse, columns if residue == 0 else None,
            )  # fmt: skip
            o_blocks[:, rows], lse_blocks[:, rows] = piece_o.unflatten(1, (-1, 64)), piece_lse.unflatten(1, (-1, 64))
    torch.testing.assert_close(o, whole, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(lse, whole_lse, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["vertical-slash", "block-lists", "full"])
@pytest.mark.slow(backend=["triton"], kind=["block-lists", "full"])
def test_hops_of_a_ring_and_chunks_of_their_keys_add_up_to_the_whole(backend: str, kind: str) -> None:
    check_hops(get_kernel(backend), kind, torch.float32, tolerance=4e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strided_inputs_are_read_where_they_are(backend: str, dtype: torch.dtype) -> None:
    sequence = make_sequence([256])
    index = random_index(sequence, 2, 1, columns=5, diagonals=2)
    q, k, v = global_qkv(sequence, 2, 1, 16, dtype=dtype)
    wide = torch.randn(256, 7, 3, 16, dtype=dtype)

    def strided(x: torch.Tensor) -> torch.Tensor:
        view = wide.clone().permute(1, 0, 2, 3)[: x.shape[0], :, 1]
        view.copy_(x)
        return view

    do = make_gradient(q)
    plain = run(get_kernel(backend), q, k, v, do, index, 0.25)
    from_strided = run(get_kernel(backend), strided(q), strided(k), strided(v), strided(do), index, 0.25)
    for a, b in zip(plain, from_strided, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", ["torch", "cpu"])  # Triton's interpreter would copy what lies between
def test_heads_that_are_more_than_32_bits_apart_are_read_where_they_are(backend: str) -> None:
    sequence = make_sequence([200])
    index = random_index(sequence, 2, 1, columns=9, diagonals=2)
    q, k, v = global_qkv(sequence, 2, 2, 16, dtype=torch.bfloat16)
    do = make_gradient(q)
    far = torch.empty(2**31 + 2**16, dtype=torch.bfloat16)  # 4 GiB of addresses; what is not written takes no memory

    def apart(x: torch.Tensor, place: int) -> torch.Tensor:
        return far.as_strided(x.shape, (2**31, 16, 1), place * x[0].numel()).copy_(x)

    plain = run(get_kernel(backend), q, k, v, do, index, 0.25)
    from_far = run(get_kernel(backend), apart(q, 0), apart(k, 1), apart(v, 2), do, index, 0.25)
    for a, b in zip(plain, from_far, strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is off where there is a GPU")
@pytest.mark.parametrize("head_size", [12, 264])
def test_head_sizes_that_triton_cannot_multiply_are_refused(head_size: int) -> None:
    sequence = make_sequence([64])
    q, k, v = global_qkv(sequence, 1, 1, head_size, dtype=torch.float16)
    with pytest.raises(SparseRingError, match=rf"multiples of 8, .* got {head_size} .* Set \"backend\": \"torch\""):
        run(get_kernel("triton"), q, k, v, q, FullIndex(sequence.segments, 1), 1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_key_that_is_not_a_number_reaches_the_rows_that_read_it_and_no_others(backend: str) -> None:
    sequence = make_sequence([500])
    index = random_index(sequence, 2, 1, columns=9, diagonals=1)
    q, k, v = global_qkv(sequence, 2, 1, 16, dtype=torch.float32)
    token = int(index.columns(1, 0)[0])
    k[0, token] = float("nan")
    o, _, dq, *_ = run(get_kernel(backend), q, k, v, make_gradient(q), index, 0.25)
    reads = dense_mask(index, 2, q.shape[1])[:, :, token]
    assert reads.any() and not reads.all()
    assert torch.equal(o.isnan().any(-1), reads)
    assert dq.isnan().any(-1)[reads].all()


def test_the_reference_does_not_depend_on_its_tile_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = make_sequence([640])
    index = random_index(sequence, 2, 1, columns=150, diagonals=8)
    q, k, v = global_qkv(sequence, 2, 1, 16)
    do = make_gradient(q)
    whole = run(get_kernel("torch"), q, k, v, do, index, 0.25)
    monkeypatch.setattr(torch_reference, "TILE_ELEMENTS", 1)
    for a, b in zip(whole, run(get_kernel("torch"), q, k, v, do, index, 0.25), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_merging_two_empty_rows_gives_an_empty_row_and_gaps_do_not_overflow() -> None:
    infinity = float("inf")
    o_acc = torch.tensor([[0.0], [0.0], [1.0], [1.0], [3.0]])
    lse_acc = torch.tensor([-infinity, -infinity, 500.0, -400.0, 2.0])
    o = torch.tensor([[0.0], [7.0], [9.0], [5.0], [5.0]])
    lse = torch.tensor([-infinity, 3.0, -500.0, 600.0, 2.0])
    merge(o_acc, lse_acc, o, lse)
    assert o_acc.flatten().tolist() == [0.0, 7.0, 1.0, 5.0, 4.0]
    assert lse_acc.tolist() == pytest.approx([-infinity, 3.0, 500.0, 600.0, 2.0 + torch.tensor(2.0).log().item()])


def test_merging_a_row_that_flash_attention_calls_plus_infinity_changes_nothing() -> None:
    """What FlashAttention 2 writes for a row without a key, on either side and on both."""
    infinity = float("inf")
    o_acc, o = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [7.0], [0.0]])
    lse_acc, lse = torch.tensor([2.0, infinity, infinity]), torch.tensor([infinity, 3.0, infinity])
    merge(o_acc, lse_acc, o, lse)
    assert o_acc.flatten().tolist() == [1.0, 7.0, 0.0]
    assert lse_acc.tolist() == [2.0, 3.0, -infinity]
    assert lse.tolist() == [infinity, 3.0, infinity], "what is merged is left as it is"


@pytest.mark.parametrize("threads", [1, 4])
def test_the_cpu_kernels_give_the_same_bits_on_every_run(threads: int) -> None:
    sequence = make_sequence([1000])
    index = random_index(sequence, 4, 1, columns=90, diagonals=5)
    q, k, v = global_qkv(sequence, 4, 2, 64, dtype=torch.float32)
    with _threads(threads):
        first, *others = (run(get_kernel("cpu"), q, k, v, make_gradient(q), index, 0.125) for _ in range(5))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_the_cpu_kernels_are_right_on_any_number_of_threads(threads: int) -> None:
    sequence = make_sequence([500])
    index = random_index(sequence, 6, 1, columns=90, diagonals=5)
    q, k, v = global_qkv(sequence, 6, 3, 32, dtype=torch.float32)
    expected = run(get_kernel("torch"), q, k, v, make_gradient(q), index, 0.125)
    with _threads(threads):
        got = run(get_kernel("cpu"), q, k, v, make_gradient(q), index, 0.125)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("instruction_set", "patterns", "q_start", "message"),
    [("", 3, 0, "another number of heads"), ("", 2, 5, "outside of the segments"), ("neon", 2, 0, "instruction set")],
)
def test_the_cpu_kernels_refuse_what_they_would_read_wrongly(
    instruction_set: str, patterns: int, q_start: int, message: str
) -> None:
    index = FullIndex(make_sequence([128]).segments, patterns)
    q, kv, lse = torch.zeros(2, 128, 16), torch.zeros(1, 128, 16), torch.zeros(2, 128)
    kernel = CPUKernel(instruction_set=instruction_set)
    with pytest.raises(RuntimeError, match=message):
        kernel.forward(q, kv, kv, Work(BlockMap(1, q_start), BlockMap(1, 0), index, 1.0), torch.zeros_like(q), lse)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_added_where_they_belong_and_those_without_a_place_nowhere(backend: str) -> None:
    out = torch.arange(2 * 4 * 16.0).view(2, 4, 16)
    place = torch.tensor([2, -1, 0, 2, -1, 2])
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0))
    x[:, 1] = float("nan")
    expected = out.clone()
    for i, row in enumerate(place.tolist()):
        if row >= 0:
            expected[:, row] += x[:, i]
    get_kernel(backend).add_rows(out, place, x)
    torch.testing.assert_close(out, expected)


def test_a_scale_that_is_not_positive_is_refused() -> None:
    index = FullIndex(make_sequence([64]).segments, 1)
    with pytest.raises(SparseRingError, match="scale must be positive, got -1"):
        Work(BlockMap(1, 0), BlockMap(1, 0), index, -1.0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_triton_without_a_gpu_is_refused_with_the_way_out() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = "from ds_sparse_ring.kernels import get_kernel; print(get_kernel('auto').name); get_kernel('triton')"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip().endswith("cpu") and '"triton" needs a GPU' in done.stderr
