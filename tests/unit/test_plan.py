"""Plans checked as data: every pair once, every send received, gradients back home whole, buffers and bytes as stated."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse_ring import plan_check
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import Layout, LayoutKind
from ds_sparse_ring.plan import InnerKind, RingPlan, Transfer, ring_plan
from ds_sparse_ring.plan_check import PassReport, check_plans

kinds = st.sampled_from(["striped", "contiguous", "zigzag"])
inner_kinds = st.sampled_from(["ring", "gather"])


@given(kinds, st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=60)
def test_each_causal_block_pair_is_computed_exactly_once(kind: LayoutKind, ranks: int, blocks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, blocks)
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        for hop in ring_plan(layout, rank).hops:
            for q_span, k_span in ((pair.q, pair.k) for pair in hop.work):
                for i in range(q_span.blocks):
                    for j in range(k_span.blocks):
                        q_block = q_span.map.stride * i + q_span.map.start
                        k_block = k_span.map.stride * j + k_span.map.start
                        if k_block <= q_block:
                            seen[q_block, k_block] += 1
    wanted = {(q, k) for q in range(layout.blocks) for k in range(q + 1)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _check(kind: LayoutKind, ranks: int, inner: int | None, inner_kind: InnerKind) -> None:
    """The checker finds nothing, and buffers and bytes are those of the formulas."""
    report = check_plans(Layout.for_blocks(kind, ranks, ranks), inner, inner_kind)
    size = ranks if inner is None else inner
    nodes = ranks // size
    assert report.forward.inner == nodes * (size - 1) and report.forward.outer == nodes - 1
    home = nodes if nodes > 1 else 0
    assert report.forward.gradient_buffers == 0
    assert report.backward.kv_buffers == report.forward.kv_buffers
    if inner_kind == "gather" and size > 1:
        # each part goes straight home; what is gathered, and between nodes the next round's
        assert report.backward.inner == 2 * nodes * (size - 1)
        assert report.backward.outer == nodes - 1 + home
        assert report.forward.kv_buffers == size + (nodes > 1)
        assert report.backward.gradient_buffers <= (4 if nodes == 1 else 6)
        return
    returning = ranks if size > 1 else 0  # the gradient goes on after every hop, and home at the end of each round
    assert report.backward.inner == nodes * (size - 1) + returning
    assert report.backward.outer == nodes - 1 + home
    # computed on and arriving; between nodes also the one sent ahead, once it is no longer computed on, and the next one
    assert report.forward.kv_buffers == (1 if ranks == 1 else 2 if 1 in (size, nodes) else 3 if size == 2 else 4)
    assert report.backward.gradient_buffers <= (1 if ranks == 1 else 3 if nodes == 1 else 4 if size == 1 else 5)


@given(kinds, st.integers(1, 64), st.data(), inner_kinds)
@settings(max_examples=100)
def test_plans_of_every_factorisation_hold_what_the_checker_asks(
    kind: LayoutKind, ranks: int, data: st.DataObject, inner_kind: InnerKind
) -> None:
    _check(kind, ranks, data.draw(st.sampled_from([None, *_divisors(ranks)])), inner_kind)


@given(kinds, st.integers(65, 200), st.data(), inner_kinds)
@settings(max_examples=6)
def test_plans_of_large_rings(kind: LayoutKind, ranks: int, data: st.DataObject, inner_kind: InnerKind) -> None:
    _check(kind, ranks, data.draw(st.sampled_from([None, *_divisors(ranks)])), inner_kind)


@given(kinds, st.integers(1, 64), st.integers(1, 6), st.integers(1, 7), st.data(), inner_kinds)
@settings(max_examples=30)
def test_plans_of_pages_hold_what_the_checker_asks(
    kind: LayoutKind, ranks: int, blocks: int, page_blocks: int, data: st.DataObject, inner_kind: InnerKind
) -> None:
    layout, inner = Layout.for_blocks(kind, ranks, ranks * blocks), data.draw(st.sampled_from([None, *_divisors(ranks)]))
    whole, paged = check_plans(layout, inner, inner_kind), check_plans(layout, inner, inner_kind, page_blocks)
    pages = -(-layout.blocks_per_rank // page_blocks)
    for name in ("forward", "backward"):
        a, b = getattr(whole, name), getattr(paged, name)
        assert (b.inner, b.outer) == (pages * a.inner, pages * a.outer), "every page travels as far as a shard would"
    assert paged.forward.kv_buffers == whole.forward.kv_buffers
    assert paged.backward.kv_buffers <= whole.backward.kv_buffers + (pages > 1), "one is loaded ahead"
    assert paged.backward.gradient_buffers <= whole.backward.gradient_buffers + (pages > 1), "one is on its last way home"
    if pages == 1:
        assert paged == whole and ring_plan(layout, 0, inner, inner_kind, page_blocks) == ring_plan(layout, 0, inner, inner_kind)


def test_calls_on_a_page_leave_out_the_queries_before_it() -> None:
    layout = Layout.for_blocks("striped", 2, 12)
    plan = ring_plan(layout, 0, page_blocks=2)
    assert [hop.load and (hop.load.begin, hop.load.end) for hop in plan.hops] == [(0, 2), None, (2, 4), None, (4, 6), None]
    assert [hop.source for hop in plan.hops] == [0, 1] * 3
    (calls,) = zip(*(hop.work for hop in plan.hops), strict=True)
    # of rank 0 blocks 0, 2, .. 10; of rank 1 blocks 1, 3, .. 11
    assert [(pair.q.first, pair.q.blocks, pair.k.first) for pair in calls] == [
        (0, 6, 0),  # the first call writes the results of all queries
        (2, 5, 1),
        (4, 4, 4),
        (6, 3, 5),
        (8, 2, 8),
        (0, 6, 9),  # the last one takes the columns of all queries
    ]
    assert [(pair.q.local_begin, pair.k.local_begin) for pair in calls] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (0, 0)]


@pytest.mark.parametrize(
    ("hop", "changes", "message"),
    [
        (2, {"load": None}, "holds shard 0 in hop 2, which is for 1"),
        (1, {"ends_page": False}, "gradients of shards 1 and 1, pages 1 and 0, are added"),
        (3, {"ends_page": False}, "rank 0 sends dkv of hop 3 to a rank that does not wait for it"),
        (2, {"work": ()}, "are computed 0 times"),
    ],
)
def test_the_checker_finds_what_is_wrong_with_pages(
    hop: int, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(plan: RingPlan) -> RingPlan:
        return replace(plan, hops=(*plan.hops[:hop], replace(plan.hops[hop], **changes), *plan.hops[hop + 1 :]))

    _spoil_rank_1(monkeypatch, "ring", spoil)
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 2, 8), page_blocks=2)


@pytest.mark.parametrize(
    ("ranks", "inner", "inner_kind"), [(512, 8, "gather"), (256, 256, "gather"), (256, 8, "ring"), (129, None, "ring")]
)
def test_plans_of_the_largest_rings(ranks: int, inner: int | None, inner_kind: InnerKind) -> None:
    _check("striped", ranks, inner, inner_kind)


def test_a_gathered_group_computes_the_hops_of_its_ring_and_waits_once_a_round() -> None:
    layout = Layout.for_blocks("striped", 6, 12)
    gathered, ring = ring_plan(layout, 4, 3, "gather").hops, ring_plan(layout, 4, 3).hops
    assert [(hop.source, hop.work, hop.kv_ahead, hop.dkv_ahead) for hop in gathered] == [
        (hop.source, hop.work, hop.kv_ahead, hop.dkv_ahead) for hop in ring
    ]
    assert [len(hop.kv) for hop in gathered] == [2, 0, 0, 2, 0, 0]
    assert [len(hop.kv) for hop in ring] == [1, 1, 0, 1, 1, 0]
    assert gathered[0].kv == (Transfer(5, 3), Transfer(3, 5)), "to all others of its node, those of the next hop first"
    assert [hop.dkv for hop in gathered[:3]] == [None, Transfer(3, 5), Transfer(5, 3)], "each part straight home"


def test_a_gathered_group_of_one_rank_is_a_ring_of_one() -> None:
    layout = Layout.for_blocks("striped", 4, 8)
    assert ring_plan(layout, 1, 1, "gather") == ring_plan(layout, 1, 1)


def test_a_contiguous_ring_does_no_work_in_the_future_and_a_single_rank_sends_nothing() -> None:
    contiguous = Layout.for_blocks("contiguous", 4, 8)
    assert [bool(hop.work) for hop in ring_plan(contiguous, 1).hops] == [True, True, False, False]
    (hop,) = ring_plan(Layout.for_blocks("striped", 1, 8), 0).hops
    assert hop.kv == () and hop.dkv is None
    assert check_plans(Layout.for_blocks("striped", 1, 8)).forward == PassReport(1, 0, 0, 0)


def test_a_plan_is_made_once_for_all_sequences_of_a_length() -> None:
    ring_plan.cache_clear()
    for _ in range(3):
        layout = pickle.loads(pickle.dumps(Layout.for_blocks("striped", 4, 9)))  # as batches come from loader workers
        assert ring_plan(layout, 2, 2, "gather") is ring_plan(Layout.for_blocks("striped", 4, 12), 2, 2, "gather")
    assert ring_plan.cache_info().misses == 1


def test_inner_rings_that_do_not_fill_the_ring_are_refused() -> None:
    with pytest.raises(SparseRingError, match="inner rings of 4 ranks do not divide a ring of 6"):
        ring_plan(Layout.for_blocks("striped", 6, 6), 0, 4)


def _spoil(plan: RingPlan, **changes: Any) -> RingPlan:
    return replace(plan, hops=(*plan.hops[:1], replace(plan.hops[1], **changes), *plan.hops[2:]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"work": ()}, "are computed 0 times"),
        ({"source": 3}, "which is for 3"),
        ({"kv": (Transfer(2, 3),)}, "sends it elsewhere"),
        ({"kv": ()}, "holds shard 1 in hop 2, which is for 3"),
        ({"kv": (Transfer(2, 0), Transfer(3, 2))}, "sends it elsewhere"),
        ({"dkv": Transfer(2, 3)}, "sends it elsewhere"),
    ],
)
def test_the_checker_finds_what_is_wrong(changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil_rank_1(monkeypatch, "ring", lambda plan: _spoil(plan, **changes))
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 4, 8))


@pytest.mark.parametrize(
    ("hop", "changes", "message"),
    [
        (0, {"kv": (Transfer(2, 0),)}, "rank 1 holds shard 1 in hop 2, which is for 3"),
        (0, {"kv": (Transfer(2, 0), Transfer(0, 2), Transfer(3, 3))}, "sends it elsewhere"),
        (0, {"kv": (Transfer(2, 0), Transfer(3, 3), Transfer(0, 2), Transfer(2, 0))}, "sends it elsewhere"),
        (1, {"dkv": None}, "gradients of shards 0 and 1, pages 0 and 0, are added"),
        (1, {"source": 3}, "holds shard 0 in hop 1, which is for 3"),
    ],
)
def test_the_checker_finds_what_is_wrong_in_a_gathered_group(
    hop: int, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoil(plan: RingPlan) -> RingPlan:
        return replace(plan, hops=(*plan.hops[:hop], replace(plan.hops[hop], **changes), *plan.hops[hop + 1 :]))

    _spoil_rank_1(monkeypatch, "gather", spoil)
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 4, 8), 4, "gather")


@pytest.mark.parametrize("flag", [{"first": True}, {"last": True}])
def test_the_checker_finds_columns_and_results_in_the_wrong_call(flag: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (pair,) = ring_plan(Layout.for_blocks("striped", 4, 8), 1).hops[1].work
    _spoil_rank_1(monkeypatch, "ring", lambda plan: _spoil(plan, work=(replace(pair, **flag),)))
    with pytest.raises(SparseRingError, match="plan of rank 1: in hop . a call is wrongly the first or last one"):
        check_plans(Layout.for_blocks("striped", 4, 8))


def test_the_checker_finds_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil_rank_1(monkeypatch, "ring", lambda plan: replace(plan, hops=plan.hops[:2]))
    monkeypatch.setattr(plan_check, "_check_coverage", lambda *_: None)
    with pytest.raises(SparseRingError, match="wait for transfers that no one posts"):
        check_plans(Layout.for_blocks("striped", 4, 8))


def _spoil_rank_1(monkeypatch: pytest.MonkeyPatch, inner_kind: InnerKind, spoil: Callable[[RingPlan], RingPlan]) -> None:
    def plans(layout: Layout, rank: int, inner: int | None, kind: InnerKind, page_blocks: int | None) -> RingPlan:
        assert kind == inner_kind
        plan = ring_plan(layout, rank, inner, kind, page_blocks)
        return spoil(plan) if rank == 1 else plan

    monkeypatch.setattr(plan_check, "ring_plan", plans)
