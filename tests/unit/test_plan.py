"""Plans checked as data: every pair once, every send received, gradients back home."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse_ring.layout import Layout, LayoutKind
from ds_sparse_ring.plan import ring_plan

kinds = st.sampled_from(["striped", "contiguous", "zigzag"])


@given(kinds, st.integers(1, 9), st.integers(1, 40))
@settings(max_examples=60)
def test_each_causal_block_pair_is_computed_exactly_once(kind: LayoutKind, ranks: int, blocks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, blocks)
    seen: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        for hop in ring_plan(layout, rank).hops:
            for q_span, k_span in hop.work:
                for i in range(q_span.blocks):
                    for j in range(k_span.blocks):
                        q_block = q_span.map.stride * i + q_span.map.start
                        k_block = k_span.map.stride * j + k_span.map.start
                        if k_block <= q_block:
                            seen[q_block, k_block] += 1
    wanted = {(q, k) for q in range(layout.blocks) for k in range(q + 1)}
    assert set(seen) == wanted
    assert set(seen.values()) == {1}


@given(kinds, st.integers(1, 512))
@settings(max_examples=40)
def test_every_send_is_received_in_the_same_hop(kind: LayoutKind, ranks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, ranks)
    plans = [ring_plan(layout, rank) for rank in range(0, ranks, max(1, ranks // 8))]
    for plan in plans:
        for step, hop in enumerate(plan.hops):
            for transfer, name in ((hop.kv, "kv"), (hop.dkv, "dkv")):
                if transfer is not None:
                    peer = ring_plan(layout, transfer.send_to).hops[step]
                    assert getattr(peer, name).receive_from == plan.rank


@given(kinds, st.integers(1, 24))
def test_keys_arrive_where_the_plan_says_and_gradients_come_home(kind: LayoutKind, ranks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, 2 * ranks)
    plans = [ring_plan(layout, rank) for rank in range(ranks)]
    held = list(range(ranks))  # which shard of keys each rank holds
    gradient: list[int] = [-1] * ranks  # whose gradient each rank holds
    for step in range(ranks):
        dkv = [plan.hops[step].dkv for plan in plans]
        kv = [plan.hops[step].kv for plan in plans]
        assert held == [plan.hops[step].source for plan in plans]
        if step:
            assert gradient == held, "the gradient must arrive with the shard it belongs to"
        gradient = [held[rank if moved is None else moved.receive_from] for rank, moved in enumerate(dkv)]
        held = [held[rank if moved is None else moved.receive_from] for rank, moved in enumerate(kv)]
    assert gradient == list(range(ranks))


def test_a_contiguous_ring_does_no_work_in_the_future_and_a_single_rank_sends_nothing() -> None:
    contiguous = Layout.for_blocks("contiguous", 4, 8)
    assert [bool(hop.work) for hop in ring_plan(contiguous, 1).hops] == [True, True, False, False]
    (hop,) = ring_plan(Layout.for_blocks("striped", 1, 8), 0).hops
    assert hop.kv is None and hop.dkv is None
