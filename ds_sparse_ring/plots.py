"""Pictures of a run: loss, density and recall per layer, what an index keeps of one head's attention, a simulated timeline.

Everything is drawn from plain data (lines of metrics.jsonl, tensors on the CPU), off screen.

Shapes: S tokens of one document, D head size, c cells per side of a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

from ds_sparse_ring.index import Index, segment_of_blocks
from ds_sparse_ring.layout import BLOCK
from ds_sparse_ring.simulate import Event

DIAGONAL_COLOR, COLUMN_COLOR = "#1f77b4", "#d95f02"
_TINT = 0.7
"""Opacity of a cell of which every entry is kept."""
_DARKEST = 0.02
"""Share of the cells that are fully dark; greys are the log of probability over the row's uniform share."""


@dataclass(frozen=True)
class HeadMap:
    """One head's dense attention and the entries that an index keeps, pooled to cells.

    Attributes:
        title: what is shown. tokens: S.
        attention: ``[c, c]``, probability per cell (mean over its query rows of the sum over its keys).
        diagonals, columns: ``[c, c]``, share of a cell's entries that the index keeps on a block diagonal or by a column.
        kept: share of the probability on kept entries, mean over all query rows. density: kept share of the triangle.
    """

    title: str
    tokens: int
    attention: Tensor
    diagonals: Tensor
    columns: Tensor
    kept: float
    density: float


def head_map(q: Tensor, k: Tensor, index: Index, *, head: int, scale: float, title: str, cell_tokens: int = 8) -> HeadMap:
    """Attention of one query head over a single document and the entries that ``index`` keeps of it.

    Args:
        q, k: ``[S, D]`` queries and keys after RoPE in stream order; S a multiple of ``cell_tokens``,
            which divides BLOCK.
        head: the query head, for its pattern in the index.
        scale: multiplies q.k before the softmax.
    """
    tokens = q.shape[0]
    cells = tokens // cell_tokens
    keys = torch.arange(tokens)
    pattern = head // index.heads_per_pattern
    attention = torch.zeros(cells, cells)
    pooled = torch.zeros(2, cells, cells)
    kept, active = 0.0, 0.0
    for cell in range(cells):
        rows = torch.arange(cell * cell_tokens, (cell + 1) * cell_tokens)
        future = keys[None] > rows[:, None]
        p = ((q[rows] @ k.T) * scale).masked_fill(future, float("-inf")).softmax(-1)
        segment = int(segment_of_blocks(index.segments, rows[:1] // BLOCK))
        offset = rows[:, None] // BLOCK - keys[None] // BLOCK
        blocks, counts = index.key_blocks(segment, pattern, rows[:1] // BLOCK)
        on_diagonal = torch.isin(keys // BLOCK, blocks[counts])[None] & ~future
        on_column = torch.isin(keys, index.columns(segment, pattern))[None] & (offset > 0) & ~on_diagonal
        attention[cell] = p.mean(0).view(cells, cell_tokens).sum(1)
        pooled[0, cell] = on_diagonal.float().mean(0).view(cells, cell_tokens).mean(1)
        pooled[1, cell] = on_column.float().mean(0).view(cells, cell_tokens).mean(1)
        kept += float((p * (on_diagonal | on_column)).sum())
        active += float((on_diagonal | on_column).sum())
    triangle = tokens * (tokens + 1) / 2
    return HeadMap(title, tokens, attention, pooled[0], pooled[1], kept / tokens, active / triangle)


def save_training_report(
    path: str | Path, metrics: Sequence[Mapping[str, Any]], head: HeadMap | None, *, dense_warmup_steps: int = 0
) -> None:
    """Draw a run into a PNG.

    Args:
        metrics: the lines of metrics.jsonl (training lines have ``loss`` and ``per_layer``, evaluations an ``event``).
        head: a map to show below, if there is one.
        dense_warmup_steps: steps with the full index, shaded.
    """
    figure = Figure(figsize=(15, 11.5 if head else 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    top = figure.add_gridspec(2, 6, height_ratios=(1, 1.75)) if head else figure.add_gridspec(1, 6)
    training = [line for line in metrics if "loss" in line and "event" not in line]
    loss, density, recall = (figure.add_subplot(top[0, 2 * i : 2 * i + 2]) for i in range(3))
    plot_loss(loss, training, [line for line in metrics if line.get("event") == "evaluation"])
    plot_per_layer(density, training, "density", "Density: active share of the causal triangle")
    plot_per_layer(recall, training, "recall", "Recall: attention mass kept (last queries of segments)")
    for axes in (loss, density, recall):
        _shade_warmup(axes, dense_warmup_steps)
    if head:
        plot_attention(figure.add_subplot(top[1, :3]), head, with_index=False)
        plot_attention(figure.add_subplot(top[1, 3:]), head, with_index=True)
    figure.savefig(str(path), dpi=110)


def plot_loss(axes: Axes, training: Sequence[Mapping[str, Any]], evaluations: Sequence[Mapping[str, Any]]) -> None:
    """Training loss over steps, evaluations as points; nats per token."""
    axes.plot([line["step"] for line in training], [line["loss"] for line in training], color="black", label="training")
    if evaluations:
        steps, losses = zip(*((line["step"], line["loss"]) for line in evaluations), strict=True)
        axes.plot(steps, losses, "o", color=COLUMN_COLOR, label=f"evaluation: {losses[-1]:.2f}")
    axes.set(title="Loss (nats per token)", xlabel="optimizer step")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)


def plot_per_layer(axes: Axes, training: Sequence[Mapping[str, Any]], key: str, title: str) -> None:
    """One line per layer of a metric between 0 and 1, from shallow (light) to deep (dark)."""
    series: dict[int, tuple[list[int], list[float]]] = {}
    for line in training:
        for entry in line.get("per_layer", []):
            steps, values = series.setdefault(entry["layer"], ([], []))
            steps.append(line["step"])
            values.append(entry[key])
    for rank, (layer, (steps, values)) in enumerate(sorted(series.items())):
        shade = 0.3 + 0.7 * (rank + 1) / len(series)
        # with many layers a legend of all of them would cover the lines
        named = len(series) <= 8 or rank in (0, len(series) - 1)
        axes.plot(steps, values, color=DIAGONAL_COLOR, alpha=shade, label=f"layer {layer}" if named else None)
    axes.set(title=title, xlabel="optimizer step", ylim=(0, 1.03))
    axes.grid(alpha=0.3)
    if series:
        axes.legend(frameon=False)


def plot_attention(axes: Axes, head: HeadMap, *, with_index: bool) -> None:
    """A head's attention in greys (log scale), with the cells that the index keeps tinted if ``with_index``."""
    image = _greys(head.attention)[..., None].expand(-1, -1, 3).clone()
    title = f"{head.title}: dense attention"
    if with_index:
        image = 1 - 0.65 * (1 - image)  # lighter, so that tints are seen on dark cells too
        for share, color in ((head.columns, COLUMN_COLOR), (head.diagonals, DIAGONAL_COLOR)):
            # a single column fills a fraction of a cell: strengthened, or it would not be seen
            strength = _TINT * share.sqrt()[..., None]
            image = image * (1 - strength) + torch.tensor(to_rgb(color)) * strength
        title = f"{head.title}: its index keeps {head.kept:.0%} of the mass in {head.density:.0%} of the triangle"
        patches = [
            Patch(color=DIAGONAL_COLOR, alpha=_TINT, label="block diagonals"),
            Patch(color=COLUMN_COLOR, alpha=_TINT, label="columns (the more in a cell, the darker)"),
        ]
        axes.legend(handles=patches, loc="upper right", frameon=False)
    extent = (0, head.tokens, head.tokens, 0)
    axes.imshow(image.numpy(), extent=extent, interpolation="nearest", aspect="equal")
    axes.set(title=title, xlabel="key token", ylabel="query token")


def _greys(attention: Tensor) -> Tensor:
    """1 is white. Each row is compared with its uniform share, so that late rows are as dark as early ones."""
    cells = attention.shape[0]
    uniform = 1 / torch.arange(1, cells + 1, dtype=attention.dtype)[:, None]
    past = torch.ones(cells, cells, dtype=torch.bool).tril()
    ratio = (attention / uniform).clamp(min=1e-6).log()
    dark = torch.quantile(ratio[past], 1 - _DARKEST)
    light = torch.quantile(ratio[past], 0.05)
    grey = 1 - 0.9 * ((ratio - light) / (dark - light).clamp(min=1e-6)).clamp(0, 1)
    return torch.where(past, grey, torch.ones_like(grey))


def _shade_warmup(axes: Axes, steps: int) -> None:
    if steps > 0:
        axes.axvspan(0, steps, color="0.9", zorder=0)
        axes.text(steps / 2, 0.02, "dense", transform=axes.get_xaxis_transform(), ha="center", color="0.4")


_LANE_COLORS = {"compute": "#1f77b4", "wait": "#d62728", "send inner": "#2ca02c", "send outer": "#ff7f0e", "load": "#9467bd"}


def save_timeline(events: Sequence[Event], path: Path, *, ranks: int = 8) -> None:
    """A picture of the first ``ranks`` ranks: what each computes, waits for and sends, over time."""
    figure = Figure(figsize=(10, 1 + 0.6 * ranks))
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = sorted({e.rank for e in events})[:ranks]
    for place, rank in enumerate(shown):
        for height, lanes in ((0.1, ("send outer",)), (0.25, ("send inner",)), (0.4, ("compute", "wait")), (0.83, ("load",))):
            for lane in lanes:
                bars = [(e.begin, e.end - e.begin) for e in events if e.rank == rank and e.lane == lane]
                size = 0.4 if lane in ("compute", "wait") else 0.12
                axes.broken_barh(bars, (place + height, size), facecolors=_LANE_COLORS[lane], edgecolor="white", linewidth=0.4)
    axes.set_yticks([place + 0.5 for place in range(len(shown))], [f"rank {rank}" for rank in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms (simulated)")
    axes.legend(
        handles=[Patch(color=color, label=lane) for lane, color in _LANE_COLORS.items()],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=len(_LANE_COLORS),
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)
