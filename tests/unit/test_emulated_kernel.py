"""The CUDA kernels, emulated on a CPU, behind its backend: see tests/emulated_op.py. On a GPU: tests/gpu."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.config import EveryQuerySelector
from ds_sparse_ring.index import Index
from ds_sparse_ring.kernels import ColumnKV, Kernel, Work, contract
from ds_sparse_ring.kernels.contract import empty_result
from ds_sparse_ring.kernels.torch_reference import TorchKernel
from ds_sparse_ring.layout import BLOCK, BlockMap
from ds_sparse_ring.select.every_query import fastest_method, select_by_every_query
from tests.kernel_checks import column_kv, make_gradient, make_index, make_sequence
from tests.unit.reference import bound, global_qkv

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("Triton's tables are not interpreted here: see tests/gpu", allow_module_level=True)

from tests.emulated_op import EmulatedKernel, EmulatedOp, build  # noqa: E402
from tests.every_query_checks import CASES, Case, check_wanted  # noqa: E402

ERROR = {torch.bfloat16: 5e-3, torch.float16: 6e-4}
"""Largest error of o relative to its size, root mean square."""


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> EmulatedKernel:
    return EmulatedKernel(EmulatedOp(build(tmp_path_factory.mktemp("emulation"))))


def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: Index, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """o and lse of the whole sequence in float64."""
    columns = column_kv(k.double(), v.double(), index, q.shape[0])
    o, lse = empty_result(q.double())
    TorchKernel().forward(q.double(), k.double(), v.double(), Work(BlockMap(1, 0), BlockMap(1, 0), index, scale), o, lse, columns)
    return o, lse


def check(o: torch.Tensor, lse: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor], dtype: torch.dtype) -> None:
    error = (o.double() - expected[0]).square().mean() / expected[0].square().mean()
    assert error.sqrt() < ERROR[dtype]
    torch.testing.assert_close(lse.double(), expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "lengths", "heads", "kv_heads", "shared", "dtype", "head_size"),
    [
        pytest.param("vertical-slash", [1], 1, 1, 1, torch.bfloat16, 128, id="one-token"),
        pytest.param("vertical-slash", [130, 1, 257, 64], 4, 4, 1, torch.float16, 64, id="documents"),
        pytest.param("vertical-slash", [700], 4, 2, 1, torch.bfloat16, 128, id="gqa"),
        pytest.param("vertical-slash", [333], 8, 1, 4, torch.float16, 128, id="heads-that-share-a-pattern"),
        pytest.param("vertical-slash", [300], 3, 1, 1, torch.bfloat16, 64, id="odd-heads"),
        pytest.param("block-lists", [1], 1, 1, 1, torch.float16, 64, id="lists-one-token"),
        pytest.param("block-lists", [130, 1, 257, 64], 4, 2, 1, torch.bfloat16, 128, id="lists-documents"),
        pytest.param("block-lists", [333], 8, 1, 4, torch.bfloat16, 64, id="lists-heads-that-share-a-pattern"),
        # the last tile's last part reads one stage, and the ring comes round to it
        pytest.param("full", [14 * BLOCK, 1], 1, 1, 1, torch.bfloat16, 128, id="full-a-part-that-waits"),
        # parts behind the last query block, blocks of two segments and heads of two blocks in one tile
        pytest.param("vertical-slash", [64, 190], 3, 1, 1, torch.float16, 128, id="a-tile-with-one-block"),
        pytest.param("vertical-slash", [317], 4, 1, 2, torch.bfloat16, 128, id="two-heads-that-share-a-pattern"),
        pytest.param("block-lists", [449], 2, 1, 2, torch.float16, 128, id="lists-two-heads-that-share-a-pattern"),
        pytest.param("vertical-slash", [2200], 2, 1, 1, torch.bfloat16, 128, id="more-offsets-than-a-word-has-bits"),
    ],
)
def test_forward_overwrites_and_merges(
    kernel: EmulatedKernel,
    kind: str,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    shared: int,
    dtype: torch.dtype,
    head_size: int,
) -> None:
    sequence, scale = make_sequence(lengths), head_size**-0.5
    index = make_index(kind, sequence, heads // shared, shared)
    q, k, v = (x.to(dtype) for x in global_qkv(sequence, heads, kv_heads, head_size))
    q = q.transpose(0, 1).contiguous().transpose(0, 1)  # heads beside each other, as models have them
    expected, columns = exact(q, k, v, index, scale), column_kv(k, v, index, heads)
    work, calls = Work(BlockMap(1, 0), BlockMap(1, 0), index, scale), kernel._op.calls
    o, lse = (torch.full(shape, float("nan"), dtype=x) for shape, x in ((q.shape, dtype), (q.shape[:2], torch.float32)))
    kernel.forward(q, k, v, work, o, lse, columns, overwrite=True)
    check(o, lse, expected, dtype)
    o, lse = empty_result(q)
    kernel.forward(q, k, v, work, o, lse, columns)
    check(o, lse, expected, dtype)
    assert kernel._op.calls == calls + 2, "Triton's kernel was called instead"


@pytest.mark.parametrize("overlapped", ["0", "1"])
@pytest.mark.parametrize(("parts", "buffers"), [("2", "0"), ("3", "0"), ("3", "1"), ("3", "2")])
@pytest.mark.parametrize("kind", ["vertical-slash", "full", "block-lists"])
def test_every_form_of_128_dims_is_right(
    kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch, kind: str, parts: str, buffers: str, overlapped: str
) -> None:
    monkeypatch.setenv("DS_SPARSE_RING_FORWARD_PARTS", parts)
    monkeypatch.setenv("DS_SPARSE_RING_QUERY_BUFFERS", buffers)
    monkeypatch.setenv("DS_SPARSE_RING_FORWARD_OVERLAPPED", overlapped)
    # the last part of the last tile reads one stage: the ring comes round to the stage that a part holds
    lengths, heads = [(13 if parts == "2" else 14) * BLOCK, 1], 1 if kind == "full" else 2
    test_forward_overwrites_and_merges(kernel, kind, lengths, heads, 1, heads, torch.bfloat16, 128)


@pytest.mark.parametrize("kind", ["vertical-slash", "full", "block-lists"])
def test_hops_of_a_ring_and_chunks_of_their_keys_add_up_to_the_whole(kernel: EmulatedKernel, kind: str) -> None:
    sequence, ranks, cut, scale = make_sequence([300, 500]), 3, 2, 128**-0.5  # 13 blocks
    index = make_index(kind, sequence, 2, 1)
    q, k, v = (x.to(torch.bfloat16) for x in global_qkv(sequence, 2, 1, 128))
    expected, columns = exact(q, k, v, index, scale), column_kv(k, v, index, 2)
    o, lse = empty_result(q)

    def of(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.unflatten(1, (-1, BLOCK))[:, rank::ranks].flatten(1, 2)

    for rank in range(ranks):
        mine = of(q, rank), of(o, rank), of(lse, rank)
        for source in range(ranks):
            for first, last in ((cut, None), (0, cut)):
                rows = slice(first * BLOCK, None if last is None else last * BLOCK)
                work = Work(BlockMap(ranks, rank), BlockMap(ranks, source + ranks * first), index, scale)
                given: ColumnKV | None = columns if source == rank and first == 0 else None
                kernel.forward(mine[0], of(k, source)[:, rows], of(v, source)[:, rows], work, *mine[1:], given)
        for whole, part in ((o, mine[1]), (lse, mine[2])):
            whole.unflatten(1, (-1, BLOCK))[:, rank::ranks] = part.unflatten(1, (-1, BLOCK))
    check(o, lse, expected, torch.bfloat16)


def gradients(
    kernel: Kernel, inputs: list[torch.Tensor], rows: list[torch.Tensor], work: Work, columns: ColumnKV | None, *, overwrite: bool
) -> list[torch.Tensor]:
    """dq, dk, dv and those of the columns of q, k, v, do, with lse and delta; added to ones, but for dq if it is overwritten."""
    q, k, v, do = inputs
    dk, dv = (torch.ones(x.shape, dtype=rows[0].dtype) for x in (k, v))
    dq = torch.full_like(q, float("nan")) if overwrite else torch.ones(q.shape, dtype=rows[0].dtype)
    d_columns = None if columns is None else ColumnKV(*(torch.ones(x.shape, dtype=dk.dtype) for x in (columns.k, columns.v)))
    kernel.backward(q, k, v, do, rows[0], rows[1], work, dq, dk, dv, columns, d_columns, overwrite=overwrite)
    added = [dk, dv, *([] if d_columns is None else [d_columns.k, d_columns.v])]
    return [dq if overwrite else dq - 1, *(x - 1 for x in added)]


@pytest.mark.parametrize(
    ("kind", "lengths", "heads", "kv_heads", "shared", "dtype", "head_size", "ranks"),
    [
        pytest.param("vertical-slash", [1], 1, 1, 1, torch.bfloat16, 128, 1, id="one-token"),
        pytest.param("vertical-slash", [130, 1, 257, 64], 4, 2, 1, torch.float16, 64, 1, id="documents"),
        pytest.param("vertical-slash", [333], 8, 1, 4, torch.bfloat16, 128, 1, id="heads-that-share-a-pattern"),
        pytest.param("vertical-slash", [300, 500], 2, 1, 1, torch.float16, 128, 2, id="hops-of-a-ring"),
        pytest.param("full", [300], 3, 1, 1, torch.bfloat16, 64, 1, id="full-odd-heads"),
        pytest.param("block-lists", [1], 1, 1, 1, torch.float16, 64, 1, id="lists-one-token"),
        pytest.param("block-lists", [130, 1, 257, 64], 4, 2, 1, torch.bfloat16, 64, 1, id="lists-documents"),
        pytest.param("block-lists", [333], 8, 1, 4, torch.float16, 64, 1, id="lists-heads-that-share-a-pattern"),
        pytest.param("block-lists", [300, 500], 2, 1, 1, torch.bfloat16, 64, 2, id="lists-hops-of-a-ring"),
        pytest.param("block-lists", [200, 700], 1, 1, 1, torch.float16, 64, 3, id="lists-hops-of-three"),
    ],
)
def test_gradients_are_overwritten_and_added(
    kernel: EmulatedKernel,
    kind: str,
    lengths: list[int],
    heads: int,
    kv_heads: int,
    shared: int,
    dtype: torch.dtype,
    head_size: int,
    ranks: int,
) -> None:
    sequence, scale = make_sequence(lengths), head_size**-0.5
    index = make_index(kind, sequence, heads // shared, shared)
    q, k, v = (x.to(dtype) for x in global_qkv(sequence, heads, kv_heads, head_size))
    inputs = [q.transpose(0, 1).contiguous().transpose(0, 1), k, v, make_gradient(q)]
    o, lse = exact(q, k, v, index, scale)
    rows, columns, calls = [lse, (inputs[3].double() * o).sum(-1)], column_kv(k, v, index, heads), kernel._op.calls
    blocks = sequence.layout.blocks // ranks * ranks  # as many for each rank

    def of(x: torch.Tensor, rank: int) -> torch.Tensor:
        return x.unflatten(1, (-1, BLOCK))[:, rank:blocks:ranks].flatten(1, 2)

    for rank in range(ranks):
        for source in range(ranks):
            work = Work(BlockMap(ranks, rank), BlockMap(ranks, source), index, scale)
            given = [of(x, r) for x, r in zip(inputs, (rank, source, source, rank), strict=True)]
            there = columns if rank == source else None
            there_wide = None if there is None else ColumnKV(there.k.double(), there.v.double())
            wide = [x.double() for x in given], [of(x, rank) for x in rows]
            expected = gradients(TorchKernel(), *wide, work, there_wide, overwrite=False)
            for overwrite in (True, False):
                got = gradients(kernel, given, [x.float() for x in wide[1]], work, there, overwrite=overwrite)
                for x, same in zip(got, expected, strict=True):
                    error, size = (x.double() - same).square().sum(), same.square().sum()
                    assert error <= (2 * ERROR[dtype]) ** 2 * size + 1e-8
    assert kernel._op.calls == calls + 2 * ranks**2, "Triton's kernel was called instead"


def test_columns_come_in_parts_with_keys_that_nobody_reads(kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    _, sequence, context = bound([150, 60], segment_tokens=128, selector={"kind": "fixed", "columns": 70, "slashes": 1})
    q, k, v = global_qkv(sequence, 2, 1, 64, dtype=torch.float16)
    do, calls, results = make_gradient(q), [kernel._op.calls], []
    for made_by, dtype, columns in (
        (TorchKernel(), torch.float64, 1 << 20),
        (kernel, torch.float16, 1 << 20),
        (kernel, torch.float16, 100),
    ):
        monkeypatch.setattr(contract, "PART_BYTES", columns * 2 * 64 * (2 + 4))
        given = [x.to(dtype)[None].requires_grad_() for x in (q, k, v)]
        o = sparse_ring_attention(*given, replace(context, kernel=made_by), layer=0, scale=0.125).transpose(1, 2)
        results.append([o.detach(), *torch.autograd.grad(o, given, do.to(dtype)[None])])
        calls.append(kernel._op.calls)
    assert calls[2] - calls[1] == 2 and calls[3] - calls[2] > 8, "Triton's kernels were called, or all columns came at once"
    for got in results[1:]:
        for x, same in zip(got, results[0], strict=True):
            assert (x.double() - same).square().sum() <= (2 * ERROR[torch.float16]) ** 2 * same.square().sum()


@pytest.mark.parametrize(("segment_tokens", "head_size"), [(1024, 64), (4096, 64), (1024, 128)])
def test_lists_longer_than_a_warp_is_wide(kernel: EmulatedKernel, segment_tokens: int, head_size: int) -> None:
    sequence, scale = make_sequence([2500], segment_tokens=segment_tokens), head_size**-0.5  # 40 blocks
    index = make_index("long-lists", sequence, 1, 1)
    q, k, v = (x.to(torch.float16) for x in global_qkv(sequence, 1, 1, head_size))
    do, expected, work = make_gradient(q), exact(q, k, v, index, scale), Work(BlockMap(1, 0), BlockMap(1, 0), index, scale)
    o, lse = empty_result(q)
    kernel.forward(q, k, v, work, o, lse)
    check(o, lse, expected, torch.float16)
    wide = [x.double() for x in (q, k, v, do)]
    rows = [expected[1], (wide[3] * expected[0]).sum(-1)]
    same = gradients(TorchKernel(), wide, rows, work, None, overwrite=False)
    got = gradients(kernel, [q, k, v, do], [x.float() for x in rows], work, None, overwrite=False)
    for x, true in zip(got, same, strict=True):
        assert (x.double() - true).square().sum() <= (2 * ERROR[torch.float16]) ** 2 * true.square().sum()


@pytest.mark.parametrize(
    ("kind", "shared", "overwrite"), [("vertical-slash", 2, True), ("full", 8, False), ("block-lists", 2, False)]
)
def test_gradients_of_queries_in_half_precision_are_summed_for_some_heads_at_a_time(
    kernel: EmulatedKernel, monkeypatch: pytest.MonkeyPatch, kind: str, shared: int, overwrite: bool
) -> None:
    sequence, scale = make_sequence([130, 140]), 64**-0.5
    index = make_index(kind, sequence, 8 // shared, shared)
    q, k, v = (x.to(torch.float16) for x in global_qkv(sequence, 8, 4, 64))
    do, work = make_gradient(q), Work(BlockMap(1, 0), BlockMap(1, 0), index, scale)
    o, lse = exact(q, k, v, index, scale)
    lse, delta = lse.float(), (do.double() * o).sum(-1).float()
    columns = column_kv(k, v, index, 8)

    def gradients_of(sums_of_heads: int) -> tuple[list[torch.Tensor], int]:
        monkeypatch.setattr(contract, "SUMS_BYTES", sums_of_heads * 2 * q[0].numel() * 4)
        before, dq = kernel._op.calls, torch.ones_like(q)
        dk, dv = (torch.zeros(x.shape) for x in (k, v))
        d_columns = None if columns is None else ColumnKV(torch.zeros(columns.k.shape), torch.zeros(columns.v.shape))
        kernel.backward(q, k, v, do, lse, delta, work, dq, dk, dv, columns, d_columns, overwrite=overwrite)
        return [dq, dk, dv, *([] if d_columns is None else [d_columns.k, d_columns.v])], kernel._op.calls - before

    expected, calls = gradients_of(4)
    assert calls == 1
    for heads, parts in ((3, 2), (0, 4)):
        got, calls = gradients_of(heads)
        assert calls == parts
        for x, same in zip(got, expected, strict=True):
            torch.testing.assert_close(x, same, rtol=1e-3, atol=1e-3)
            assert x.dtype == same.dtype and same.abs().sum() > 0


@pytest.mark.parametrize("case", CASES)
def test_what_queries_want_is_marked_and_nothing_else(kernel: EmulatedKernel, case: Case) -> None:
    calls = kernel._op.calls
    check_wanted(kernel, case, "cpu")
    assert kernel._op.calls == calls + case.ranks


def test_the_backend_decides_what_looks_at_the_scores_and_both_choose_alike(kernel: EmulatedKernel) -> None:
    selector = EveryQuerySelector(price=0.08)
    _, sequence, context = bound([700], segment_tokens=192, heads_per_pattern=2, selector=selector)
    q, k, _ = global_qkv(sequence, 4, 2, 64, dtype=torch.float16)
    assert fastest_method(q, kernel, 0.2) == "cuda"
    others = [(q.float(), kernel, 0.2), (q[..., :32], kernel, 0.2), (q, kernel, -0.2), (q, TorchKernel(), 0.2)]
    assert all(fastest_method(*given) == "triton" for given in others)
    on_hopper, calls = replace(context, kernel=kernel), kernel._op.calls
    found = select_by_every_query(selector, q, k, on_hopper, 0.2, "cuda")
    assert kernel._op.calls == calls + 1 and found.column_values.numel() > 0
    assert found.equal(select_by_every_query(selector, q, k, context, 0.2, "reference"))  # none is near the price
