"""Plans checked as data: every pair once, on the data at hand, all sends received, gradients back home whole, costs as stated."""

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
from ds_sparse_ring.plan import InnerKind, Level, Pair, RingPlan, Transfer, ring_plan
from ds_sparse_ring.plan_check import PassReport, PlanReport, check_plans

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


@pytest.mark.parametrize(
    ("ranks", "inner", "inner_kind", "forward", "backward"),
    [  # buffers of keys and values and of gradients, transfers within and between inner rings
        (1, None, "ring", (1, 0, 0, 0), (1, 1, 0, 0)),
        (2, None, "ring", (2, 0, 1, 0), (2, 3, 3, 0)),
        (4, None, "ring", (2, 0, 3, 0), (2, 3, 7, 0)),
        (4, 1, "ring", (2, 0, 0, 3), (2, 4, 0, 7)),
        (4, 2, "ring", (3, 0, 2, 1), (3, 5, 6, 3)),
        (6, 3, "ring", (4, 0, 4, 1), (4, 5, 10, 3)),
        (4, 4, "gather", (4, 0, 3, 0), (4, 4, 6, 0)),
        (6, 3, "gather", (4, 0, 4, 1), (4, 6, 8, 3)),
    ],
)
def test_buffers_and_transfers_of_a_pass(
    ranks: int, inner: int | None, inner_kind: InnerKind, forward: tuple[int, ...], backward: tuple[int, ...]
) -> None:
    report = check_plans(Layout.for_blocks("striped", ranks, ranks), inner, inner_kind)
    assert report == PlanReport(PassReport(*forward), PassReport(*backward))


@given(kinds, st.integers(1, 64), st.data(), inner_kinds)
@settings(max_examples=100)
def test_plans_of_every_factorisation_hold_what_the_checker_asks(
    kind: LayoutKind, ranks: int, data: st.DataObject, inner_kind: InnerKind
) -> None:
    check_plans(Layout.for_blocks(kind, ranks, ranks), data.draw(st.sampled_from([None, *_divisors(ranks)])), inner_kind)


@given(kinds, st.integers(65, 200), st.data(), inner_kinds)
@settings(max_examples=6)
def test_plans_of_large_rings(kind: LayoutKind, ranks: int, data: st.DataObject, inner_kind: InnerKind) -> None:
    check_plans(Layout.for_blocks(kind, ranks, ranks), data.draw(st.sampled_from([None, *_divisors(ranks)])), inner_kind)


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
    _spoil_rank_1(monkeypatch, "ring", _hop(hop, **changes))
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 2, 8), page_blocks=2)


@pytest.mark.parametrize(
    ("ranks", "inner", "inner_kind"), [(512, 8, "gather"), (256, 256, "gather"), (256, 8, "ring"), (129, None, "ring")]
)
@pytest.mark.slow(ranks=[256])
def test_plans_of_the_largest_rings(ranks: int, inner: int | None, inner_kind: InnerKind) -> None:
    check_plans(Layout.for_blocks("striped", ranks, ranks), inner, inner_kind)


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
    _spoil_rank_1(monkeypatch, "ring", _hop(1, **changes))
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 4, 8))


@pytest.mark.parametrize(
    ("hop", "changes", "message"),
    [
        (0, {"kv": (Transfer(2, 0),)}, "rank 1 holds shard 1 in hop 2, which is for 3"),
        (0, {"kv": (Transfer(2, 0), Transfer(0, 2), Transfer(3, 3))}, "sends it elsewhere"),
        (0, {"kv": (Transfer(2, 0), Transfer(3, 3), Transfer(0, 2), Transfer(2, 0))}, "rank 1: one rank twice in what is posted"),
        (1, {"dkv": None}, "gradients of shards 0 and 1, pages 0 and 0, are added"),
        (1, {"source": 3}, "holds shard 0 in hop 1, which is for 3"),
    ],
)
def test_the_checker_finds_what_is_wrong_in_a_gathered_group(
    hop: int, changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil_rank_1(monkeypatch, "gather", _hop(hop, **changes))
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 4, 8), 4, "gather")


@pytest.mark.parametrize("flag", [{"first": True}, {"last": True}])
def test_the_checker_finds_columns_and_results_in_the_wrong_call(flag: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    (pair,) = ring_plan(Layout.for_blocks("striped", 4, 8), 1).hops[1].work
    _spoil_rank_1(monkeypatch, "ring", _hop(1, work=(replace(pair, **flag),)))
    with pytest.raises(SparseRingError, match="plan of rank 1: in hop . a call is wrongly the first or last one"):
        check_plans(Layout.for_blocks("striped", 4, 8))


def test_the_checker_finds_a_deadlock(monkeypatch: pytest.MonkeyPatch) -> None:
    _spoil_rank_1(monkeypatch, "ring", lambda plan: replace(plan, hops=plan.hops[:2]))
    with pytest.raises(SparseRingError, match="wait for transfers that no one posts"):
        check_plans(Layout.for_blocks("striped", 4, 8))


Spoil = Callable[[RingPlan], RingPlan]


def _spoil_rank_1(monkeypatch: pytest.MonkeyPatch, inner_kind: InnerKind, spoil: Spoil) -> None:
    def plans(layout: Layout, rank: int, inner: int | None, kind: InnerKind, page_blocks: int | None) -> RingPlan:
        assert kind == inner_kind
        plan = ring_plan(layout, rank, inner, kind, page_blocks)
        return spoil(plan) if rank == 1 else plan

    monkeypatch.setattr(plan_check, "ring_plan", plans)


def _hop(at: int, **changes: Any) -> Spoil:
    """Other fields of a hop; a function makes the new value of the old one."""

    def spoil(plan: RingPlan) -> RingPlan:
        hop = plan.hops[at]
        new = {name: value(getattr(hop, name)) if callable(value) else value for name, value in changes.items()}
        return replace(plan, hops=(*plan.hops[:at], replace(hop, **new), *plan.hops[at + 1 :]))

    return spoil


def _swap_work(plan: RingPlan) -> RingPlan:
    first, second = plan.hops[1], plan.hops[2]
    return _hop(2, work=first.work)(_hop(1, work=second.work)(plan))


def _one_later(span: str) -> Callable[[tuple[Pair, ...]], tuple[Pair, ...]]:
    """The first call reads or writes one block further; the causal map stays."""

    def spoil(work: tuple[Pair, ...]) -> tuple[Pair, ...]:
        old = getattr(work[0], span)
        return (replace(work[0], **{span: replace(old, local_begin=old.local_begin + 1)}), *work[1:])

    return spoil


def _first_page(**changes: int) -> Spoil:
    def spoil(plan: RingPlan) -> RingPlan:
        page = replace(plan.pages[0], **changes)
        return replace(_hop(0, load=page)(plan), pages=(page, *plan.pages[1:]))

    return spoil


def _level(level: Level) -> Callable[[Any], Any]:
    def spoil(posted: Any) -> Any:
        return tuple(map(spoil, posted)) if isinstance(posted, tuple) else replace(posted, level=level)

    return spoil


@pytest.mark.parametrize(
    ("layout", "page_blocks", "spoil", "message"),
    [
        ("striped", None, _swap_work, "rank 1: in hop 1 a call is not on its queries and the keys of 0"),
        ("striped", None, _hop(1, work=_one_later("k")), "rank 1: in hop 1 a call is not on its queries and the keys of 0"),
        ("zigzag", None, _hop(1, work=_one_later("q")), "rank 1: in hop 1 a call is not on its queries"),
        ("striped", 2, _hop(5, work=_one_later("k")), "rank 1: in hop 5 a call is not on its queries and the keys of 0"),
        ("striped", 2, _hop(5, work=_one_later("q")), "rank 1: in hop 5 a call is not on its queries"),
        ("striped", 2, _first_page(end=1), "plan of rank 1: pages .* do not tile a shard of 4 blocks"),
        ("striped", 2, lambda plan: replace(plan, pages=plan.pages[::-1]), "plan of rank 1: pages .* do not tile"),
        ("striped", None, _hop(0, kv=(Transfer(4, 0),)), "of the level that leads to rank 4"),
        ("striped", None, _hop(0, kv=(Transfer(1, 0),)), "of the level that leads to rank 1"),
    ],
)
def test_the_checker_finds_work_and_transfers_that_do_not_fit_the_rank(
    layout: LayoutKind, page_blocks: int | None, spoil: Spoil, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _spoil_rank_1(monkeypatch, "ring", spoil)
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks(layout, 4, 16), page_blocks=page_blocks)


@pytest.mark.parametrize(
    ("inner", "inner_kind", "spoil", "message"),
    [
        (None, "ring", _hop(0, kv=_level("outer")), "rank 0: .*level='outer'.* is not of the level that leads to rank 1"),
        (2, "ring", _hop(0, kv_ahead=_level("inner")), "rank 0: .*level='inner'.* is not of the level that leads to rank 2"),
        (2, "ring", _hop(2, dkv_ahead=_level("inner")), "rank 0: .*level='inner'.* is not of the level that leads to rank 2"),
        (2, "ring", lambda plan: replace(plan, home=_level("inner")(plan.home)), "is not of the level that leads to rank 2"),
        (2, "ring", _hop(0, kv=lambda kv: (Transfer(3, 3, "outer"),)), "rank 0: .* is not of the level that leads to rank 3"),
        (2, "ring", lambda plan: _hop(0, kv=(*plan.hops[0].kv, plan.home))(plan), "is not of the level that leads to rank 2"),
        (4, "gather", _hop(0, kv=lambda kv: (kv[0], _level("outer")(kv[1]), kv[2])), "is not of the level that leads to rank 2"),
        (4, "gather", _hop(0, kv=lambda kv: (*kv, kv[0])), "rank 0: one rank twice in what is posted at once"),
    ],
)
def test_the_checker_finds_levels_and_peers_that_are_wrong_on_all_ranks(
    inner: int | None, inner_kind: InnerKind, spoil: Spoil, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_check, "ring_plan", lambda layout, rank, *args: spoil(ring_plan(layout, rank, *args)))
    with pytest.raises(SparseRingError, match=message):
        check_plans(Layout.for_blocks("striped", 4, 8), inner, inner_kind)


def test_the_checker_finds_the_work_of_two_ranks_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    def plans(layout: Layout, rank: int, *args: Any) -> RingPlan:
        other = ring_plan(layout, {1: 3, 3: 1}.get(rank, rank), *args)
        return _hop(2, work=other.hops[2].work)(ring_plan(layout, rank, *args))

    monkeypatch.setattr(plan_check, "ring_plan", plans)
    with pytest.raises(SparseRingError, match="plan of rank 1: in hop 2 a call is not on its queries and the keys of 3"):
        check_plans(Layout.for_blocks("striped", 4, 16))


@pytest.mark.parametrize("field", ["kv_buffers", "gradient_buffers", "inner", "outer"])
def test_the_checker_finds_more_buffers_and_other_transfers_than_a_pass_needs(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dearer(plans: list[RingPlan], *, backward: bool) -> PassReport:
        report = original(plans, backward=backward)
        return replace(report, **{field: getattr(report, field) + backward})

    original = plan_check._report
    monkeypatch.setattr(plan_check, "_report", dearer)
    with pytest.raises(SparseRingError, match=f"plan: the backward pass takes .*{field}=.*, which should be"):
        check_plans(Layout.for_blocks("striped", 4, 8), 2)
