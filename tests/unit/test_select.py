"""Selectors against plain dense computations, and what they promise: ties, causality, budgets, recall."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.config import FixedSelector, FullSelector, PriceSelector, TopPSelector
from ds_sparse_ring.context import SequenceContext
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import FullIndex, Index, VerticalSlash, density
from ds_sparse_ring.select import estimated_recall, select_index, true_recall
from ds_sparse_ring.select.probe import probe_groups
from ds_sparse_ring.select.recall import kept_mass, sampled_groups

from .reference import bound, dense_mask, global_qkv, random_block_lists, random_index

SCALE = 0.25


def _selected(q: torch.Tensor, k: torch.Tensor, context: SequenceContext) -> VerticalSlash:
    index = select_index(q, k, context, scale=SCALE)
    assert isinstance(index, VerticalSlash)
    return index


def _dense_probabilities(q: torch.Tensor, k: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT) * SCALE
    return scores.masked_fill(~visible, float("-inf")).softmax(-1)


def _peaked(sequence, heads: int, kv_heads: int, head_size: int = 16, seed: int = 0):
    """Queries and keys with strong columns and a strong diagonal, so that there is something to find."""
    q, k, v = global_qkv(sequence, heads, kv_heads, head_size, seed=seed)
    k[:, 37::211] += 3 * q.mean(1)[: k.shape[0], None]
    q = q + 2
    k[:, 37::211] += 1.5
    return q, k, v


def _price_by_hand(sequence, config, p: torch.Tensor, price: float) -> list[tuple[set[int], set[int]]]:
    """Columns and diagonals of one pattern per segment, entry by entry, from its dense probabilities ``[N, N]``."""
    chosen = []
    for s, segment in enumerate(sequence.segments):
        reach = segment.end - segment.document_begin
        diagonals = set(range(min(reach, config.local_blocks)))
        columns: set[int] = set()
        if segment.is_padding:
            chosen.append(({0}, columns))
            continue
        probed = s - 1 if config.probe == "previous" else s
        if config.probe == "previous" and segment.opens_document:
            chosen.append((set(range(reach)), columns))
            continue
        first = segment.document_begin * 64
        sinks = range(first, min(first + config.sink_tokens, segment.valid_end))
        source = sequence.segments[probed]
        rows = range(max(source.begin * 64, source.valid_end - config.probe_tokens), source.valid_end)
        columns |= set(sinks)
        diagonal_mass = [0.0] * (reach + 2)
        for j in range(first, source.end * 64):
            left = [
                float(p[t, j])
                for t in rows
                if j <= t and t // 64 - j // 64 >= config.local_blocks and j not in range(first, first + config.sink_tokens)
            ]
            if sum(left) / len(rows) > price:
                columns.add(j)
                continue
            for t in rows:
                if j <= t and t // 64 - j // 64 >= config.local_blocks and j not in sinks:
                    a, r = divmod(t - j, 64)
                    for block, share in ((a, (64 - r) / 64), (a + 1, r / 64)):
                        if block < len(diagonal_mass):
                            diagonal_mass[block] += float(p[t, j]) * share / len(rows)
        diagonals |= {d for d in range(reach) if diagonal_mass[d] > 64 * price}
        chosen.append((diagonals, columns))
    return chosen


@pytest.mark.parametrize("probe", ["own", "previous"])
@pytest.mark.parametrize("lengths", [[500], [130, 460]], ids=["one", "two-documents"])
def test_price_selection_equals_a_calculation_entry_by_entry(probe: str, lengths: list[int]) -> None:
    price = 2e-3
    _, sequence, context = bound(
        lengths, segment_tokens=192, probe=probe, probe_tokens=40, selector={"kind": "price", "price": price}
    )
    q, k, _ = _peaked(sequence, 2, 1)
    index = _selected(q, k, context)
    full = dense_mask(FullIndex(sequence.segments, 2), 2, q.shape[1])
    p = _dense_probabilities(q, k, full)
    found_columns = 0
    for pattern in range(2):
        for s, (diagonals, columns) in enumerate(_price_by_hand(sequence, context.config, p[pattern], price)):
            assert set(index.diagonals(s, pattern).tolist()) == diagonals
            assert set(index.columns(s, pattern).tolist()) == columns
            found_columns += len(columns)
    assert found_columns > 8, "the inputs must have columns to find"


def test_a_lower_price_keeps_everything_a_higher_one_keeps_of_columns_and_recalls_more() -> None:
    recalls, densities = [], []
    for price in (1e-1, 5e-3, 1e-3, 1e-5):
        _, sequence, context = bound([600], segment_tokens=192, selector={"kind": "price", "price": price})
        q, k, _ = _peaked(sequence, 4, 2)
        index = _selected(q, k, context)
        recalls.append(float(estimated_recall(q, k, index, context, scale=SCALE).mean()))
        densities.append(float(density(index).mean()))
    assert recalls == sorted(recalls) and densities == sorted(densities)
    assert densities[0] < 0.6 and recalls[-1] > 0.99


def test_recall_is_the_dense_probability_that_the_mask_keeps() -> None:
    _, sequence, context = bound([300, 200], segment_tokens=128, heads_per_pattern=2)
    q, k, _ = _peaked(sequence, 4, 2)
    index = _selected(q, k, context)
    full = dense_mask(FullIndex(sequence.segments, 4), 4, q.shape[1])
    kept = (_dense_probabilities(q, k, full) * dense_mask(index, 4, q.shape[1])).sum(-1)  # [H, N]
    groups = sampled_groups(context, 50)
    rows = torch.cat([group.rows for group in groups])
    assert rows.numel() == 50
    expected = kept[:, rows].unflatten(0, (2, 2)).mean(1)
    torch.testing.assert_close(kept_mass(q, k, index, groups, context, scale=SCALE), expected)
    summary = true_recall(q, k, index, context, scale=SCALE, rows=50)
    assert summary["mean"] == pytest.approx(float(expected.mean()))
    assert summary["worst"] <= summary["mean"]


def test_estimated_recall_is_the_mean_over_rows_spread_over_each_probe() -> None:
    _, sequence, context = bound([300, 3, 200], segment_tokens=128, probe_tokens=40)
    q, k, _ = _peaked(sequence, 4, 2)
    index = _selected(q, k, context)
    full = dense_mask(FullIndex(sequence.segments, 4), 4, q.shape[1])
    kept = (_dense_probabilities(q, k, full) * dense_mask(index, 4, q.shape[1])).sum(-1)
    rows: list[int] = []
    for segment in context.segments:
        probe = min(40, segment.valid_end - 64 * segment.begin)
        if probe > 0:
            rows += [segment.valid_end - probe + probe * i // min(8, probe) - 1 for i in range(1, min(8, probe) + 1)]
    torch.testing.assert_close(estimated_recall(q, k, index, context, scale=SCALE), kept[:, rows].mean(1))


@pytest.mark.parametrize("kind", ["vertical_slash", "block_lists", "full"])
def test_recall_of_any_index_is_what_its_mask_keeps(kind: str) -> None:
    _, sequence, context = bound([300, 70, 200], segment_tokens=128, heads_per_pattern=2)
    q, k, _ = _peaked(sequence, 6, 2)
    index: Index
    if kind == "vertical_slash":
        index = random_index(sequence, 3, 2, columns=40, diagonals=4)
    else:
        lists = random_block_lists(sequence, 3, 2, share=0.3)
        index = lists if kind == "block_lists" else FullIndex(sequence.segments, 3, 2)
    full = dense_mask(FullIndex(sequence.segments, 6), 6, q.shape[1])
    kept = (_dense_probabilities(q, k, full) * dense_mask(index, 6, q.shape[1])).sum(-1)
    groups = probe_groups(context.segments, context.config)
    expected = kept[:, torch.cat([group.rows for group in groups])].unflatten(0, (3, 2)).mean(1)
    torch.testing.assert_close(kept_mass(q, k, index, groups, context, scale=SCALE), expected)
    assert kind == "full" or expected.min() < 0.9, "something must be missing"


@pytest.mark.parametrize("p", [0.3, 0.9, 1.0])
def test_top_p_keeps_the_fewest_columns_that_reach_p(p: float) -> None:
    _, sequence, context = bound([400], segment_tokens=None, sink_tokens=0, local_blocks=1, selector={"kind": "top_p", "p": p})
    q, k, _ = _peaked(sequence, 2, 1)
    index = _selected(q, k, context)
    full = dense_mask(FullIndex(sequence.segments, 2), 2, q.shape[1])
    mass = _dense_probabilities(q, k, full)[:, 400 - 64 : 400].mean(1)  # [P, N]
    for pattern in range(2):
        columns = index.columns(0, pattern)
        kept = mass[pattern, columns]
        assert float(kept.sum()) >= p * (1 - 1e-9), "realised mass must reach p"
        assert float(kept.sum() - kept.min()) < p, "without its least entry it must not"


def test_top_p_slashes_become_the_block_diagonals_they_touch() -> None:
    _, sequence, context = bound(
        [400],
        segment_tokens=None,
        local_blocks=1,
        selector={"kind": "top_p", "p": 0.5, "max_columns": 0, "max_slashes": 1},
    )
    q, k, _ = global_qkv(sequence, 1, 1, 400)
    k = torch.eye(448, 400, dtype=torch.float64)[None] * 30
    for offset, expected in ((64 * 3, [0, 3]), (64 * 2 + 5, [0, 2, 3]), (0, [0])):
        shifted = torch.zeros_like(k)
        shifted[:, offset:] = k[:, : k.shape[1] - offset]
        index = _selected(shifted * 30, k, context)
        assert index.diagonals(0, 0).tolist() == expected
        assert index.columns(0, 0).tolist() == [0, 1, 2, 3], "only the sinks"


def test_fixed_budgets_are_met_exactly_and_bounds_hold() -> None:
    _, sequence, context = bound(
        [600], segment_tokens=None, sink_tokens=0, selector={"kind": "fixed", "columns": 17, "slashes": 1}
    )
    q, k, _ = _peaked(sequence, 2, 1)
    index = _selected(q, k, context)
    assert [index.columns(0, p).numel() for p in range(2)] == [17, 17]
    selector = {"kind": "top_p", "p": 0.5, "min_columns": 300, "max_slashes": 0}
    _, sequence, context = bound([600], segment_tokens=None, sink_tokens=0, selector=selector)
    index = _selected(q, k, context)
    assert [index.columns(0, p).numel() for p in range(2)] == [300, 300]
    assert index.diagonals(0, 0).tolist() == [0, 1]


@pytest.mark.parametrize(
    "selector",
    [PriceSelector(price=1e-3), TopPSelector(p=0.5, max_columns=9), FixedSelector(columns=9, slashes=3)],
    ids=["price", "top_p", "fixed"],
)
def test_constant_keys_are_tied_and_the_lowest_index_wins(selector) -> None:
    _, sequence, context = bound([640], segment_tokens=None, sink_tokens=0, selector=selector)
    q, k, _ = global_qkv(sequence, 2, 1, 16)
    k = torch.ones_like(k)
    first, second = (_selected(q, k, context) for _ in range(2))
    assert first.equal(second)
    if not isinstance(selector, PriceSelector):
        # keys before the probe's own block carry equal mass: the first ones are taken
        assert first.columns(0, 0).tolist() == list(range(9))


def test_one_huge_key_is_the_column() -> None:
    _, sequence, context = bound([640], segment_tokens=256, sink_tokens=0)
    q, k, _ = global_qkv(sequence, 1, 1, 16)
    q = q.abs()
    k[:, 100] = 1e4
    index = _selected(q, k, context)
    last = len(sequence.segments) - 1
    assert index.columns(last, 0).tolist() == [100]
    assert index.diagonals(last, 0).tolist() == [0, 1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_scores_that_are_not_finite_are_refused(bad: float) -> None:
    _, sequence, context = bound([300])
    q, k, _ = global_qkv(sequence, 2, 1, 16)
    k[0, 10] = bad
    with pytest.raises(SparseRingError, match="NaN or infinite"):
        select_index(q, k, context, scale=SCALE)


def test_the_previous_probe_is_strictly_causal() -> None:
    """Changing anything from a segment on must not change the index of that segment or of those before."""
    config = {"segment_tokens": 128, "probe": "previous", "selector": {"kind": "price", "price": 1e-3}}
    _, sequence, context = bound([640], **config)
    q, k, _ = _peaked(sequence, 2, 1)
    index = _selected(q, k, context)
    changed_q, changed_k = q.clone(), k.clone()
    changed_q[:, 384:], changed_k[:, 384:] = -q[:, 384:], 2 * k[:, 384:]
    changed = _selected(changed_q, changed_k, context)
    for s in range(4):  # segments 0..2 lie before token 384, segment 3 starts there
        assert torch.equal(index.diagonals(s, 0), changed.diagonals(s, 0))
        assert torch.equal(index.columns(s, 0), changed.columns(s, 0))
    assert index.diagonals(0, 0).tolist() == [0, 1], "the first segment of a document is dense"
    assert index.columns(0, 0).numel() == 0


def test_forced_entries_are_always_there() -> None:
    config = {"segment_tokens": 128, "local_blocks": 3, "sink_tokens": 5, "selector": {"kind": "price", "price": 0.9}}
    _, sequence, context = bound([300, 200], **config)
    q, k, _ = global_qkv(sequence, 2, 1, 16)
    index = _selected(q, k, context)
    for s, segment in enumerate(sequence.segments):
        if not segment.is_padding:
            reach = min(3, segment.end - segment.document_begin)
            assert index.diagonals(s, 1).tolist() == list(range(reach))
            begin = segment.document_begin * 64
            assert index.columns(s, 1).tolist() == list(range(begin, begin + 5))


def test_many_short_documents_take_memory_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masses of diagonals are kept per segment and reach, not per segment and sequence."""
    _, sequence, context = bound([64] * 200, segment_tokens=64)
    q, k, _ = global_qkv(sequence, 2, 1, 16)
    sizes: list[int] = []
    new_zeros = torch.Tensor.new_zeros

    def counting(self, *size, **options):
        out = new_zeros(self, *size, **options)
        sizes.append(out.numel())
        return out

    monkeypatch.setattr(torch.Tensor, "new_zeros", counting)
    index = _selected(q, k, context)
    assert max(sizes) <= q.numel()
    assert all(index.diagonals(s, p).tolist() == [0] for s in range(200) for p in range(2))


def test_full_selection_is_the_full_index() -> None:
    _, sequence, context = bound([300], selector=FullSelector())
    q, k, _ = global_qkv(sequence, 2, 1, 16)
    assert isinstance(select_index(q, k, context, scale=SCALE), FullIndex)
