"""Tables and a picture of what ``bench kernel`` measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from ds_sparse_ring.bench.accuracy import NAMES, ErrorLine
from ds_sparse_ring.bench.timing import Timing

FORWARD_FLOPS, BACKWARD_FLOPS = 4, 10
"""Floating-point operations per active entry and unit of head size."""
_SPEED_HEADER = (
    "| tokens | pattern | density | | forward ms | backward ms | apart ms | TFLOP/s | executed / active | GB/s | rate / dense "
    "| times dense | times peers |"
)


@dataclass(frozen=True)
class SpeedLine:
    """One contender on one case.

    Attributes:
        kind, density, tokens, shape: the case; density is that of the index (what was asked for, if there is no index).
        name: the contender.
        is_dense: whether it is the dense attention that the others are compared with. ours: a backend of this package.
        pairs: active (query, key) entries, for dense attention all causal ones; executed_pairs: in the tiles it works on.
        forward, backward: seconds. apart: medians of what belongs to the passes and was timed apart, seconds.
        minimal_bytes: traffic that forward and backward cannot avoid.
        recorded: an index recorded from a model. why_not: the reason if there is no measurement.
    """

    kind: str
    density: float
    tokens: int
    shape: Mapping[str, int]
    name: str
    is_dense: bool = False
    pairs: float = 0.0
    executed_pairs: float | None = None
    forward: Timing | None = None
    backward: Timing | None = None
    apart: Mapping[str, float] = field(default_factory=dict)
    minimal_bytes: tuple[float, float] | None = None
    ours: bool = False
    recorded: bool = False
    why_not: str | None = None

    @property
    def case(self) -> tuple[Any, ...]:
        """Lines with the same value were measured on the same tensors."""
        return self.tokens, self.kind, self.density

    def seconds(self) -> tuple[float, float]:
        """Medians of the forward and the backward pass."""
        assert self.forward is not None and self.backward is not None
        return self.forward.median_s, self.backward.median_s

    def teraflops(self) -> tuple[float, float]:
        """Active entries only: 10^12 operations per second, forward and backward."""
        forward, backward = self.seconds()
        work = self.pairs * self.shape["head_size"] / 1e12
        return FORWARD_FLOPS * work / forward, BACKWARD_FLOPS * work / backward


def tables(about: Mapping[str, Any], speeds: Sequence[SpeedLine], errors: Sequence[ErrorLine]) -> str:
    """What was measured, in Markdown."""
    lines = [", ".join(f"{key} {value}" for key, value in about.items()), "", _SPEED_HEADER, "|" + "---|" * 13]
    lines += [_speed_row(line, [x for x in speeds if x.case == line.case]) for line in speeds]
    lines += [
        "",
        "Medians (fastest to slowest round). TFLOP/s, GB/s, rates: forward / backward. Executed: entries in the tiles worked on. "
        "Rate / dense: active entries a second over dense attention's. Times dense: how many times faster both passes together "
        "are than dense attention, what is timed apart included. GB/s: of the traffic that cannot be avoided.",
    ]
    if errors:
        lines += ["", "| tokens | pattern | density | | " + " | ".join(NAMES) + " |", "|" + "---|" * 8]
        lines += [_error_row(line) for line in errors]
        lines += ["", "Root mean square error against float64, and how many times that of PyTorch in the same dtype it is."]
    return "\n".join(lines)


def _speed_row(line: SpeedLine, together: Sequence[SpeedLine]) -> str:
    start = f"| {line.tokens} | {line.kind} | {100 * line.density:.1f} % | {line.name} | "
    if line.forward is None or line.backward is None:
        return f"{start}{line.why_not} |" + " |" * 8
    forward, backward = line.seconds()
    cells = [
        _milliseconds(line.forward),
        _milliseconds(line.backward),
        f"{1e3 * sum(line.apart.values()):.3g}" if line.apart else "",
        "{:.3g} / {:.3g}".format(*line.teraflops()),
        f"{line.executed_pairs / line.pairs:.2f}" if line.executed_pairs and not line.is_dense else "",
        _gigabytes(line.minimal_bytes, (forward, backward)) if line.minimal_bytes else "",
        *_against_dense(line, together),
        _against_peers(line, together) if line.ours else "",
    ]
    return start + " | ".join(cells) + " |"


def _milliseconds(timing: Timing) -> str:
    median, fastest, slowest = (f"{1e3 * s:.4g}" for s in (timing.median_s, timing.fastest_s, timing.slowest_s))
    return f"{median} ({fastest} to {slowest})"


def _gigabytes(moved: tuple[float, float], seconds: tuple[float, float]) -> str:
    return " / ".join(f"{b / s / 1e9:.3g}" for b, s in zip(moved, seconds, strict=True))


def _against_dense(line: SpeedLine, together: Sequence[SpeedLine]) -> tuple[str, str]:
    dense = next((x for x in together if x.is_dense), None)
    if line.is_dense or dense is None or dense.forward is None:
        return "", ""
    rates = [(a / b) for a, b in zip(line.teraflops(), dense.teraflops(), strict=True)]
    times = sum(dense.seconds()) / (sum(line.seconds()) + sum(line.apart.values()))
    return "{:.2f} / {:.2f}".format(*rates), f"{times:.2f}"


def _against_peers(line: SpeedLine, together: Sequence[SpeedLine]) -> str:
    peers = [x for x in together if not x.ours and not x.is_dense and x.forward is not None]
    ratios = ([theirs / own for theirs, own in zip(x.seconds(), line.seconds(), strict=True)] for x in peers)
    return ", ".join("{} {:.2f} / {:.2f}".format(x.name, *ratio) for x, ratio in zip(peers, ratios, strict=True))


def _error_row(line: ErrorLine) -> str:
    start = f"| {line.tokens} | {line.kind} | {100 * line.density:.1f} % | {line.name} | "
    if line.why_not is not None:
        return f"{start}{line.why_not} |" + " |" * (len(NAMES) - 1)
    cells = [f"{own:.2g} ({own / torch_error:.2f})" if torch_error else f"{own:.2g}" for own, torch_error in line.errors.values()]
    return start + " | ".join(cells) + " |"


def save_plot(path: Path, speeds: Sequence[SpeedLine]) -> None:
    """Active TFLOP/s over density as a PNG: a row per length, a column per kind of pattern.

    Recorded indices, which are single points, are left out; nothing is written if there is nothing else.
    """
    measured = [x for x in speeds if x.forward is not None and not x.recorded]
    lengths, kinds = sorted({x.tokens for x in measured}), list(dict.fromkeys(x.kind for x in measured))
    if not measured:
        return
    figure = Figure(figsize=(4.6 * len(kinds), 3.4 * len(lengths)), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(lengths), len(kinds), squeeze=False)
    figure.suptitle("forward solid, backward dashed; dense attention thin")
    colors = {name: f"C{i}" for i, name in enumerate(dict.fromkeys(x.name for x in measured))}
    for row, tokens in zip(grid, lengths, strict=True):
        for axes, kind in zip(row, kinds, strict=True):
            lines = [x for x in measured if x.tokens == tokens and x.kind == kind]
            if not lines:
                axes.set_axis_off()
                continue
            _plot_rates(axes, lines, colors)
            axes.set(title=f"{kind}, {tokens} tokens", xlabel="density in percent", ylabel="active TFLOP/s", ylim=(0, None))
    figure.savefig(str(path), dpi=110)


def _plot_rates(axes: Axes, lines: Sequence[SpeedLine], colors: Mapping[str, str]) -> None:
    """One colour a contender; dense attention does all entries, at every density."""
    for name in dict.fromkeys(x.name for x in lines):
        own = sorted((x for x in lines if x.name == name), key=lambda x: x.density)
        for which, style in enumerate(("-", "--")):
            label = name if which == 0 else None
            values = [x.teraflops()[which] for x in own]
            axes.plot(
                [100 * x.density for x in own], values, style, marker=".", color=colors[name], label=label,
                linewidth=0.8 if own[0].is_dense else 1.6,
            )  # fmt: skip
    axes.set_xscale("log")
    densities = sorted({round(100 * x.density, 1) for x in lines})
    axes.set_xticks(densities, [f"{x:g}" for x in densities])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
