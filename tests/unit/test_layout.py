"""Layouts are exact permutations for any length and any number of ranks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.layout import BLOCK, BlockMap, Layout, LayoutKind

layouts = st.builds(
    lambda kind, groups, size, blocks: Layout.for_blocks(kind, groups * size, blocks, size),
    st.sampled_from(["striped", "contiguous", "zigzag"]),
    st.integers(1, 17),
    st.sampled_from([1, 1, 2, 3, 4]),
    st.integers(1, 120),
)


@given(layouts)
def test_ranks_hold_every_block_exactly_once(layout: Layout) -> None:
    held = torch.cat([layout.block_ids(rank) for rank in range(layout.ranks)])
    assert held.sort().values.tolist() == list(range(layout.blocks))


@given(st.sampled_from(["striped", "contiguous", "zigzag"]), st.integers(1, 17), st.integers(1, 120))
def test_padding_is_as_small_as_equal_shards_allow(kind: LayoutKind, ranks: int, blocks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, blocks)
    unit = 2 * ranks if kind == "zigzag" else ranks
    assert blocks <= layout.blocks < blocks + unit


@given(layouts, st.integers(0, 1))
def test_unshard_inverts_shard(layout: Layout, dim: int) -> None:
    x = torch.arange(layout.blocks * BLOCK)
    x = x[:, None].expand(-1, 2) if dim == 0 else x[None].expand(2, -1)
    parts = [layout.shard(x, rank, dim) for rank in range(layout.ranks)]
    assert all(part.shape[dim] == layout.local_tokens for part in parts)
    assert torch.equal(layout.unshard(parts, dim), x)


@given(layouts)
def test_the_shards_of_a_group_one_after_the_other_are_a_shard_of_the_layout_over_groups(layout: Layout) -> None:
    whole, size = layout.over_groups(), layout.group
    for place in range(whole.ranks):
        parts = [layout.token_ids(rank) for rank in range(place * size, (place + 1) * size)]
        assert torch.equal(torch.cat(parts), whole.token_ids(place))


@given(st.sampled_from(["striped", "contiguous", "zigzag"]), st.integers(1, 8), st.integers(1, 40))
def test_one_group_of_all_ranks_has_contiguous_shards(kind: LayoutKind, ranks: int, blocks: int) -> None:
    layout = Layout.for_blocks(kind, ranks, blocks, ranks)
    held = torch.cat([layout.token_ids(rank) for rank in range(ranks)])
    assert torch.equal(held, torch.arange(layout.blocks * BLOCK))


@given(layouts, st.data())
def test_locate_finds_what_the_rank_holds_and_nothing_else(layout: Layout, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, layout.ranks - 1))
    tokens = torch.arange(layout.blocks * BLOCK)
    row, held = layout.locate(tokens, rank)
    assert torch.equal(layout.token_ids(rank)[row[held]], tokens[held])
    assert int(held.sum()) == layout.local_tokens
    assert torch.equal(layout.shard_rows(tokens[held]), rank * layout.local_tokens + row[held])


@given(st.integers(1, 9), st.integers(-20, 20), st.integers(1, 30), st.integers(-30, 200), st.integers(0, 60))
def test_local_range_is_what_a_search_finds(stride: int, start: int, blocks: int, begin: int, size: int) -> None:
    block_map = BlockMap(stride, start)
    found = [i for i in range(blocks) if begin <= stride * i + start < begin + size]
    assert list(block_map.local_range(begin, begin + size, blocks)) == found


@given(st.integers(1, 9), st.integers(-20, 20), st.integers(1, 30))
def test_to_local_inverts_to_global(stride: int, start: int, blocks: int) -> None:
    block_map = BlockMap(stride, start)
    every = torch.arange(start - 5, start + stride * blocks + 5)
    local, present = block_map.to_local(every, blocks)
    assert torch.equal(block_map.to_global(local[present]), every[present])
    assert int(present.sum()) == blocks


@given(st.integers(1, 8), st.integers(1, 40))
def test_a_pair_of_striped_ranks_meets_one_residue_of_offsets(ranks: int, blocks: int) -> None:
    layout = Layout.for_blocks("striped", ranks, blocks)
    for r in range(ranks):
        for s in range(ranks):
            offsets = layout.block_ids(r)[:, None] - layout.block_ids(s)[None, :]
            assert ((offsets - (r - s)) % ranks == 0).all()


@given(layouts)
def test_spans_agree_with_block_ids(layout: Layout) -> None:
    for rank in range(layout.ranks):
        ids = layout.block_ids(rank)
        for span in layout.spans(rank):
            part = ids[span.local_begin : span.local_begin + span.blocks]
            assert (int(part[0]), int(part[-1])) == (span.first, span.last)


def test_a_tensor_of_another_length_is_refused() -> None:
    with pytest.raises(SparseRingError, match="pad the sequence first"):
        Layout.for_blocks("striped", 2, 4).shard(torch.zeros(100), 0)


@pytest.mark.parametrize(("kind", "ranks", "blocks"), [("striped", 0, 1), ("striped", 1, 0), ("spiral", 1, 1)])
def test_impossible_layouts_are_refused(kind: LayoutKind, ranks: int, blocks: int) -> None:
    with pytest.raises(SparseRingError, match="layout"):
        Layout.for_blocks(kind, ranks, blocks)


def test_groups_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(SparseRingError, match="groups of 4 ranks do not divide 6"):
        Layout.for_blocks("striped", 6, 10, 4)
