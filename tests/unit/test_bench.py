"""The benchmarks: patterns are what they are called, counts equal the index's own, every contender computes its mask."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from ds_sparse_ring.bench.contenders import FlashSparse, Flex, Problem, index_mask
from ds_sparse_ring.bench.counts import active_pairs, tile_maps, tile_pairs
from ds_sparse_ring.bench.patterns import CLUSTER_WIDTHS, head_densities, pattern
from ds_sparse_ring.bench.recorded import RecordedIndex, record_index
from ds_sparse_ring.cli import app
from ds_sparse_ring.config import PriceSelector, SparseRingConfig
from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.index import VerticalSlash, cost, density
from ds_sparse_ring.kernels.dense_backends import FlashAttention4

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


def test_flex_attention_gets_the_mask_of_the_index() -> None:
    problem = _problem(pattern("clustered", make_segments([512], 8, 256), 4, density=0.5, heads_per_pattern=2))
    flex = Flex(problem)
    tokens = torch.arange(512)
    masks = torch.stack([flex.block_mask.mask_mod(tokens[:0], torch.tensor(h), tokens[:, None], tokens[None]) for h in range(4)])
    listed = flex.block_mask.to_dense()[0].bool().repeat_interleave(flex.size, 1).repeat_interleave(flex.size, 2)
    expected = torch.stack([index_mask(problem, head) for head in range(4)])
    assert torch.equal(masks & listed, expected)


def test_lists_of_tiles_name_every_tile_in_both_directions(monkeypatch) -> None:
    monkeypatch.setattr(FlashAttention4, "refusal", lambda self, case: None)
    problem = _problem(pattern("clustered", make_segments([1024], 16, 512), 4, density=0.4))
    peer = FlashSparse(problem)
    tiles = torch.stack([peer.visible(head)[127::128, ::128] for head in range(4)])
    for lists, expected in zip(peer.lists, (tiles, tiles.mT), strict=True):
        partly, whole = _tiles_of(lists[0], lists[1], 8), _tiles_of(lists[2], lists[3], 8)
        assert torch.equal(partly | whole, expected) and not (partly & whole).any()
        assert torch.equal(partly, torch.eye(8, dtype=torch.bool).expand(4, 8, 8)), "only the diagonal needs the causal mask"
    for head in range(4):
        assert (peer.visible(head) | ~index_mask(problem, head)).all()
    assert peer.executed_pairs == tiles.sum() * 128 * 128


def _tiles_of(counts: torch.Tensor, lists: torch.Tensor, columns: int) -> torch.Tensor:
    out = torch.zeros(*counts.shape[1:], columns, dtype=torch.bool)
    for head in range(counts.shape[1]):
        for row in range(counts.shape[2]):
            named = lists[0, head, row, : counts[0, head, row]]
            assert (named.diff() > 0).all(), "ascending"
            out[head, row, named.long()] = True
    return out


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


def test_the_kernel_benchmark_says_what_it_measured_and_why_it_did_not(tmp_path) -> None:
    output = tmp_path / "kernel.json"
    recorded = RecordedIndex(pattern("columns", make_segments([512], 8, 256), 2, density=0.5), 1, 16, "a test")
    recorded.save(tmp_path / "index.pt")
    options = (
        f"bench kernel --tokens 512,1K --density 50,1 --patterns clustered --heads 4 --kv-heads 2 --head-size 16 --dtype fp32 "
        f"--backends torch,none --peers flex-128,fa4-128 --rounds 1 --check-tokens 512 --check-density 50 --device cpu "
        f"--output {output} --index {tmp_path / 'index.pt'}"
    )
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    content = json.loads(output.read_text())
    assert content["device"] in result.output and set(content["versions"]) == {"ds_sparse_ring", "torch", "python", "cuda"}
    lines = {(x["tokens"], x["kind"], x["name"]): x for x in content["speeds"] if x["name"] != "all"}
    assert {key[1] for key in lines} == {"clustered", "a test (2:1 heads of 16)"}
    for tokens in (512, 1024):
        ours, dense = lines[tokens, "clustered", "torch"], lines[tokens, "clustered", "torch-cpu"]
        assert ours["forward"]["fastest_s"] <= ours["forward"]["median_s"] <= ours["forward"]["slowest_s"]
        assert dense["pairs"] == 4 * tokens * (tokens + 1) / 2 and ours["pairs"] < ours["executed_pairs"]
        assert set(ours["apart"]) == {"gather columns", "row sums of do * o", "return columns"}
        assert "unknown backend 'none'" in lines[tokens, "clustered", "none"]["why_not"]
        assert lines[tokens, "clustered", "fa4-128"]["why_not"] == "not installed"
    assert [x["why_not"][:8] for x in content["speeds"] if x["name"] == "all"] == ["pattern:"] * 2  # 1 % is not to be had
    (errors,) = (x["errors"] for x in content["errors"] if x["name"] == "torch" and x["kind"] == "clustered")
    assert all(own <= 2 * in_torch for own, in_torch in errors.values()) and set(errors) == {"o", "dq", "dk", "dv"}
    assert "| 512 | clustered |" in result.output and (tmp_path / "kernel.png").stat().st_size > 0


def test_cases_after_the_time_is_up_are_listed_as_not_run(tmp_path) -> None:
    output = tmp_path / "kernel.json"
    options = f"bench kernel --tokens 64K --budget-seconds -1 --device cpu --backends torch --output {output}"
    result = CliRunner().invoke(app, options.split())
    assert result.exit_code == 0, result.output
    content = json.loads(output.read_text())
    assert len(content["speeds"]) == 12 and len(content["errors"]) == 3
    assert {x["why_not"] for x in content["speeds"] + content["errors"]} == {"not run: the time was up"}
    wrong = CliRunner().invoke(app, ["bench", "kernel", "--device", "cpu", "--peers", "nobody"])
    assert wrong.exit_code == 1 and "unknown peer 'nobody'" in wrong.output


@pytest.mark.parametrize(("benchmark", "device"), [("kernel", ""), ("index", ""), ("layer", ""), ("kernel", "cuda:1")])
def test_benchmarks_of_a_gpu_do_not_start_on_the_cpu_unasked(
    benchmark: str, device: str, monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    output = tmp_path / "bench.json"
    options = ["--rounds", "1", *(["--device", device] if device else []), "--output", str(output)]
    result = CliRunner().invoke(app, ["bench", benchmark, *options])
    assert result.exit_code == 1 and not output.exists()
    assert f"bench {benchmark}: there is no GPU here" in result.output and "give --device cpu" in result.output


def test_lengths_are_read_by_the_cpu_benchmark_as_by_plan() -> None:
    for tokens, message in (("2K", "unknown backend 'nobody'"), ("many", "'many' is no number of tokens")):
        options = f"bench cpu --tokens {tokens} --backend nobody --threads {torch.get_num_threads()}"
        result = CliRunner().invoke(app, options.split())
        assert result.exit_code == 1 and message in result.output, result.output


def _problem(index: VerticalSlash) -> Problem:
    return Problem.random(index, index.patterns * index.heads_per_pattern // 2, 16, torch.float32, torch.device("cpu"))
