"""The benchmarks: patterns are what they are called, counts equal the index's own, every contender computes its mask."""

from __future__ import annotations

import pytest
import torch

from ds_sparse_ring.bench.contenders import Flex, Problem, index_mask
from ds_sparse_ring.bench.counts import active_pairs, tile_maps, tile_pairs
from ds_sparse_ring.bench.patterns import CLUSTER_WIDTHS, head_densities, pattern
from ds_sparse_ring.bench.recorded import RecordedIndex, record_index
from ds_sparse_ring.config import PriceSelector, SparseRingConfig
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash, cost, density

KINDS = ["band", "clustered", "isolated", "columns"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared", [1, 2])
def test_patterns_have_the_density_that_was_asked_for_in_the_mean_and_spread_it(kind, shared: int) -> None:
    segments = make_segments([256 * 64], 256, 64 * 64)
    index = pattern(kind, segments, 16, density=0.15, heads_per_pattern=shared)
    by_head = density(index)
    assert by_head.mean() == pytest.approx(0.15, rel=0.1)
    assert by_head.max() / by_head.min() > 20  # 100 but for the forced diagonals
    assert index.equal(pattern(kind, segments, 16, density=0.15, heads_per_pattern=shared))
    assert (index.column_values.numel() == 0) == (kind == "band")


def test_a_band_is_contiguous_and_clusters_have_neighbours() -> None:
    segments = make_segments([256 * 64], 256, None)
    band = pattern("band", segments, 2, density=0.2, spread=1)
    assert band.diagonals(0, 0).diff().unique().tolist() == [1]
    clustered, isolated = (
        pattern(kind, segments, 2, density=0.1, spread=1, column_share=0.0).diagonals(0, 0)[2:]
        for kind in ("clustered", "isolated")
    )
    runs = [int((x.diff() > 1).sum()) + 1 for x in (clustered, isolated)]
    assert clustered.numel() / runs[0] > sum(CLUSTER_WIDTHS) / 4 > isolated.numel() / runs[1]


def test_head_densities_are_geometric_clipped_and_shuffled() -> None:
    values = head_densities(16, 0.05, spread=100)
    assert sum(values) / 16 == pytest.approx(0.05)
    assert max(values) / min(values) == pytest.approx(100)
    assert values != sorted(values) and values == head_densities(16, 0.05, spread=100)
    clipped = head_densities(16, 0.4, spread=100, at_least=0.02)
    assert max(clipped) == 1 and min(clipped) >= 0.02 and sum(clipped) / 16 == pytest.approx(0.4)
    for mean, spread in ((1.1, 1), (0.01, 1), (0.5, 0.5)):
        with pytest.raises(SparseRingError, match="not below the forced diagonals, which cover 0.0200"):
            head_densities(4, mean, spread=spread, at_least=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_counts_equal_those_of_the_index(kind) -> None:
    index = pattern(kind, make_segments([1024], 16, 512), 4, density=0.4, heads_per_pattern=2)
    assert active_pairs(index) == cost(index, torch.arange(16)).sum() * 2
    problem = _problem(index)
    visible = torch.stack([index_mask(problem, head) for head in (0, 2)])
    for size in (64, 128):
        n = 1024 // size
        tiles = visible.view(2, n, size, n, size).permute(0, 1, 3, 2, 4).flatten(3)
        whole, partly = tile_maps(index, size)
        assert torch.equal(whole, tiles.all(-1)) and torch.equal(partly, tiles.any(-1) & ~tiles.all(-1))
    assert tile_pairs(index) >= active_pairs(index)


@pytest.mark.parametrize("size", [64, 128])
def test_flex_attention_gets_the_mask_of_the_index(size: int) -> None:
    problem = _problem(pattern("clustered", make_segments([512], 8, 256), 4, density=0.5, heads_per_pattern=2))
    flex = Flex(size, problem)
    tokens = torch.arange(512)
    masks = torch.stack([flex.block_mask.mask_mod(tokens[:0], torch.tensor(h), tokens[:, None], tokens[None]) for h in range(4)])
    listed = flex.block_mask.to_dense()[0].bool().repeat_interleave(size, 1).repeat_interleave(size, 2)
    expected = torch.stack([index_mask(problem, head) for head in range(4)])
    assert torch.equal(masks & listed, expected)


def test_a_recorded_index_survives_its_file_and_keeps_its_shape(tmp_path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(4, 512, 16, generator=generator), torch.randn(2, 512, 16, generator=generator)
    config = SparseRingConfig(selector=PriceSelector(price=4e-3), segment_tokens=256, backend="torch")
    recorded = record_index(q, k, config, "random numbers")
    recorded.save(tmp_path / "index.pt")
    again = RecordedIndex.load(tmp_path / "index.pt")
    assert again.index.equal(recorded.index)
    assert (again.heads, again.kv_heads, again.head_size, again.source) == (4, 2, 16, "random numbers")
    torch.save({"q": q}, tmp_path / "other.pt")
    with pytest.raises(SparseRingError, match="no recorded index"):
        RecordedIndex.load(tmp_path / "other.pt")
    with pytest.raises(SparseRingError, match="keeps everything"):
        record_index(q, k, SparseRingConfig(selector={"kind": "full"}, backend="torch"), "")


def _problem(index: VerticalSlash) -> Problem:
    generator = torch.Generator().manual_seed(0)
    heads, tokens = index.patterns * index.heads_per_pattern, index.segments[-1].end * 64
    q, do = (torch.randn(heads, tokens, 16, generator=generator) for _ in range(2))
    k, v = (torch.randn(heads // 2, tokens, 16, generator=generator) for _ in range(2))
    return Problem(q, k, v, do, index, 0.25)
