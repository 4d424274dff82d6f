"""The kernel contract: every backend against float64 dense attention on shapes that hurt, gradients always."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.batch import Sequence, shard_batch
from ds_sparse_ring.index import FullIndex, Index, VerticalSlash
from ds_sparse_ring.kernels import ColumnKV, Kernel, get_kernel, torch_reference
from ds_sparse_ring.kernels.contract import accumulator_dtype, merge
from ds_sparse_ring.layout import BlockMap

from .reference import dense_mask, global_qkv, masked_attention, packed_batch, random_index

BACKENDS = ["torch"]
SHAPES = [
    # document lengths, query heads, KV heads, heads per pattern, head size
    pytest.param([1], 1, 1, 1, 16, id="one-token"),
    pytest.param([63], 2, 1, 1, 32, id="less-than-a-block"),
    pytest.param([65], 2, 2, 1, 32, id="a-block-and-a-token"),
    pytest.param([333], 8, 1, 1, 64, id="gqa-8-to-1"),
    pytest.param([333], 8, 1, 4, 64, id="gqa-8-to-1-shared-patterns"),
    pytest.param([700], 4, 2, 2, 32, id="pattern-per-kv-head"),
    pytest.param([130, 1, 257, 64], 4, 4, 1, 32, id="documents"),
    pytest.param([300], 3, 1, 1, 40, id="odd-heads-and-head-size"),
]


def _sequence(lengths: list[int]) -> Sequence:
    batch = packed_batch(lengths)
    return shard_batch(batch, kind="striped", ranks=1, rank=0, segment_tokens=128)["sparse_ring"]


def _columns(k: torch.Tensor, v: torch.Tensor, index: Index, heads: int) -> ColumnKV | None:
    if not isinstance(index, VerticalSlash):
        return None
    kv_head = index.column_patterns() * index.heads_per_pattern // (heads // k.shape[0])
    return ColumnKV(k[kv_head, index.column_values], v[kv_head, index.column_values])


def _run(kernel: Kernel, q, k, v, do, index: Index, scale: float):
    """Forward and backward in one call over the whole sequence; column gradients added to their keys."""
    acc, identity = accumulator_dtype(q.dtype), BlockMap(1, 0)
    columns = _columns(k, v, index, q.shape[0])
    o, lse = torch.zeros(q.shape, dtype=acc), torch.full(q.shape[:2], float("-inf"), dtype=acc)
    kernel.forward(q, k, v, identity, identity, index, scale, o, lse, columns)
    delta = (do.to(acc) * o).sum(-1)
    dq, dk, dv = (torch.zeros(x.shape, dtype=acc) for x in (q, k, v))
    d_columns = ColumnKV(torch.zeros(columns.k.shape, dtype=acc), torch.zeros(columns.v.shape, dtype=acc)) if columns else None
    kernel.backward(q, k, v, do, lse, delta, identity, identity, index, scale, dq, dk, dv, columns, d_columns)
    if isinstance(index, VerticalSlash) and d_columns is not None:
        kv_head = index.column_patterns() * index.heads_per_pattern // (q.shape[0] // k.shape[0])
        dk.index_put_((kv_head, index.column_values), d_columns.k, accumulate=True)
        dv.index_put_((kv_head, index.column_values), d_columns.v, accumulate=True)
    return o, lse, dq, dk, dv


def _reference(q, k, v, do, visible, scale: float, dtype: torch.dtype):
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    o = masked_attention(q, k, v, visible, scale)
    o.backward(do.to(dtype))
    return o.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("full", [False, True], ids=["sparse", "full"])
@pytest.mark.parametrize(("lengths", "heads", "kv_heads", "shared", "head_size"), SHAPES)
def test_float64_results_equal_dense_masked_attention(
    backend: str, full: bool, lengths: list[int], heads: int, kv_heads: int, shared: int, head_size: int
) -> None:
    sequence = _sequence(lengths)
    patterns = heads // shared
    index: Index = (
        FullIndex(sequence.segments, patterns, shared)
        if full
        else random_index(sequence, patterns, shared, columns=7, diagonals=3)
    )
    q, k, v = global_qkv(sequence, heads, kv_heads, head_size)
    do, scale = torch.randn_like(q), head_size**-0.5
    visible = dense_mask(index, heads, q.shape[1])
    o, lse, *grads = _run(get_kernel(backend), q, k, v, do, index, scale)
    expected_o, *expected = _reference(q, k, v, do, visible, scale, torch.float64)
    scores = ((q @ k.repeat_interleave(heads // kv_heads, 0).mT) * scale).masked_fill(~visible, float("-inf"))
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(o, expected_o, rtol=1e-11, atol=1e-12)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [32, 64, 96, 128, 256])
def test_error_is_at_most_twice_that_of_pytorch_in_the_same_dtype(backend: str, dtype: torch.dtype, head_size: int) -> None:
    sequence = _sequence([700])
    index = random_index(sequence, 4, 1, columns=40, diagonals=6)
    q, k, v = (x.to(dtype) for x in global_qkv(sequence, 4, 2, head_size))
    do, scale = torch.randn_like(q), head_size**-0.5
    visible = dense_mask(index, 4, q.shape[1])
    exact = _reference(q, k, v, do, visible, scale, torch.float64)
    in_dtype = _reference(q, k, v, do, visible, scale, dtype)
    o, _, *grads = _run(get_kernel(backend), q, k, v, do, index, scale)
    for got, same, true in zip([o, *grads], in_dtype, exact, strict=True):
        error, bound = (got.double() - true).abs().max(), 2 * (same.double() - true).abs().max()
        assert error <= max(bound, 1e-6), (float(error), float(bound))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("size", [90.0, 3e4])
def test_huge_logits_stay_finite_and_right(backend: str, size: float) -> None:
    sequence = _sequence([500])
    index = random_index(sequence, 2, 1, columns=9, diagonals=4)
    q, k, v = global_qkv(sequence, 2, 1, 16)
    q, do = q * size, torch.randn_like(q)
    visible = dense_mask(index, 2, q.shape[1])
    results = _run(get_kernel(backend), q.float(), k.float(), v.float(), do.float(), index, 0.25)
    assert all(torch.isfinite(x).all() for x in results)
    exact = _reference(q.float(), k.float(), v.float(), do.float(), visible, 0.25, torch.float64)
    same = _reference(q.float(), k.float(), v.float(), do.float(), visible, 0.25, torch.float32)
    # a float32 log-sum-exp of that size is rounded to this, and probabilities inherit it
    rounding = torch.finfo(torch.float32).eps * float((q.abs().amax() * k.abs().amax()) * 0.25 * 16)
    for got, single, true in zip([results[0], *results[2:]], same, exact, strict=True):
        assert (got - true).abs().max() <= 2 * (single - true).abs().max() + rounding * true.abs().max()


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_without_a_key_give_zero_minus_infinity_and_no_gradient(backend: str) -> None:
    """The keys of a later part of the sequence hold nothing for earlier queries (every ring hop has such rows)."""
    sequence = _sequence([512])
    index = FullIndex(sequence.segments, 2)
    q, k, v = (x[:, :256] for x in global_qkv(sequence, 2, 1, 16))
    o, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=q.dtype)
    queries, keys = BlockMap(1, 0), BlockMap(1, 2)  # queries are blocks 0..3, keys blocks 2..5
    kernel = get_kernel(backend)
    kernel.forward(q, k, v, queries, keys, index, 0.25, o, lse)
    assert (o[:, :128] == 0).all() and torch.isneginf(lse[:, :128]).all()
    assert torch.isfinite(lse[:, 128:]).all()
    do = torch.ones_like(q)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    kernel.backward(q, k, v, do, lse, (do * o).sum(-1), queries, keys, index, 0.25, dq, dk, dv)
    assert (dq[:, :128] == 0).all() and all(torch.isfinite(x).all() for x in (dq, dk, dv))
    assert (dk[:, 128:] == 0).all(), "key blocks 4 and 5 are in the future of every query"


@pytest.mark.parametrize("backend", BACKENDS)
def test_pieces_in_any_order_merge_to_the_whole(backend: str) -> None:
    """Key ranges with signed offsets, as host chunks have them, and strided maps, as a ring has."""
    sequence = _sequence([640])
    index = random_index(sequence, 2, 1, columns=11, diagonals=4)
    q, k, v = global_qkv(sequence, 2, 2, 32)
    kernel, scale = get_kernel(backend), 32**-0.5
    whole, whole_lse, *_ = _run(kernel, q, k, v, torch.zeros_like(q), index, scale)
    columns = _columns(k, v, index, 2)
    o, lse = torch.zeros_like(q), torch.full(q.shape[:2], float("-inf"), dtype=q.dtype)
    k_blocks, v_blocks = k.unflatten(1, (-1, 64)), v.unflatten(1, (-1, 64))
    q_blocks, o_blocks, lse_blocks = q.unflatten(1, (-1, 64)), o.unflatten(1, (-1, 64)), lse.unflatten(1, (-1, 64))
    for part in (1, 0):  # query blocks 5..9, then 0..4
        rows = slice(5 * part, 5 * part + 5)
        for residue in (2, 0, 1):  # key blocks = residue mod 3
            keys, values = (x[:, residue::3].flatten(1, 2) for x in (k_blocks, v_blocks))
            piece_o, piece_lse = o_blocks[:, rows].flatten(1, 2), lse_blocks[:, rows].flatten(1)
            kernel.forward(
                q_blocks[:, rows].flatten(1, 2), keys, values, BlockMap(1, 5 * part), BlockMap(3, residue), index, scale,
                piece_o, piece_lse, columns if residue == 0 else None,
            )  # fmt: skip
            o_blocks[:, rows], lse_blocks[:, rows] = piece_o.unflatten(1, (-1, 64)), piece_lse.unflatten(1, (-1, 64))
    torch.testing.assert_close(o, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_inputs_are_read_where_they_are(backend: str) -> None:
    sequence = _sequence([256])
    index = random_index(sequence, 2, 1, columns=5, diagonals=2)
    q, k, v = global_qkv(sequence, 2, 1, 16)
    wide = torch.randn(256, 7, 3, 16, dtype=torch.float64)

    def strided(x: torch.Tensor) -> torch.Tensor:
        view = wide.clone().permute(1, 0, 2, 3)[: x.shape[0], :, 1]
        view.copy_(x)
        return view

    do = torch.randn_like(q)
    plain = _run(get_kernel(backend), q, k, v, do, index, 0.25)
    from_strided = _run(get_kernel(backend), strided(q), strided(k), strided(v), strided(do), index, 0.25)
    for a, b in zip(plain, from_strided, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-13)


def test_the_reference_does_not_depend_on_its_tile_size(monkeypatch: pytest.MonkeyPatch) -> None:
    sequence = _sequence([640])
    index = random_index(sequence, 2, 1, columns=150, diagonals=8)
    q, k, v = global_qkv(sequence, 2, 1, 16)
    do = torch.randn_like(q)
    whole = _run(get_kernel("torch"), q, k, v, do, index, 0.25)
    monkeypatch.setattr(torch_reference, "TILE_ELEMENTS", 1)
    for a, b in zip(whole, _run(get_kernel("torch"), q, k, v, do, index, 0.25), strict=True):
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
