"""The index's mask, cost and density against loops over single entries."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_sparse_ring.batch import shard_batch
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import BlockLists, FullIndex, Index, VerticalSlash, causal_cost, cost, density, mask, span_pairs
from ds_sparse_ring.layout import BlockMap, LayoutKind

from .reference import NoWaiting, dense_mask, packed_batch, random_block_lists, random_index

lengths_strategy = st.lists(st.integers(1, 400), min_size=1, max_size=3)


def _sequence(lengths: list[int], ranks: int = 1, segment_tokens: int | None = 128):
    return shard_batch(packed_batch(lengths), kind="striped", ranks=ranks, rank=0, segment_tokens=segment_tokens)["sparse_ring"]


def _entry_by_entry(index: VerticalSlash, pattern: int, tokens: int) -> torch.Tensor:
    out = torch.zeros(tokens, tokens, dtype=torch.bool)
    for i in range(tokens):
        s = next(n for n, segment in enumerate(index.segments) if segment.begin <= i // 64 < segment.end)
        diagonals = set(index.diagonals(s, pattern).tolist())
        columns = set(index.columns(s, pattern).tolist())
        for j in range(index.segments[s].document_begin * 64, i + 1):
            offset = i // 64 - j // 64
            out[i, j] = offset in diagonals or (j in columns and offset > 0)
    return out


@given(lengths_strategy, st.integers(0, 1000))
@settings(max_examples=10, deadline=None)
def test_mask_is_what_the_definition_says(lengths: list[int], seed: int) -> None:
    sequence = _sequence(lengths)
    index = random_index(sequence, 2, 1, columns=5, diagonals=2, seed=seed)
    tokens = sequence.layout.blocks * 64
    for pattern in range(2):
        assert torch.equal(dense_mask(index, 2, tokens)[pattern], _entry_by_entry(index, pattern, tokens))


@given(lengths_strategy, st.integers(0, 1000), st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=25, deadline=None)
def test_cost_counts_the_masks_entries(lengths: list[int], seed: int, low: int, size: int) -> None:
    sequence = _sequence(lengths, ranks=3)
    index = random_index(sequence, 3, 2, columns=9, diagonals=4, seed=seed)
    blocks = sequence.layout.blocks
    visible = dense_mask(index, 6, blocks * 64)[::2]
    per_block = visible.unflatten(1, (-1, 64)).sum(2)  # [P, blocks, keys]
    assert torch.equal(cost(index, torch.arange(blocks)), per_block.sum(-1))
    high = min(low + size, blocks)
    keys = slice(low * 64, max(low, high) * 64)
    assert torch.equal(cost(index, torch.arange(blocks), (low, max(low, high))), per_block[..., keys].sum(-1))


@pytest.mark.parametrize("kind", ["striped", "contiguous", "zigzag"])
@given(lengths_strategy, st.integers(1, 4), st.sampled_from([64, 128, None]), st.integers(0, 1000))
@settings(max_examples=20, deadline=None)
def test_pairs_of_spans_are_the_sums_of_cost(
    kind: LayoutKind, lengths: list[int], ranks: int, segment_tokens: int | None, seed: int
) -> None:
    sequence = shard_batch(packed_batch(lengths), kind=kind, ranks=ranks, rank=0, segment_tokens=segment_tokens)["sparse_ring"]
    indices: list[Index] = [
        random_index(sequence, 3, 2, columns=40, diagonals=6, seed=seed),
        random_index(sequence, 1, 1, columns=0, diagonals=0, seed=seed),
        random_block_lists(sequence, 2, 2, share=0.3, seed=seed),
        FullIndex(sequence.segments, 2),
    ]
    for index in indices:
        for rank in range(ranks):
            for span in sequence.layout.spans(rank):
                blocks = span.map.to_global(torch.arange(span.blocks))
                assert torch.equal(span_pairs(index, span.map, span.blocks), cost(index, blocks).sum(1))


def test_pairs_are_counted_without_waiting_for_the_device() -> None:
    sequence = _sequence([400, 90])
    index = random_index(sequence, 3, 2, columns=9, diagonals=4)
    span_pairs(index, BlockMap(1, 0), 8)  # makes the table of segments
    with NoWaiting():
        span_pairs(index, BlockMap(3, 1), 2)


@given(lengths_strategy, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_the_full_index_is_the_causal_triangle_of_each_document(lengths: list[int], ranks: int) -> None:
    sequence = _sequence(lengths, ranks=ranks)
    index = FullIndex(sequence.segments, 2)
    blocks = torch.arange(sequence.layout.blocks)
    assert torch.equal(cost(index, blocks)[0], causal_cost(sequence.segments, blocks))
    assert density(index).tolist() == [1.0, 1.0]
    tokens = sequence.layout.blocks * 64
    visible = dense_mask(index, 1, tokens)[0]
    begin = 0
    for length in lengths:
        assert torch.equal(visible[begin : begin + length, begin : begin + length], torch.ones(length, length).tril().bool())
        assert not visible[begin : begin + length, :begin].any()
        begin += -(-length // 64) * 64


def test_pairs_may_come_in_any_order_and_twice() -> None:
    segments = make_segments([256, 128], 6, None)
    diagonals = torch.tensor([[3, 1], [0, 0], [0, 3], [0, 3], [3, 0], [1, 0], [2, 0]])
    columns = torch.tensor([[3, 300], [0, 7], [0, 5], [3, 260], [0, 7]])
    index = VerticalSlash.from_keys(segments, 2, 1, diagonals, columns)
    assert index.diagonals(0, 0).tolist() == [0, 3] and index.diagonals(1, 1).tolist() == [0, 1]
    assert index.columns(0, 0).tolist() == [5, 7] and index.columns(1, 1).tolist() == [260, 300]
    assert index.columns(1, 0).tolist() == []
    assert index.column_patterns().tolist() == [0, 0, 1, 1]
    assert index.equal(VerticalSlash.from_keys(segments, 2, 1, diagonals.flip(0), columns.flip(0)))
    assert not index.equal(VerticalSlash.from_keys(segments, 2, 1, diagonals, columns[1:]))


def test_heads_of_a_pattern_share_it() -> None:
    sequence = _sequence([300])
    index = random_index(sequence, 2, 2, columns=5, diagonals=3)
    tokens = torch.arange(sequence.layout.blocks * 64)
    assert torch.equal(mask(index, 0, tokens, tokens), mask(index, 1, tokens, tokens))
    assert not torch.equal(mask(index, 1, tokens, tokens), mask(index, 2, tokens, tokens))


@given(lengths_strategy, st.integers(0, 1000), st.integers(0, 6), st.integers(0, 6))
@settings(max_examples=15, deadline=None)
def test_block_lists_mean_what_they_say(lengths: list[int], seed: int, low: int, size: int) -> None:
    sequence = _sequence(lengths, ranks=2)
    index = random_block_lists(sequence, 2, 2, share=0.3, seed=seed)
    blocks = sequence.layout.blocks
    visible = dense_mask(index, 4, blocks * 64)
    for pattern in range(2):
        for q_block in range(blocks):
            row = pattern * blocks + q_block
            listed = index.block_values[index.block_ptr[row] : index.block_ptr[row + 1]].tolist()
            seen = visible[2 * pattern, q_block * 64 + 63].unflatten(0, (-1, 64))
            assert seen.all(1).nonzero().flatten().tolist() == listed
            assert seen.any(1).sum() == len(listed)
    per_block = visible[::2].unflatten(1, (-1, 64)).sum(2)
    high = max(low, min(low + size, blocks))
    assert torch.equal(cost(index, torch.arange(blocks)), per_block.sum(-1))
    assert torch.equal(cost(index, torch.arange(blocks), (low, high)), per_block[..., low * 64 : high * 64].sum(-1))


def test_block_lists_of_the_future_or_another_document_are_refused() -> None:
    segments = make_segments([128, 128], 4, None)
    for row, key in ((1, 2), (2, 1)):
        with pytest.raises(SparseRingError, match=f"query block {row} cannot read key block {key}"):
            BlockLists.from_keys(segments, 1, 1, torch.tensor([[row, key]]))
