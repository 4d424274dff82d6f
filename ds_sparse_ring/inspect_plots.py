"""The pictures of ``ds-sparse-ring inspect``: SVG text for a page whose style sheet decides the colours.

matplotlib draws with marker colours that nobody would choose; in the text they become names of the page's style sheet, so one
picture serves light and dark pages. Text stays text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ds_sparse_ring.plots import HeadMap, plot_attention
from ds_sparse_ring.run_log import HeadMapData

INK, GRID, PAPER = "#010203", "#010204", "#01020a"
SERIES = ("#010205", "#010206", "#010207", "#010208", "#010209")
_STYLE_NAMES = {INK: "currentColor", GRID: "var(--grid)", PAPER: "var(--paper)"} | {
    mark: f"var(--series-{n})" for n, mark in enumerate(SERIES)
}
_SIZE = (4.6, 2.9)  # inches; all alike, so that a narrow page shows them in one column at a size that can be read
_MAP_SIZE = (3.9, 3.9)
_POINTS_SHOWN = 40
_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.titlesize": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
}

Lines = Sequence[Mapping[str, Any]]


def curves(
    name: str, series: Mapping[str, tuple[Lines, str]], *, label: str, points: Iterable[str] = (), top: float | None = None
) -> str:
    """Metrics over optimizer steps.

    Args:
        name: of the picture, for readers who do not see it. series: by the label of each, lines and the key in them.
        points: labels of series that are drawn as points. top: end of the axis, which then begins at 0.
    """

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        for color, (title, (lines, key)) in zip(SERIES, series.items(), strict=False):
            steps, values = _values(lines, key)
            if title in points:
                axes.plot(steps, values, "o", color=color, label=title, markersize=5)
            else:
                axes.plot(steps, values, color=color, label=title, marker=_marker(steps), markersize=3)
        _over_steps(axes, label)
        if top is not None:
            axes.set_ylim(0, top)
        if len(series) > 1:
            _legend_above(axes)

    return _svg(name, draw)


def shares_of_step(name: str, lines: Lines) -> str:
    """What a step's seconds went to, stacked."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        timed = [line for line in lines if "attention_s" in line and "step_s" in line]
        steps = [line["step"] for line in timed]
        parts = {
            "attention's kernels": [line["attention_s"] - line.get("exposed_s", 0.0) for line in timed],
            "exposed communication": [line.get("exposed_s", 0.0) for line in timed],
            "choosing the index": [line["index_s"] for line in timed],
        }
        parts["all else"] = [
            max(line["step_s"] - sum(values), 0.0) for line, values in zip(timed, zip(*parts.values(), strict=True), strict=True)
        ]
        if len(steps) == 1:  # an area needs two
            base = 0.0
            for color, (label, (value,)) in zip(SERIES, parts.items(), strict=False):
                axes.bar(steps, [value], 0.5, bottom=base, color=color, label=label)
                base += value
        elif steps:
            axes.stackplot(steps, *parts.values(), labels=list(parts), colors=SERIES[: len(parts)], alpha=0.85)
        axes.set_ylim(bottom=0)
        _over_steps(axes, "seconds of a step")
        _legend_above(axes)

    return _svg(name, draw)


def layers_over_steps(name: str, lines: Lines, key: str, *, logarithmic: bool) -> str:
    """A metric of every layer over steps, as a map."""
    measured = [line for line in lines if line.get("per_layer")]
    layers = [entry["layer"] for entry in measured[-1]["per_layer"]]
    steps = [line["step"] for line in measured]
    grid = np.full((len(layers), len(steps)), np.nan)
    for column, line in enumerate(measured):
        for entry in line["per_layer"]:
            if entry["layer"] in layers:
                grid[layers.index(entry["layer"]), column] = entry[key]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        low, high = max(float(np.nanmin(grid)), 1e-6), max(float(np.nanmax(grid)), 2e-6)
        if high - low < 1e-9:
            low = high / 1.01
        norm: Normalize = LogNorm(low, high) if logarithmic else Normalize(low, high)
        shown = axes.imshow(grid, aspect="auto", interpolation="nearest", norm=norm, cmap="viridis", origin="lower")
        places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 6)).round().astype(int))
        axes.set_xticks(places, [str(steps[place]) for place in places])
        axes.set(xlabel="optimizer step", ylabel="layer")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick < len(layers) and tick == int(tick)])
        axes.set_yticklabels([str(layers[int(tick)]) for tick in axes.get_yticks()])
        bar = figure.colorbar(shown, format="%.3g")
        if logarithmic:
            bar.ax.minorticks_off()
            bar.set_ticks([float(tick) for tick in np.geomspace(low, high, 4)])

    return _svg(name, draw)


def hop_timeline(name: str, line: Mapping[str, Any]) -> str:
    """Each hop's kernels and the wait for what arrives, one after the other: forward pass above, backward pass below."""

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        passes = line["per_hop"]
        for place, of_pass in enumerate(passes.values()):
            at = 0.0
            for hop, (compute_s, wait_s) in enumerate(zip(of_pass["compute_s"], of_pass["wait_s"], strict=True)):
                axes.broken_barh([(at, compute_s)], (place + 0.2, 0.6), facecolors=SERIES[0], edgecolor=GRID, linewidth=0.6)
                if len(of_pass["compute_s"]) <= 16:
                    axes.text(at + compute_s / 2, place + 0.5, str(hop), ha="center", va="center", fontsize=8, color=PAPER)
                axes.broken_barh(
                    [(at + compute_s, wait_s)], (place + 0.2, 0.6), facecolors=SERIES[1], edgecolor=GRID, linewidth=0.6
                )
                at += compute_s + wait_s
        axes.set_yticks([place + 0.5 for place in range(len(passes))], list(passes))
        axes.set_ylim(len(passes), 0)
        axes.set_xlim(left=0)
        axes.set_xlabel("seconds of a step, all layers; the number is the hop")
        handles = [
            axes.plot([], [], "s", color=color, label=label)[0]
            for color, label in zip(SERIES, ("kernels", "waiting"), strict=False)
        ]
        axes.legend(handles=handles, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)

    return _svg(name, draw)


def attention_picture(name: str, recorded: HeadMapData, *, with_index: bool) -> str:
    """A recorded map, with the keys that the index reads tinted if ``with_index``."""
    shown = _head_map(recorded)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        plot_attention(axes, shown, with_index=with_index)
        axes.set_title("with its index" if with_index else "attention")
        if with_index and (legend := axes.get_legend()) is not None:
            legend.remove()  # the page has one for all maps
        axes.xaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.yaxis.set_major_locator(MaxNLocator(nbins=4))
        axes.xaxis.set_major_formatter(lambda tokens, _: _tokens(tokens))
        axes.yaxis.set_major_formatter(lambda tokens, _: _tokens(tokens))

    return _svg(name, draw, _MAP_SIZE, css_class="map")


def kept_share(recorded: HeadMapData) -> float:
    """Attention mass on the keys that the index reads, mean over the map's rows."""
    return float(recorded.pooled[1].sum(-1).mean())


def _head_map(recorded: HeadMapData) -> HeadMap:
    """The map with as many rows as cells, by the nearest row, as the picture wants it."""
    pooled = torch.from_numpy(recorded.pooled)
    cells = pooled.shape[2]
    middles = (np.arange(cells) + 0.5) * recorded.tokens / cells
    nearest = np.abs(recorded.rows[None] - middles[:, None]).argmin(1)
    mass, _, diagonals, columns = pooled[:, nearest]
    return HeadMap("", round(recorded.tokens), mass, diagonals, columns, kept_share(recorded), recorded.density)


def _tokens(count: float) -> str:
    return f"{count / 1024:.0f}K" if count >= 8192 else f"{count:.0f}"


def _values(lines: Lines, key: str) -> tuple[list[int], list[float]]:
    found = [(line["step"], line[key]) for line in lines if line.get(key) is not None]
    return [step for step, _ in found], [value for _, value in found]


def _marker(steps: Sequence[int]) -> str:
    return "o" if len(steps) <= _POINTS_SHOWN else ""


def _legend_above(axes: Axes) -> None:
    """Where it covers nothing."""
    axes.legend(loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2, borderaxespad=0.2, columnspacing=1.2, handlelength=1.4)


def _over_steps(axes: Axes, label: str) -> None:
    axes.set(xlabel="optimizer step", ylabel=label)
    axes.grid(color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _svg(name: str, draw: Callable[[Figure], None], size: tuple[float, float] = _SIZE, css_class: str = "chart") -> str:
    """Draw off screen; ``name`` also keeps the ids of this picture apart from those of others on the page."""
    text = io.StringIO()
    style: Any = {**_STYLE, "svg.hashsalt": name}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure)
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    prefix = re.sub(r"\W+", "-", name)
    svg = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"""'DejaVu Sans'[^;"]*""", "system-ui, sans-serif", svg)
    for mark, style_name in _STYLE_NAMES.items():
        svg = svg.replace(mark, style_name)
    return svg.replace("<svg", f'<svg class="{css_class}" role="img" aria-label="{name}"', 1)
