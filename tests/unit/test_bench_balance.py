"""What layouts make of a sparse index is counted as attention counts it."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from ds_sparse_ring.bench.balance import balance, block_pairs, hop_pairs
from ds_sparse_ring.bench.patterns import pattern
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import VerticalSlash, span_pairs
from ds_sparse_ring.layout import Layout, LayoutKind


@pytest.fixture(scope="module")
def index() -> VerticalSlash:
    return pattern("clustered", make_segments([16384], 256, 4096), 4, density=0.1)


@pytest.mark.parametrize("kind", get_args(LayoutKind))
def test_pairs_of_a_rank_are_those_of_its_spans(index: VerticalSlash, kind: LayoutKind) -> None:
    pairs = [block_pairs(index, segment) for segment in range(len(index.segments))]
    hops, layout = hop_pairs(index, pairs, kind, 4), Layout.for_blocks(kind, 4, 256)
    for rank in range(4):
        of_spans = sum(int(span_pairs(index, span.map, span.blocks).sum()) for span in layout.spans(rank))
        assert hops[rank].sum() == of_spans
    alone = hop_pairs(index, pairs, kind, 1)
    assert hops.sum() == pytest.approx(alone.sum())


def test_zigzag_ranks_are_even_and_their_hops_are_not(index: VerticalSlash) -> None:
    pairs = [block_pairs(index, segment) for segment in range(len(index.segments))]
    striped, zigzag, contiguous = (balance(hop_pairs(index, pairs, kind, 8)) for kind in ("striped", "zigzag", "contiguous"))
    assert striped[0] < 1.05 and striped[2] < 1.05
    assert zigzag[0] < 1.1 and zigzag[2] > striped[2] + 0.05
    assert contiguous[0] > 1.5


def test_hop_t_has_the_keys_of_the_rank_t_before() -> None:
    """Own keys alone: one diagonal, at 0."""
    segments = make_segments([64 * 8], 8, None)
    index = VerticalSlash.from_keys(segments, 1, 1, torch.tensor([[0, 0]]), torch.empty(0, 2, dtype=torch.int64))
    hops = hop_pairs(index, [block_pairs(index, 0)], "striped", 4)
    assert (hops[:, 0] == 2 * 64 * 65 / 2).all() and not hops[:, 1:].any()
