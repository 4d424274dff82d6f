"""The simulator: published sums, brute force counts, and what must hold for any ring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import FullIndex, cost
from ds_sparse_ring.layout import Layout
from ds_sparse_ring.simulate import Links, PassTime, Work, causal_pairs, save_trace, simulate_pass


def _uniform(ranks: int, hop_ms: float) -> tuple[Layout, float]:
    """A striped layout with many blocks, and the time of a pair by which a hop takes ``hop_ms``."""
    layout = Layout.for_blocks("striped", ranks, 64 * ranks)
    pairs = sum(causal_pairs(q, k) for q in layout.spans(0) for k in layout.spans(1 % ranks))
    return layout, hop_ms / pairs


@pytest.mark.parametrize(("inner", "expected"), [(8, 19.5), (None, 34.1)])
def test_mtrainings_published_sums_follow_from_its_inputs(inner: int | None, expected: float) -> None:
    """MTraining, 32 A100 in 4 nodes: 0.51 ms of compute a hop, transfers of 0.13 ms within a node and 0.98 ms between nodes."""
    layout, pair_ms = _uniform(32, 0.51)
    work = Work(pair_ms, density=1.0, columns=0.0, kv_bytes=1e6, gradient_bytes=2e6)
    links = Links(node_ranks=8, inner_gb_s=1 / 0.13, outer_gb_s=1 / 0.98, latency_ms=0.0)
    forward = simulate_pass(layout, inner, work, links, backward=False)
    index_ms, host_ms = 1.13, 2.08
    assert forward.total + index_ms + host_ms == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("kind", ["striped", "contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_pairs_are_those_of_the_full_index(kind, ranks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, 26)
    index = FullIndex(make_segments([layout.blocks * 64], layout.blocks, None), 1)
    for rank in range(ranks):
        counted = sum(causal_pairs(q, k) for source in range(ranks) for q in layout.spans(rank) for k in layout.spans(source))
        assert counted == int(cost(index, layout.block_ids(rank)).sum())


@pytest.mark.parametrize("ranks", [2, 5, 8])
def test_without_work_a_pass_takes_what_stands_in_the_queue_of_the_link(ranks: int) -> None:
    """1 ms of latency; 10 ms for a shard of keys and values, 20 ms for its gradient."""
    layout = Layout.for_blocks("striped", ranks, 2 * ranks)
    work, links = Work(1e-12, 1.0, 0.0, kv_bytes=1e7, gradient_bytes=2e7), Links(ranks, 1.0, 1.0, latency_ms=1.0)
    others = ranks - 1

    def total(inner: int | None, kind, *, backward: bool) -> float:
        return simulate_pass(layout, inner, work, links, backward=backward, kind=kind).total

    assert total(None, "ring", backward=False) == pytest.approx(others * 11)
    assert total(ranks, "gather", backward=False) == pytest.approx(1 + others * 10), "one latency for all"
    assert total(None, "ring", backward=True) == pytest.approx(others * 11 + ranks * 21)
    assert total(ranks, "gather", backward=True) == pytest.approx(1 + others * 10 + others * 21), "no gradient travels around"


def test_columns_move_work_but_do_not_change_it() -> None:
    layout, pair_ms = _uniform(4, 1.0)
    links = Links(8, 100.0, 10.0, 0.0)
    works = [Work(pair_ms, 0.1, columns, 1e3, 2e3) for columns in (0.0, 0.05)]
    totals = [simulate_pass(layout, None, work, links, backward=True).compute for work in works]
    assert totals[0] == pytest.approx(totals[1], rel=1e-9)


def test_imbalance_of_layouts_is_what_the_triangle_says() -> None:
    links = Links(8, 1e6, 1e6, 0.0)
    found = {}
    for kind in ("striped", "zigzag", "contiguous"):
        layout = Layout.for_blocks(kind, 8, 512)
        found[kind] = simulate_pass(layout, None, Work(1e-9, 1.0, 0.0, 1.0, 1.0), links, backward=False)
    assert found["striped"].imbalance < 1.02 and found["zigzag"].imbalance < 1.02
    assert found["contiguous"].imbalance == pytest.approx(2 - 1 / 8, rel=0.02)
    assert found["striped"].hop_imbalance < 1.02


def test_pages_are_loaded_beside_the_page_before_and_gradients_return_beside_the_next_one() -> None:
    """Four pages, whose transfers take 0.25 ms; a hop takes 7 ms on the first page and 1 ms on the last one."""
    layout, pair_ms = _uniform(2, 16.0)
    work = Work(pair_ms, 1.0, 0.0, kv_bytes=1e6, gradient_bytes=1e6)

    def run(page_blocks: int | None, *, host_gb_s: float, backward: bool = True) -> PassTime:
        links = Links(8, 1.0, 1.0, 0.0, host_gb_s=host_gb_s)
        return simulate_pass(layout, None, work, links, backward=backward, page_blocks=page_blocks)

    whole, paged = run(None, host_gb_s=1.0), run(16, host_gb_s=1.0)
    assert paged.compute == pytest.approx(whole.compute, rel=0.05)
    waiting_for_the_slower_rank = whole.exposed - 1.0  # and 1 ms for the last way home of a shard
    assert 0 <= waiting_for_the_slower_rank < 0.3
    exposed = paged.exposed - waiting_for_the_slower_rank
    assert exposed == pytest.approx(0.5, abs=0.05), "one page until it is loaded, and the last way home of one"
    assert len([e for e in paged.events if e.lane == "load"]) == 2 * 4
    assert run(16, host_gb_s=0.01).total == pytest.approx(100, rel=0.05), "a shard at 0.01 GB/s"
    assert run(16, host_gb_s=0.01, backward=False).exposed < 1e-6, "the forward pass has keys and values on the device"


def test_slow_links_are_exposed_and_fast_ones_are_not(tmp_path: Path) -> None:
    layout, pair_ms = _uniform(4, 1.0)
    work = Work(pair_ms, 1.0, 0.0, 1e6, 2e6)
    fast = simulate_pass(layout, None, work, Links(8, 100.0, 1.0, 0.0), backward=False)
    slow = simulate_pass(layout, None, work, Links(8, 0.1, 1.0, 0.0), backward=False)
    assert fast.exposed == pytest.approx(0.0, abs=1e-6) and fast.total == pytest.approx(fast.compute, rel=0.05)
    assert slow.total == pytest.approx(3 * 10 + 1.0, rel=0.05), "three transfers of 10 ms, and the last hop"
    save_trace(slow.events, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(e["dur"] for e in trace if e["ph"] == "X" and e["tid"] == 0) == pytest.approx(4 * slow.compute * 1e3)
    assert torch.tensor([e["dur"] for e in trace if e["ph"] == "X"]).min() >= 0
