"""A recorded attention map agrees with dense probabilities and with the mask of the index, on rings too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ds_sparse_ring.config import MapsConfig
from ds_sparse_ring.index import FullIndex, Index, density, mask
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.meter import Meter
from ds_sparse_ring.select.maps import CELLS, attention_map
from tests.common import DistributedTest

from .reference import bound, global_qkv, random_index

SCALE = 0.5


def check_map(lengths: list[int], *, dense: bool = False, **config: Any) -> None:
    _, sequence, context = bound(lengths, segment_tokens=192, heads_per_pattern=2, **config)
    q, k, _ = global_qkv(sequence, 6, 3, 16)
    index: Index = random_index(sequence, 3, 2, columns=40, diagonals=4)
    index = FullIndex(sequence.segments, 3, 2) if dense else index
    q_shard, k_shard = (sequence.layout.shard(x, sequence.rank, 1) for x in (q, k))
    shown = attention_map(q_shard, k_shard, index, context, head=3, scale=SCALE)
    tokens, rows = q.shape[1], shown.rows
    assert shown.tokens == tokens and rows.numel() == CELLS
    every = torch.arange(tokens)
    read = mask(index, 3, rows, every)
    causal = mask(FullIndex(sequence.segments, 6), 3, rows, every)
    p = ((q[3][rows] @ k[1].T) * SCALE).masked_fill(~causal, float("-inf")).softmax(-1)
    unit = BLOCK if tokens // BLOCK >= CELLS else 8
    cell = torch.arange(tokens) // unit * CELLS // (tokens // unit)

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(rows.numel(), CELLS, dtype=torch.float64).index_add_(1, cell, x.double())

    expected = torch.stack([pooled(p), pooled(p * read)])
    torch.testing.assert_close(shown.pooled[:2].cpu().double(), expected, rtol=1e-5, atol=1e-6)
    share = pooled(read) / pooled(torch.ones_like(read))
    torch.testing.assert_close(shown.pooled[2:].sum(0).cpu().double(), share, rtol=1e-5, atol=1e-6)
    assert dense or bool((shown.pooled[3] > 0).any()), "some are columns"
    assert not dense or bool((shown.pooled[3] == 0).all())
    assert float(shown.density) == pytest.approx(float(density(index)[1]))


@pytest.mark.parametrize("lengths", [[900], [300, 70, 500], [64 * CELLS + 50]])
def test_a_map_is_the_pooled_probability_and_what_the_mask_reads_of_it(lengths: list[int]) -> None:
    check_map(lengths)


def test_the_full_index_has_a_map_too() -> None:
    check_map([900], dense=True)


class TestOnARing(DistributedTest):
    world_size = 3

    def test_every_rank_has_the_whole_map(self) -> None:
        check_map([900])


def test_maps_are_due_in_every_nth_report_once_for_each_layer() -> None:
    _, _, context = bound([100])
    meter = Meter(context.axes, MapsConfig(every=2))
    meter.model_layers = 5
    due = [layer for layer in range(5) if meter.maps_due(layer, 8)]
    assert due == [0, 2, 4] and meter.maps_due(4, 8) == [0, 4] and meter.maps_due(4, 1) == [0]
    meter.record_map(4, object())  # type: ignore[arg-type]
    assert meter.maps_due(4, 8) == [], "the second micro-batch"
    assert list(meter.pop_maps()) == [4] and meter.pop_maps() == {}
    ones = torch.ones(1, dtype=torch.float64)
    for wanted in ([], [0, 4], []):
        meter.record(0, ones, ones, ones, 1.0)
        meter.pop()
        assert meter.maps_due(4, 8) == wanted
    assert Meter(context.axes).maps_due(0, 8) == []
    chosen = Meter(context.axes, MapsConfig(layers=[3], heads=[7, 1]))
    assert chosen.maps_due(3, 8) == [1, 7] and chosen.maps_due(0, 8) == []
