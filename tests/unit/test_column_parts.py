"""Columns in parts: the attention that they make at once, on any ring, with no more than one part at hand."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.column_parts import parts_of
from ds_sparse_ring.columns import ColumnGather, ColumnReturn
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.index import VerticalSlash, mask
from ds_sparse_ring.kernels import ColumnKV, contract
from ds_sparse_ring.kernels.torch_reference import TorchKernel
from ds_sparse_ring.select import select_index
from ds_sparse_ring.slots import checkpoint_context_fn
from tests.common import DistributedTest, rank_device
from tests.kernel_checks import make_sequence
from tests.offloading import GIB_OF_A_MIB

from .reference import bound, dense_mask, global_qkv, masked_attention, random_index

SIZE, SCALE = 16, 0.25
SELECTOR = {"kind": "fixed", "columns": 40, "slashes": 2}
OFFLOAD = {"host_gib": 4 * GIB_OF_A_MIB, "kv_page_tokens": 64}


def part_bytes(columns: int, dtype: torch.dtype) -> int:
    """So that a part has so many columns of `SIZE`."""
    return columns * 2 * SIZE * (dtype.itemsize + contract.accumulator_dtype(dtype).itemsize)


def _attend(
    columns: int, lengths: list[int], heads: int, kv_heads: int, *, replayed: bool = False, dtype=torch.float64, **config: Any
) -> list[torch.Tensor]:
    """Output and gradients of this rank with parts of so many columns."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "PART_BYTES", part_bytes(columns, dtype))
        _, sequence, context = bound(lengths, segment_tokens=128, **({"selector": SELECTOR} | config))
        qkv = global_qkv(sequence, heads, kv_heads, SIZE, dtype=dtype)
        q, k, v = (sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in qkv)

        def layer(q: torch.Tensor) -> torch.Tensor:
            return sparse_ring_attention(q, k, v, context, layer=0, scale=SCALE)

        out = checkpoint(layer, q, use_reentrant=False, context_fn=checkpoint_context_fn) if replayed else layer(q)
        out.mul(torch.linspace(0, 1, out.numel(), dtype=dtype, device=out.device).view(out.shape)).sum().backward()
        gradients = [x.grad for x in (q, k, v) if x.grad is not None]
        return [out.detach(), *gradients]


def _close(got: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float = 1e-12) -> None:
    for mine, other in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)


def _of_columns(index: VerticalSlash, heads: int, tokens: int) -> torch.Tensor:
    """Which (query, key) pairs are read as columns, ``[heads, tokens, tokens]``."""
    begin, end = 64 * index.segments[0].begin, 64 * index.segments[-1].end
    rest = replace(index, column_ptr=torch.zeros_like(index.column_ptr), column_values=index.column_values[:0])
    found = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    for head in range(heads):
        whole, diagonals = (mask(x, head, torch.arange(begin, end), torch.arange(end)) for x in (index, rest))
        found[head, begin:end, :end] = whole & ~diagonals
    return found


def test_parts_are_runs_of_rows_and_each_column_counts_in_one_of_them() -> None:
    sequence = make_sequence([500, 90, 300])
    index = random_index(sequence, 3, 2, columns=60, diagonals=2)
    tokens, rows = sequence.layout.blocks * 64, index.column_ptr.diff()
    assert index.parts(index.column_values.numel()) == ()
    for most in (1, 100, 700):
        parts = index.parts(most)
        assert len(parts) > 1 and parts is index.parts(most), "the host reads where they begin once"
        assert torch.equal(torch.cat([part.column_values for part in parts]), index.column_values)
        for part in parts:
            assert part.column_values.numel() <= max(most, int(part.column_ptr.diff().max()))
            assert part.diagonal_ptr[0] == 0 and part.diagonal_ptr[-1] == part.diagonal_values.numel()
        found = torch.stack([_of_columns(part, 6, tokens) for part in parts]).sum(0)
        assert torch.equal(found, _of_columns(index, 6, tokens).long())
    assert len(index.parts(1)) == (rows > 0).sum(), "one row at least"
    one_row = random_index(make_sequence([100]), 1, 1, columns=60, diagonals=2)
    assert one_row.parts(1) == (), "a row is not cut"


class CountedKernel:
    """The reference, whose own calls of itself are not counted."""

    name, _kernel = "torch", TorchKernel()
    delta, add_rows = _kernel.delta, _kernel.add_rows

    def forward(self, *given: Any, **named: Any) -> None:
        self._kernel.forward(*given, **named)

    def backward(self, *given: Any, **named: Any) -> None:
        self._kernel.backward(*given, **named)


def _count(patch: pytest.MonkeyPatch, calls: Counter[str], owner: type, name: str) -> None:
    original = getattr(owner, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls[name] += 1
        return original(*args, **kwargs)

    patch.setattr(owner, name, counted)


def _check(columns: int, lengths: list[int], heads: int, kv_heads: int, **config: Any) -> None:
    expected = _attend(1 << 20, lengths, heads, kv_heads, **{**config, "replayed": False})
    _close(_attend(columns, lengths, heads, kv_heads, **config), expected)


class TestParity(DistributedTest):
    world_size = [1, 2, 3]

    def test_parts_make_what_all_columns_at_once_make(self) -> None:
        _check(1, [150, 40, 200], 4, 2)
        _check(100, [150, 40, 200], 4, 1, layout="zigzag", heads_per_pattern=2)
        for keep in ("output", "index"):
            _check(60, [300], 2, 1, replayed=True, checkpoint=keep)
        _check(60, [150, 40, 200], 4, 2, offload=OFFLOAD)
        _check(60, [300], 2, 1, offload=OFFLOAD, replayed=True)
        if dist.get_world_size() == 2:
            _check(60, [150, 40], 4, 2, ulysses_degree=2)

    @pytest.mark.world_size([1, 2])
    def test_output_and_gradients_equal_dense_masked_attention(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(contract, "PART_BYTES", part_bytes(60, torch.float64))
            _, sequence, context = bound([150, 40, 200], segment_tokens=128, selector=SELECTOR)
            q, k, v = global_qkv(sequence, 4, 2, SIZE)
            do = global_qkv(sequence, 4, 2, SIZE, seed=1)[0]
            mine = [sequence.layout.shard(x, sequence.rank, 1)[None].requires_grad_() for x in (q, k, v)]
            index = select_index(mine[0].detach()[0], mine[1].detach()[0], context, scale=SCALE)
            assert len(parts_of(index, k)) > 3
            o = sparse_ring_attention(*mine, context, layer=0, scale=SCALE).transpose(1, 2)
            got = [o.detach(), *torch.autograd.grad(o, mine, sequence.layout.shard(do, sequence.rank, 1)[None])]
        whole = [x.requires_grad_() for x in (q, k, v)]
        o = masked_attention(whole[0], whole[1], whole[2], dense_mask(index, 4, q.shape[1]), SCALE)
        expected = [o.detach(), *torch.autograd.grad(o, whole, do)]
        _close([x[0] for x in got], [sequence.layout.shard(x, sequence.rank, 1) for x in expected])

    @pytest.mark.world_size([2])
    def test_gradients_are_rounded_once_whatever_the_parts(self) -> None:
        exact = _attend(1 << 20, [300], 2, 1)
        for offload in (None, OFFLOAD):
            errors = []
            for columns in (1 << 20, 50):
                got = _attend(columns, [300], 2, 1, dtype=torch.bfloat16, offload=offload)
                errors.append([float((a.double() - b).square().mean().sqrt()) for a, b in zip(got, exact, strict=True)])
                assert all(x.dtype == torch.bfloat16 for x in got)
            assert all(parts <= 1.1 * whole for whole, parts in zip(*errors, strict=True))

    @pytest.mark.world_size([1])
    @pytest.mark.parametrize("backend", ["cpu", "triton"])
    def test_compiled_kernels_take_parts(self, backend: str) -> None:
        if backend == "cpu" and rank_device().type == "cuda":
            pytest.skip("tensors are on a GPU here")
        given: dict[str, Any] = {"lengths": [200, 120], "heads": 2, "kv_heads": 1, "dtype": torch.float32}
        _close(_attend(60, backend=backend, **given), _attend(1 << 20, backend="torch", **given), 1e-4)


class TestWhatIsDone(DistributedTest):
    world_size = [1, 3]

    def test_one_part_alone_is_done_as_ever_and_several_one_after_the_other(self) -> None:
        calls: Counter[str] = Counter()
        with pytest.MonkeyPatch.context() as patch:  # ranks serve other tests, too
            for owner, name in (
                (CountedKernel, "forward"),
                (CountedKernel, "backward"),
                (Axes, "column_gather"),
                (Axes, "column_shares"),
            ):
                _count(patch, calls, owner, name)
            _, sequence, context = bound([300, 90], segment_tokens=128, selector=SELECTOR)
            context = replace(context, kernel=CountedKernel())
            pairs, spans = sum(len(hop.work) for hop in context.plan.hops), 0
            q, k, v = (sequence.layout.shard(x, sequence.rank, 1)[None] for x in global_qkv(sequence, 2, 1, SIZE))
            index = select_index(q[0], k[0], context, scale=SCALE)
            assert isinstance(index, VerticalSlash)
            for columns in (index.column_values.numel(), 60):
                patch.setattr(contract, "PART_BYTES", part_bytes(columns, torch.float64))
                parts = parts_of(index, k[0])
                spans = sum(span.within(p.segments[0].begin, p.segments[-1].end).blocks > 0
                            for p in parts for span in sequence.layout.spans(sequence.rank))  # fmt: skip
                calls.clear()
                mine = [x.detach().requires_grad_() for x in (q, k, v)]
                sparse_ring_attention(*mine, context, layer=0, scale=SCALE).sum().backward()
                assert calls["forward"] == calls["backward"] == pairs + spans
                gathers, returns = (2 * len(parts), len(parts)) if parts else (1, 1)
                alone = dist.get_world_size() == 1
                assert (calls["column_gather"], calls["column_shares"]) == ((0, 0) if alone else (gathers, returns))
            assert len(parts) > 3

    def test_one_part_is_at_hand_at_a_time(self) -> None:
        alive: list[weakref.ref[Any]] = []
        start, wait, zeros = ColumnGather.start, ColumnGather.wait, ColumnReturn.__init__

        def noted_start(gather: ColumnGather) -> ColumnGather:
            assert all(ref() is None for ref in alive)
            return start(gather)

        def noted_wait(gather: ColumnGather) -> ColumnKV | None:
            columns = wait(gather)
            if columns is not None:
                alive.append(weakref.ref(columns.k))
            return columns

        def noted_zeros(back: ColumnReturn, *given: Any) -> None:
            zeros(back, *given)
            if back.rows is not None:
                alive.append(weakref.ref(back.rows.k.untyped_storage()))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ColumnGather, "start", noted_start)
            patch.setattr(ColumnGather, "wait", noted_wait)
            patch.setattr(ColumnReturn, "__init__", noted_zeros)
            for offload in (None, OFFLOAD):
                alive.clear()
                _attend(60, [300, 90], 2, 1, offload=offload)
                assert len(alive) >= 12 and len(alive) % 3 == 0, "keys twice, gradients once"
