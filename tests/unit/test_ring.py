"""Attention over a ring equals dense masked attention on one process: outputs, gradients, the index, what is sent."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ds_sparse_ring import attention
from ds_sparse_ring.attention import sparse_ring_attention
from ds_sparse_ring.batch import Sequence
from ds_sparse_ring.comm import Axes
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import FullIndex, VerticalSlash
from ds_sparse_ring.plan import ring_plan
from ds_sparse_ring.select import select_index
from ds_sparse_ring.select.probe import probe_groups
from ds_sparse_ring.ulysses import to_heads
from tests.common import DistributedTest

from .reference import bound, dense_mask, global_qkv, masked_attention

SELECTORS = [
    {"kind": "price", "price": 2e-3},
    {"kind": "top_p", "p": 0.2},
    {"kind": "fixed", "columns": 20, "slashes": 3},
    {"kind": "full"},
]
EVERY_QUERY = {"kind": "every_query", "price": 0.1, "window_blocks": 1}


def _shard(x: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    return sequence.layout.shard(x, sequence.rank, 1)[None]


def _attend(q, k, v, do, sequence: Sequence, context: SequenceContext, scale: float):
    """Output and gradients of this rank's shard, each ``[heads, n, D]``."""
    q, k, v = (_shard(x, sequence).requires_grad_() for x in (q, k, v))
    o = sparse_ring_attention(q, k, v, context, layer=0, scale=scale).transpose(1, 2)
    return [o.detach()[0], *(grad[0] for grad in torch.autograd.grad(o, (q, k, v), _shard(do, sequence)))]


def _of_all_heads(mask: torch.Tensor, axes: Axes) -> torch.Tensor:
    """The masks of all heads of a sequence that all ranks share: a Ulysses group has them one after the other."""
    if axes.ulysses_size == 1:
        return mask
    masks: list[Any] = [None] * axes.world_size
    dist.all_gather_object(masks, mask.cpu())
    return torch.cat(masks[: axes.ulysses_size]).to(mask.device)


def _check_against_dense(lengths: list[int], heads: int, kv_heads: int, **config: Any) -> None:
    _, sequence, context = bound(lengths, **config)
    q, k, v = global_qkv(sequence, heads, kv_heads, 16)
    do, scale = torch.randn(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1)).to(q.device), 0.25
    mine = to_heads([_shard(x, sequence)[0] for x in (q, k)], context.axes)
    index = select_index(mine[0], mine[1], context, scale=scale)
    visible = _of_all_heads(dense_mask(index, mine[0].shape[0], q.shape[1]), context.axes)
    got = _attend(q, k, v, do, sequence, context, scale)
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    o = masked_attention(q, k, v, visible, scale)
    for mine, whole in zip(got, [o.detach(), *torch.autograd.grad(o, (q, k, v), do)], strict=True):
        torch.testing.assert_close(mine, _shard(whole, sequence)[0], rtol=1e-10, atol=1e-11)


class TestRingParity(DistributedTest):
    world_size = [1, 2, 3, 4, 5]

    @pytest.mark.world_size([1, 2, 3, 4])
    def test_output_and_gradients_equal_dense_masked_attention(self) -> None:
        for layout, selectors in (
            ("striped", [*SELECTORS, EVERY_QUERY]), ("contiguous", SELECTORS[3:]), ("zigzag", SELECTORS[3:])
        ):  # fmt: skip
            for selector in selectors:  # the other layouts with sparse ones: below, with every plan
                _check_against_dense([700], 4, 2, layout=layout, segment_tokens=256, selector=selector)

    @pytest.mark.world_size([2, 4, 6])
    @pytest.mark.slow(world_size=[6])
    def test_ulysses_groups_beside_and_inside_rings(self) -> None:
        world = dist.get_world_size()
        for size in {2, world} if world < 6 else {world}:
            for heads, kv_heads in ((12, 12), (12, 1), (12, 2)):
                if kv_heads % size and size % kv_heads:
                    continue
                shared = heads // max(size, kv_heads)
                for selector in (SELECTORS[0], SELECTORS[3])[: 2 if kv_heads == 1 else 1]:
                    _check_against_dense([130, 1, 233], heads, kv_heads, segment_tokens=128, selector=selector,
                                         ulysses_degree=size, heads_per_pattern=shared)  # fmt: skip
        if world == 4:
            _check_against_dense([700], 4, 2, ulysses_degree=2, inner_degree=1)
            for layout in ("contiguous", "zigzag"):
                _check_against_dense([700], 4, 2, ulysses_degree=2, layout=layout)

    @pytest.mark.slow(world_size=[4, 5])
    def test_documents_shared_patterns_and_a_strictly_causal_probe(self) -> None:
        for probe in ("own", "previous"):
            _check_against_dense([130, 1, 333, 64], 8, 1, probe=probe, segment_tokens=128, heads_per_pattern=4)

    def test_sequences_shorter_than_the_ring(self) -> None:
        for lengths in ([1], [63], [65], [7, 7]):
            _check_against_dense(lengths, 2, 1)

    def test_every_rank_holds_the_same_index_bit_for_bit(self) -> None:
        for selector in (*SELECTORS[:3], EVERY_QUERY):
            _, sequence, context = bound([900], segment_tokens=256, selector=selector)
            q, k, _ = global_qkv(sequence, 4, 2, 16, dtype=torch.float32)
            index = select_index(_shard(q, sequence)[0], _shard(k, sequence)[0], context, scale=0.25)
            assert isinstance(index, VerticalSlash)
            for name in ("diagonal_ptr", "diagonal_values", "column_ptr", "column_values"):
                mine = getattr(index, name)
                sizes = context.axes.ring_gather(torch.tensor([mine.numel()], device=mine.device))
                assert all(torch.equal(size, sizes[0]) for size in sizes)
                assert all(torch.equal(other, mine) for other in context.axes.ring_gather(mine))

    @pytest.mark.slow(world_size=[4, 5])
    def test_bfloat16_partial_results_stay_in_float32(self) -> None:
        """The error must not grow with the ring: it stays within twice that of PyTorch on one process."""
        _, sequence, context = bound([1200], selector={"kind": "full"})
        q, k, v = global_qkv(sequence, 4, 2, 32, dtype=torch.bfloat16)
        do, scale = global_qkv(sequence, 4, 2, 32, dtype=torch.bfloat16, seed=1)[0], 32**-0.5
        got = _attend(q, k, v, do, sequence, context, scale)
        results = []
        for dtype in (torch.float64, torch.bfloat16):
            qd, kd, vd = (x.to(dtype).requires_grad_() for x in (q, k, v))
            o = masked_attention(qd, kd, vd, dense_mask(FullIndex(sequence.segments, 4), 4, q.shape[1]), scale)
            results.append([o.detach(), *torch.autograd.grad(o, (qd, kd, vd), do.to(dtype))])
        for mine, exact, single in zip(got, *results, strict=True):
            assert mine.dtype == torch.bfloat16
            exact, single = _shard(exact, sequence)[0], _shard(single, sequence)[0]
            assert (mine.double() - exact).abs().max() <= 2 * (single.double() - exact).abs().max()


def _plans(world: int) -> list[dict[str, Any]]:
    """Every kind of plan that a world allows: each factorisation, turning and gathered, and within Ulysses groups."""
    plans: list[dict[str, Any]] = [{"layout": kind} for kind in ("striped", "zigzag", "contiguous")]
    for inner in (n for n in range(1, world + 1) if world % n == 0):
        plans += [{"inner_degree": inner, "inner": kind} for kind in ("ring", "gather") if inner > 1 or kind == "ring"]
        plans += [{"inner_degree": inner, "inner": "gather", "layout": "zigzag"}] if inner == 2 else []
    if world % 2 == 0:
        plans += [{"ulysses_degree": 2}, {"ulysses_degree": 2, "inner_degree": world // 2, "inner": "gather"}]
    return plans


class TestEveryPlan(DistributedTest):
    world_size = [1, 2, 3, 4, 5, 6, 8]

    def test_output_and_gradients_equal_dense_masked_attention(self) -> None:
        for plan in _plans(dist.get_world_size()):
            _check_against_dense([300, 90], 2, 1, segment_tokens=128, selector=SELECTORS[0], **plan)

    @pytest.mark.world_size([3, 8])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.slow(world_size=[8])
    def test_gathering_gives_the_bits_of_the_ring(self, dtype: torch.dtype) -> None:
        world = dist.get_world_size()
        for inner in (world, world // 2):
            if inner > 1 and world % inner == 0:
                results = []
                for kind in ("ring", "gather"):
                    _, sequence, context = bound([700], segment_tokens=256, inner_degree=inner, inner=kind)
                    q, k, v = global_qkv(sequence, 2, 1, 16, dtype=dtype)
                    results.append(_attend(q, k, v, torch.ones_like(q), sequence, context, 0.25))
                assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


class TestRing(DistributedTest):
    world_size = 3

    @pytest.mark.parametrize("inner", ["ring", "gather"])
    def test_keys_and_values_are_sent_with_their_own_number_of_heads(self, inner: str, monkeypatch: pytest.MonkeyPatch) -> None:
        sent: list[int] = []
        exchange_all = Axes.exchange_all

        def counting(self, x, transfers, *named):
            sent.append(x.numel() * x.element_size() * len(transfers))
            return exchange_all(self, x, transfers, *named)

        monkeypatch.setattr(Axes, "exchange_all", counting)
        _, sequence, context = bound([700], selector={"kind": "full"}, inner_degree=3, inner=inner)
        q, k, v = global_qkv(sequence, 8, 1, 16, dtype=torch.float32)
        _attend(q, k, v, torch.ones_like(q), sequence, context, 0.25)
        shard_bytes = 2 * 1 * sequence.layout.local_tokens * 16 * 4  # keys and values, one head, float32
        # forward: 2 of 3 hops; backward: keys and values again, and their float32 gradients: in all 3 hops, or the others' home
        assert sum(sent) == (2 + 2 + (3 if inner == "ring" else 2)) * shard_bytes

    @pytest.mark.parametrize("plan", [{}, {"inner_degree": 3, "inner": "gather"}, {"ulysses_degree": 3}])
    def test_no_rank_waits_at_a_barrier(self, plan: dict[str, Any]) -> None:
        def barrier(*_: Any, **__: Any) -> None:
            raise AssertionError("a barrier in attention")

        _, sequence, context = bound([700], segment_tokens=256, **plan)
        q, k, v = global_qkv(sequence, 6, 3, 16, dtype=torch.float32)
        with pytest.MonkeyPatch.context() as patch:  # the fixture's patches would outlive the test on the ranks
            for name in ("barrier", "monitored_barrier"):
                patch.setattr(dist, name, barrier)
            _attend(q, k, v, torch.ones_like(q), sequence, context, 0.25)

    def test_layers_passes_and_other_packings_of_a_length_share_a_plan(self) -> None:
        ring_plan.cache_clear()
        for lengths in ([700], [300, 350], [640, 60]):  # 11 blocks each, padded to 12
            _, sequence, context = bound(lengths, segment_tokens=256)
            q, k, v = global_qkv(sequence, 2, 1, 16)
            _attend(q, k, v, torch.ones_like(q), sequence, context, 0.25)
        assert ring_plan.cache_info().misses == 1 and ring_plan.cache_info().hits == 5

    def test_two_rings_beside_each_other_do_not_meet(self) -> None:
        first, second = bound([300], selector={"kind": "full"}), bound([500], degree=1)
        assert (first[0].axes.ring_size, second[0].axes.ring_size) == (3, 1)
        assert (second[0].axes.data_size, second[0].axes.data_rank) == (3, dist.get_rank())

    def test_imbalance_and_density_are_reduced_over_ranks(self) -> None:
        ring, sequence, context = bound([64 * 9], layout="contiguous", selector={"kind": "full"})
        ring.meter.active = True
        q, k, v = global_qkv(sequence, 2, 1, 16)
        _attend(q, k, v, torch.ones_like(q), sequence, context, 0.25)
        report = ring.meter.pop()
        areas = torch.tensor([sum(4096 * b + 2080 for b in range(3 * r, 3 * r + 3)) for r in range(3)]).double()
        assert report["pair_imbalance"] == pytest.approx(float(areas.max() / areas.mean()))
        assert report["density"] == 1.0 and report["recall"] == 1.0
        assert ring.meter.pop() == {}

    @pytest.mark.parametrize("layout", ["striped", "contiguous", "zigzag"])
    def test_density_recall_and_work_are_those_of_the_mask(self, layout: str) -> None:
        selector = {"kind": "price", "price": 2e-3}
        ring, sequence, context = bound(
            [500, 70], layout=layout, segment_tokens=128, heads_per_pattern=2, local_blocks=1, selector=selector
        )
        ring.meter.active = True
        q, k, _ = global_qkv(sequence, 4, 2, 16)
        q, k = q + 1, 2 * k
        mine = _shard(q, sequence), _shard(k, sequence), _shard(k, sequence)
        sparse_ring_attention(*mine, context, layer=0, scale=0.25)
        index = select_index(mine[0][0], mine[1][0], context, scale=0.25)
        visible = dense_mask(index, 4, q.shape[1])
        full = dense_mask(FullIndex(sequence.segments, 4), 4, q.shape[1])
        p = ((q @ k.repeat_interleave(2, 0).mT) * 0.25).masked_fill(~full, float("-inf")).softmax(-1)
        kept = (p * visible).sum(-1)
        groups = [group.rows for group in probe_groups(context.segments, context.config)]
        rows = torch.cat([x[-1 - torch.arange(min(8, len(x))) * len(x) // min(8, len(x))] for x in groups])  # eight of a probe
        pairs = torch.stack([visible[:, sequence.layout.token_ids(rank)].sum() for rank in range(3)]).double()
        report = ring.meter.pop()
        assert report["recall"] == pytest.approx(float(kept[:, rows].mean())) and report["recall"] < 0.99
        assert report["density"] == pytest.approx(float(visible.sum() / full.sum()))
        assert isinstance(index, VerticalSlash)
        no_columns = replace(index, column_ptr=torch.zeros_like(index.column_ptr), column_values=index.column_values[:0])
        columns = visible.sum() - dense_mask(no_columns, 4, q.shape[1]).sum()
        assert report["column_density"] == pytest.approx(float(columns / full.sum())) and columns > 0
        assert report["pair_imbalance"] == pytest.approx(float(pairs.max() / pairs.mean()))

    def test_a_degree_that_does_not_divide_the_world_is_refused(self) -> None:
        with pytest.raises(SparseRingError, match=r"degree.* 2 .*divide"):
            bound([10], degree=2)


class TestCheckpointing(DistributedTest):
    world_size = 2

    @pytest.mark.parametrize(
        ("keep", "selector"),
        [("output", {"kind": "price", "price": 1e-3}), ("index", {"kind": "price", "price": 1e-3}), ("index", EVERY_QUERY)],
    )
    def test_replay_gives_the_same_bits_and_selects_once(
        self, keep: str, selector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls = {"select_index": 0, "ring_forward": 0, "column_gather": 0, "column_shares": 0}
        for name in calls:
            owner = Axes if name.startswith("column") else attention
            original = getattr(owner, name)

            def counting(*args, _name=name, _original=original, **kwargs):
                calls[_name] += 1
                return _original(*args, **kwargs)

            monkeypatch.setattr(owner, name, counting)
        from torch.utils.checkpoint import checkpoint

        from ds_sparse_ring.slots import checkpoint_context_fn

        _, sequence, context = bound([700], segment_tokens=256, checkpoint=keep, selector=selector)
        q, k, v = global_qkv(sequence, 4, 2, 16, dtype=torch.float32)
        k = torch.ones_like(k)  # constant keys: every selection is a tie
        results = []
        for checkpointed in (False, True):
            calls.update(dict.fromkeys(calls, 0))
            parts = [_shard(x, sequence).requires_grad_() for x in (q, k, v)]

            def layer(q, k, v):
                for number in range(2):  # two attention calls in one checkpointed function
                    q = q + sparse_ring_attention(q, k, v, context, layer=number, scale=0.25).transpose(1, 2)
                return q

            if checkpointed:
                out = checkpoint(layer, *parts, use_reentrant=False, context_fn=checkpoint_context_fn)
            else:
                out = layer(*parts)
            out.square().sum().backward()
            results.append([out.detach(), *(x.grad for x in parts)])
            assert calls["select_index"] == 2
            assert calls["ring_forward"] == (4 if checkpointed and keep == "index" else 2)
            # of both layers: gathered, gathered by the replay; returned
            assert (calls["column_gather"], calls["column_shares"]) == (4 if checkpointed else 2, 2)
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))

    def test_a_forward_pass_without_backward_leaves_nothing_behind(self) -> None:
        from torch.utils.checkpoint import checkpoint

        from ds_sparse_ring.slots import checkpoint_context_fn

        _, sequence, context = bound([200])
        q, k, v = (_shard(x, sequence).requires_grad_() for x in global_qkv(sequence, 2, 1, 16))
        alive = []

        def layer(q, k, v):
            out = sparse_ring_attention(q, k, v, context, layer=0, scale=0.25)
            alive.append(weakref.ref(out.untyped_storage()))
            return out.square()

        out = checkpoint(layer, q, k, v, use_reentrant=False, context_fn=checkpoint_context_fn)
        del out
        gc.collect()
        assert alive[0]() is None

    def test_backward_twice_replays_twice(self) -> None:
        from torch.utils.checkpoint import checkpoint

        from ds_sparse_ring.slots import checkpoint_context_fn

        _, sequence, context = bound([200])
        parts = [_shard(x, sequence).requires_grad_() for x in global_qkv(sequence, 2, 1, 16)]

        def layer(q, k, v):
            return sparse_ring_attention(q, k, v, context, layer=0, scale=0.25)

        out = checkpoint(layer, *parts, use_reentrant=False, context_fn=checkpoint_context_fn).square().sum()
        first = torch.autograd.grad(out, parts, retain_graph=True)
        second = torch.autograd.grad(out, parts)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
