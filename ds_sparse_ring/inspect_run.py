"""``ds-sparse-ring inspect RUN``: what a run has logged, as one HTML page that needs nothing else."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.inspect_plots import (
    attention_picture,
    curves,
    hop_timeline,
    kept_share,
    layers_over_steps,
    shares_of_step,
)
from ds_sparse_ring.run_log import HeadMapData, RunHistory, log_of, read_history, read_maps

_FACTS = {  # of the last logged line: label, how it is written
    "loss": ("loss (nats a token)", "{:.3f}"),
    "tokens_per_s": ("tokens/s", "{:,.0f}"),
    "step_s": ("seconds a step", "{:.3g}"),
    "mfu_executed": ("MFU, executed", "{:.1%}"),
    "mfu_dense_equivalent": ("MFU, dense-equivalent", "{:.1%}"),
    "density": ("density", "{:.1%}"),
    "recall": ("recall on last queries", "{:.1%}"),
    "recall_middle": ("recall in the middle", "{:.1%}"),
    "exposed": ("exposed communication", "{:.1%}"),
    "time_imbalance": ("imbalance of ranks", "{:.3f}"),
    "peak_memory_gib": ("device memory, GiB", "{:.1f}"),
    "peak_host_gib": ("offloaded to the host, GiB", "{:.1f}"),
    "peak_disk_gib": ("offloaded to the disk, GiB", "{:.1f}"),
}

_RECORDINGS = 4
"""Recordings of attention that are shown, the first and the last one among them: each is half a megabyte of page."""
_MAP_KEY = """<p>Rows are queries spread over the sequence, columns are keys. The stronger the shade, the more probability over
the row's even share. <span class="key" style="background: var(--diagonal)"></span> read on block diagonals, <span class="key"
style="background: var(--column)"></span> read as columns: the more of them in a cell, the stronger.</p>"""


class _Card(NamedTuple):
    caption: str
    note: str
    svg: str


def write_page(run: Path, output: Path | None = None) -> Path:
    """Write the page of a run; returns where it is.

    Args:
        run: the output folder of Trainer or train/pretrain.py, or the metrics.jsonl in it.
        output: the file to write; None: inspect.html in that folder.

    Raises:
        SparseRingError: no log, nothing logged, or a file that cannot be read or written.
    """
    log = log_of(run)
    history, maps = read_history(log), read_maps(log.parent)
    page = output or log.parent / "inspect.html"
    try:
        page.write_text(_page(log, history, maps), encoding="utf-8")
    except OSError as error:
        raise SparseRingError(f"inspect: {page} cannot be written: {error.strerror}: give --output another file") from None
    return page


def _page(log: Path, history: RunHistory, maps: dict[int, dict[tuple[int, int], HeadMapData]]) -> str:
    last = history.training[-1]
    template = Template(files("ds_sparse_ring").joinpath("inspect_page.html").read_text(encoding="utf-8"))
    sections = [
        ("Training", "Figures of logged steps, from metrics.jsonl.", list(_training(history))),
        ("Layers", "A column for each logged step, a row for each layer.", list(_layers(history))),
        ("The ring", "Communication and balance of the ranks.", list(_ring(history))),
    ]
    figures = [(key, value) for key, value in last.items() if isinstance(value, int | float | str)]
    return template.substitute(
        title=html.escape("/".join(log.resolve().parent.parts[-2:])),
        subtitle=html.escape(_subtitle(history)),
        facts="\n".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in _facts(history)),
        sections="\n".join([*(_section(*section) for section in sections if section[2]), *_maps(maps)]),
        figures="\n".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(_short(value))}</td></tr>" for key, value in figures),
        configuration=html.escape(json.dumps(_job(history), indent=2)),
    )


def _job(history: RunHistory) -> dict[str, Any]:
    """What ran, as far as the log says it."""
    job: dict[str, Any] = history.start.get("job") or history.start.get("run") or {}
    return job


def _subtitle(history: RunHistory) -> str:
    job, steps = _job(history), history.training[-1]["step"]
    parts = [f"step {steps} of {history.start['steps']}" if "steps" in history.start else f"step {steps}"]
    if "world" in job:
        parts.append(f"{job['world']} rank{'s' if job['world'] > 1 else ''}" + (f" ({job['device']})" if "device" in job else ""))
    if "sequence_tokens" in job:
        parts.append(f"{job['sequence_tokens']} tokens a sequence")
    if "sparse_ring" in job:
        selector = job["sparse_ring"]["selector"]
        parts.append("selector " + ", ".join(str(value) for value in selector.values()))
    return "; ".join(parts)


def _facts(history: RunHistory) -> Iterator[tuple[str, str]]:
    last = history.training[-1]
    for key, (label, form) in _FACTS.items():
        if last.get(key) is not None:
            yield label, form.format(last[key])
    if history.evaluations:
        yield "evaluation loss", f"{history.evaluations[-1]['loss']:.3f}"


def _training(history: RunHistory) -> Iterator[_Card]:
    lines = history.training
    losses = {"training": (lines, "loss")}
    if history.evaluations:
        losses["evaluation"] = (history.evaluations, "loss")
    yield _Card("Loss", "nats a token", curves("loss", losses, label="nats a token", points=["evaluation"]))
    if _any(lines, "tokens_per_s"):
        yield _Card(
            "Tokens per second",
            "of all ranks, before they are cut",
            curves("tokens per second", {"all ranks": (lines, "tokens_per_s")}, label="tokens/s"),
        )
    if _any(lines, "mfu_executed"):
        mfu = {"executed": (lines, "mfu_executed"), "dense-equivalent": (lines, "mfu_dense_equivalent")}
        yield _Card(
            "Model FLOPs utilisation",
            "attention by active pairs, and by all causal ones",
            curves("MFU", mfu, label="share of the peak"),
        )
    if _any(lines, "attention_s") and _any(lines, "step_s"):
        yield _Card(
            "Where a step's time goes",
            "parts of the logged step; all else up to the mean step since the last line",
            shares_of_step("time of a step", lines),
        )
    peaks = {tier: (lines, f"peak_{key}_gib") for tier, key in (("device", "memory"), ("host", "host"), ("disk", "disk"))}
    if held := {tier: of for tier, of in peaks.items() if _any(*of)}:
        yield _Card(
            "Memory",
            "peaks so far of the fullest rank; host and disk: what offload keeps there",
            curves("memory", held, label="GiB"),
        )
    if _any(lines, "grad_norm"):
        yield _Card("Gradient norm", "before clipping", curves("gradient norm", {"norm": (lines, "grad_norm")}, label="norm"))


def _layers(history: RunHistory) -> Iterator[_Card]:
    lines = [line for line in history.training if "density" in line]
    if not lines:
        return
    kept = {"density": (lines, "density"), "of it columns": (lines, "column_density")}
    yield _Card(
        "Density", "active share of the causal pairs, mean over layers", curves("density", kept, label="share of all pairs")
    )
    recalls = {"probes": (lines, "recall"), "early": (lines, "recall_early"), "middle": (lines, "recall_middle")}
    recalls |= {"late": (lines, "recall_late"), "worst 5 %": (lines, "recall_worst")}
    found = {label: of for label, of in recalls.items() if _any(*of)}
    yield _Card(
        "Recall",
        "attention mass kept, mean over layers; parts of the sequence with true_recall_rows",
        curves("recall", found, label="share of the mass", top=1.02),
    )
    if _any(lines, "per_layer"):
        yield _Card(
            "Density by layer",
            "colours on a log scale",
            layers_over_steps("density by layer", lines, "density", logarithmic=True),
        )
        yield _Card(
            "Recall by layer",
            "on the last queries of segments",
            layers_over_steps("recall by layer", lines, "recall", logarithmic=False),
        )


def _ring(history: RunHistory) -> Iterator[_Card]:
    lines = history.training
    timed = [line for line in lines if any(line.get("per_hop", {}).get("forward", {}).get("compute_s", []))]
    if timed:
        note = f"step {timed[-1]['step']}; means over ranks"
        yield _Card("Hops, one after the other", note, hop_timeline("hop timeline", timed[-1]))
    if _any(lines, "exposed_s"):
        waits = {
            "in all": (lines, "exposed_s"),
            "ring": (lines, "ring_wait_s"),
            "columns": (lines, "columns_s"),
            "heads": (lines, "heads_s"),
        }
        yield _Card(
            "Exposed communication",
            "seconds of a step that attention stood still",
            curves("exposed communication", waits, label="seconds"),
        )
    balance = {"ranks, by time": (lines, "time_imbalance"), "ranks, by pairs": (lines, "pair_imbalance")}
    balance |= {"hops, by time": (lines, "hop_imbalance"), "heads, by pairs": (lines, "head_imbalance")}
    if found := {label: of for label, of in balance.items() if _any(*of)}:
        yield _Card("Imbalance", "largest over mean; 1 is best", curves("imbalance", found, label="largest / mean"))


def _maps(maps: dict[int, dict[tuple[int, int], HeadMapData]]) -> Iterator[str]:
    """The last recording, and some earlier ones folded away."""
    steps = sorted(maps)
    shown = sorted({steps[place * (len(steps) - 1) // (_RECORDINGS - 1)] for place in range(_RECORDINGS)} if steps else [])
    for step in reversed(shown):
        figures = "\n".join(_map_figure(step, layer, head, recorded) for (layer, head), recorded in sorted(maps[step].items()))
        cards = f'<div class="cards maps">\n{figures}\n</div>'
        if step == shown[-1]:
            yield f"<h2>Attention at step {step}</h2>\n{_MAP_KEY}\n{cards}"
        else:
            yield f"<details><summary>Attention at step {step}</summary>\n{cards}\n</details>"


def _map_figure(step: int, layer: int, head: int, recorded: HeadMapData) -> str:
    name = f"layer {layer}, head {head}"
    pictures = "\n".join(
        attention_picture(f"{name}, step {step}{', index' if with_index else ''}", recorded, with_index=with_index)
        for with_index in (False, True)
    )
    kept = f"the index keeps {kept_share(recorded):.1%} of the mass with {recorded.density:.1%} of the pairs"
    return f'<figure><figcaption>{name}<small>{kept}</small></figcaption>\n<div class="pair">\n{pictures}\n</div></figure>'


def _section(title: str, note: str, cards: Iterable[_Card]) -> str:
    figures = "\n".join(
        f"<figure><figcaption>{html.escape(card.caption)}<small>{html.escape(card.note)}</small></figcaption>\n{card.svg}</figure>"
        for card in cards
    )
    return f'<h2>{title}</h2>\n<p>{note}</p>\n<div class="cards">\n{figures}\n</div>'


def _any(lines: Iterable[dict[str, Any]], key: str) -> bool:
    return any(line.get(key) is not None for line in lines)


def _short(value: float | str) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
