"""Tables and curves from the files of `compare_attention`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.train.compare_attention import Setting, variants

DENSE_FINDS = 0.8
"""Lengths count for retrieval where dense attention finds at least this share."""

Runs = dict[str, list[dict[str, Any]]]


def load_runs(folder: Path) -> Runs:
    """Finished runs by name, in the order of the comparison, sorted by seed.

    Raises:
        SparseRingError: there are none, or they differ in what all should have in common.
    """
    results = [json.loads(file.read_text()) for file in sorted(folder.glob("*_s*.json"))]
    if not results:
        raise SparseRingError(f"--report: {folder} holds no finished run")
    if any(result["setting"] != results[0]["setting"] for result in results):
        raise SparseRingError(f"--report: runs in {folder} differ in their setting: keep those of one setting in one folder")
    runs: Runs = {name: [] for name in variants(Setting())}
    for result in sorted(results, key=lambda result: result["seed"]):
        runs[result["run"]].append(result)
    return {name: found for name, found in runs.items() if found}


def spread(values: Sequence[float], digits: int = 3) -> str:
    """Mean and, of several runs, half of what lies between the largest and the least."""
    mean = f"{sum(values) / len(values):.{digits}f}"
    return mean if len(values) == 1 else f"{mean} ± {(max(values) - min(values)) / 2:.{digits}f}"


def mean_of(results: Sequence[dict[str, Any]], figure: Callable[[dict[str, Any]], float]) -> float:
    """Of one figure over runs."""
    return sum(map(figure, results)) / len(results)


def tables(runs: Runs) -> str:
    """Markdown: losses, then what was found by length and place."""
    first = next(iter(runs.values()))[0]
    setting = first["setting"]
    about = (
        f"{first['device']}, torch {first['versions']['torch']}; {setting['steps']} steps of one row of {setting['tokens']} "
        f"tokens ({first['tokens'] / 1e6:.1f}M tokens, {first['epochs']:.1f} epochs), learning rate {setting['lr']:g}, "
        f"{sum(setting['train_facts'])} facts a row, weight {setting['answer_weight']:g} of asked values"
    )
    return f"{about}\n\n{_losses(runs)}\n\n{_retrieval(runs)}\n"


def _losses(runs: Runs) -> str:
    lines = [
        "| run | seeds | density | loss, read densely | against dense | first / second quarter / second half | its own attention "
        "(density) | s a step |",
        "|---|---|---|---|---|---|---|---|",
    ]
    by_seed = {result["seed"]: result["dense"]["loss"]["all"] for result in runs.get("dense", [])}
    for results in runs.values():
        losses = [result["dense"]["loss"]["all"] for result in results]
        pairs = [100 * (r["dense"]["loss"]["all"] / by_seed[r["seed"]] - 1) for r in results if r["seed"] in by_seed]
        parts = [
            f"{mean_of(results, lambda r, part=part: r['dense']['loss'][part]):.3f}"  # type: ignore[misc]
            for part in ("first_quarter", "second_quarter", "second_half")
        ]
        own = [result["own"]["loss"]["all"] for result in results]
        density = mean_of(results, lambda r: r["train"]["density"])
        lines.append(
            f"| {results[0]['title']} | {len(results)} | {density:.3f} | {spread(losses)} | "
            f"{spread(pairs, 2) + ' %' if pairs else '-'} | {' / '.join(parts)} | {spread(own)} "
            f"({mean_of(results, lambda r: r['own']['density']):.3f}) | {mean_of(results, lambda r: r['train']['step_s']):.2f} |"
        )
    return "\n".join(lines)


def _retrieval(runs: Runs) -> str:
    lengths = list(next(iter(runs.values()))[0]["dense"]["retrieval"])
    head = [f"{place} {length}" for place in ("middle", "tail") for length in lengths]
    lines = [f"| run | read | {' | '.join(head)} | middle | tail |", "|" + "---|" * (len(head) + 4)]
    for results in runs.values():
        for kind in ("dense", "own") if results[0]["run"] != "dense" else ("dense",):
            cells = []
            for place in ("middle", "tail"):
                cells += [spread([result[kind]["retrieval"][length][place] for result in results], 2) for length in lengths]
            for place in ("middle", "tail"):
                counted = counted_lengths(runs, place)
                means = [sum(r[kind]["retrieval"][n][place] for n in counted) / len(counted) for r in results] if counted else []
                cells.append(spread(means, 2) if means else "-")
            lines.append(f"| {results[0]['title']} | {'densely' if kind == 'dense' else 'own'} | {' | '.join(cells)} |")
    counted_by = "; ".join(f"{place} {', '.join(counted_lengths(runs, place)) or 'none'}" for place in ("middle", "tail"))
    questions = _questions(next(iter(runs.values()))[0]["setting"])
    note = f"The last two columns: mean over lengths where dense finds at least {DENSE_FINDS:.0%} ({counted_by}). {questions}"
    return "\n".join([*lines, "", note])


def _questions(setting: dict[str, Any]) -> str:
    middle, tail = (setting["retrieval_rows"] * count for count in setting["eval_facts"])
    return f"{middle} questions in the middle and {tail} at the tail for each length and run."


def counted_lengths(runs: Runs, place: str) -> list[str]:
    """Lengths at which the dense runs find enough at a place."""
    dense = runs.get("dense", [])
    lengths = list(dense[0]["dense"]["retrieval"]) if dense else []
    return [n for n in lengths if mean_of(dense, lambda r, n=n: r["dense"]["retrieval"][n][place]) >= DENSE_FINDS]  # type: ignore[misc]


def plot(runs: Runs, output: Path) -> None:
    """Curves over steps, means over seeds: loss on text and on asked values (running mean of 10 steps), density."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    axes = figure.subplots(1, 3)
    for results in runs.values():
        title = results[0]["title"]
        for axis, key in zip(axes, ("loss", "answer_loss"), strict=False):
            curves = [result["train"][key] for result in results]
            axis.plot(_smooth([sum(values) / len(values) for values in zip(*curves, strict=True)]), label=title)
        steps = [entry["step"] for entry in results[0]["train"]["attention"]]
        densities = zip(*([entry["density"] for entry in result["train"]["attention"]] for result in results), strict=True)
        axes[2].plot(steps, [sum(values) / len(values) for values in densities], label=title)
    for axis, name in zip(axes, ("training loss", "loss on asked values", "density"), strict=True):
        axis.set(title=name, xlabel="step")
        axis.grid(alpha=0.3)
    axes[1].set_yscale("log")
    axes[2].set_yscale("log")
    axes[0].legend(fontsize=7)
    figure.savefig(output, dpi=110)


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def write_report(folder: Path) -> str:
    """Write ``report.md`` and ``curves.png`` into the folder of runs; returns the tables."""
    runs = load_runs(folder)
    text = tables(runs)
    (folder / "report.md").write_text(text)
    plot(runs, folder / "curves.png")
    return text
