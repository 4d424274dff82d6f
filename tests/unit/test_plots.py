"""Pictures are drawn from numbers that agree with the index's own definition."""

from __future__ import annotations

from pathlib import Path

import matplotlib.image
import pytest
import torch

from ds_sparse_ring.documents import make_segments
from ds_sparse_ring.index import FullIndex, VerticalSlash, density, mask
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.plots import head_map, save_training_report

TOKENS = 6 * BLOCK
SCALE = 0.25


def sparse_index() -> VerticalSlash:
    """Two segments, two patterns of two heads; diagonals and columns differ in each row."""
    segments = make_segments([TOKENS], TOKENS // BLOCK, 3 * BLOCK)
    rows = torch.arange(4)
    forced = torch.stack([rows, torch.zeros_like(rows)], 1)
    diagonals = torch.cat([forced, torch.tensor([[2, 1], [3, 4], [1, 2]])])
    columns = torch.tensor([[0, 0], [2, 5], [2, 130], [3, 64], [3, 65], [3, 200]])
    return VerticalSlash.from_keys(segments, 2, 2, diagonals, columns)


def queries_and_keys() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, TOKENS, 16, generator=generator)
    return q, k


@pytest.mark.parametrize("head", [1, 2])
@pytest.mark.parametrize("cell_tokens", [16, 32])
def test_head_map_agrees_with_the_mask_of_the_index(head: int, cell_tokens: int) -> None:
    index = sparse_index()
    q, k = queries_and_keys()
    shown = head_map(q, k, index, head=head, scale=SCALE, title="", cell_tokens=cell_tokens)
    tokens = torch.arange(TOKENS)
    causal = tokens[None] <= tokens[:, None]
    active = mask(index, head, tokens, tokens)
    p = (q @ k.T * SCALE).masked_fill(~causal, float("-inf")).softmax(-1)
    cells = TOKENS // cell_tokens

    def pooled(x: torch.Tensor) -> torch.Tensor:
        return x.view(cells, cell_tokens, cells, cell_tokens).sum((1, 3))

    torch.testing.assert_close(shown.diagonals + shown.columns, pooled(active) / cell_tokens**2)
    torch.testing.assert_close(shown.attention, pooled(p) / cell_tokens)
    assert shown.kept == pytest.approx(float((p * active).sum() / TOKENS), rel=1e-5)
    assert shown.density == pytest.approx(float(active.sum() / causal.sum()))
    assert shown.density == pytest.approx(float(density(index)[head // 2]))


def test_full_index_keeps_everything() -> None:
    q, k = queries_and_keys()
    segments = make_segments([TOKENS], TOKENS // BLOCK, None)
    shown = head_map(q, k, FullIndex(segments, 4), head=3, scale=SCALE, title="")
    assert shown.kept == pytest.approx(1, abs=1e-5) and shown.density == 1
    assert not shown.columns.any()
    assert torch.equal(shown.diagonals > 0, torch.ones_like(shown.diagonals).tril() > 0)


def metrics_lines(layers: int) -> list[dict]:
    lines: list[dict] = [{"event": "start", "step": 0}]
    for step in (5, 10, 15):
        per_layer = [{"layer": i, "density": 1 / step, "recall": 1 - i / 50} for i in range(layers)]
        lines.append({"step": step, "loss": 7 - step / 10, "per_layer": per_layer})
    return [*lines, {"event": "evaluation", "step": 15, "loss": 5.6}, {"event": "saved", "path": "x"}]


@pytest.mark.parametrize("layers", [0, 1, 30])
@pytest.mark.parametrize("with_map", [False, True])
def test_report_is_a_picture_with_and_without_a_map(tmp_path: Path, layers: int, with_map: bool) -> None:
    q, k = queries_and_keys()
    head = head_map(q, k, sparse_index(), head=0, scale=SCALE, title="layer 0, head 0") if with_map else None
    save_training_report(tmp_path / "run.png", metrics_lines(layers), head, dense_warmup_steps=5)
    image = matplotlib.image.imread(tmp_path / "run.png")
    assert image.shape[0] > (1000 if with_map else 400) and image.shape[1] > 1000
    assert image[..., :3].std() > 0.02  # not a blank page
