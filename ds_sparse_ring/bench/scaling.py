"""``bench scaling``: training steps on 1, 2, 4, 8 GPUs of this host, by layout and index, beside the simulator's predictions.

Every run is one of train/pretrain.py under ZeRO-3, on rows of one document of random tokens each, with fresh weights. Predictions
are made, printed and written before the first run starts.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import typer

from ds_sparse_ring.bench.options import tokens_or_none
from ds_sparse_ring.bench.result import write_result
from ds_sparse_ring.bench.training_run import IndexKind, Training, TrainingRun, fitted, longest
from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.hardware import load_hardware
from ds_sparse_ring.layout import LayoutKind
from ds_sparse_ring.plan_report import parse_tokens

_SHOWN = {
    "step s": ".2f",
    "tokens/s": ".0f",
    "exposed s": ".2f",
    "worker imbalance": ".3f",
    "hop imbalance": ".3f",
    "peak memory GiB": ".1f",
    "density": ".3f",
    "MFU": ".3f",
}


def main(
    model: Annotated[str, typer.Option(help="As for ds-sparse-ring plan.")] = "qwen2.5-3b",
    gpus: Annotated[str, typer.Option(help="Numbers of GPUs, all of which share a sequence.")] = "1,2,4,8",
    tokens: Annotated[
        str, typer.Option(help='Of a sequence, 512K for example; "longest": as many as are predicted to fit.')
    ] = "512K",
    layouts: Annotated[str, typer.Option(help="On one GPU only the first one runs.")] = "striped,zigzag,contiguous",
    indexes: Annotated[str, typer.Option(help="sparse (the fixed selector), dense, or both.")] = "sparse,dense",
    columns: Annotated[int, typer.Option(help="Columns of a head and segment for 128K tokens.")] = 2600,
    slashes: Annotated[int, typer.Option(help="Slashes of a head and segment for 128K tokens.")] = 52,
    density: Annotated[float, typer.Option(help="Active share that these make; the simulator's.")] = 0.055,
    column_density: Annotated[float, typer.Option(help="The part of it that is columns.")] = 0.033,
    segment_tokens: Annotated[str, typer.Option(help="Tokens of a segment.")] = "16K",
    chunk_tokens: Annotated[str, typer.Option(help="layer_chunk_tokens; 0 for whole layers.")] = "16K",
    host_gib: Annotated[
        float, typer.Option(help="offload.host_gib of a GPU, used where a run does not fit without; 0: never.")
    ] = 112,
    device_gib: Annotated[float, typer.Option(help="offload.device_gib beside it.")] = 40,
    liger: Annotated[bool, typer.Option("--liger", help="Norms, rotary embedding and gates by Liger, on a GPU.")] = False,
    fastest: Annotated[bool, typer.Option("--fastest", help="The fastest schedule in place of a flat ring.")] = False,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of a run; the first one is left out if there are more.")] = 4,
    hardware: Annotated[str, typer.Option(help="The simulator's profile, as for ds-sparse-ring plan.")] = "h200",
    device: Annotated[str, typer.Option(help="cuda or cpu; left out, the GPUs if there are any.")] = "",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print commands and predictions only.")] = False,
    output: Annotated[Path, typer.Option(help="Folder of scaling.json, and of each run.")] = Path("runs/scaling"),
) -> None:
    """Print a Markdown table, two rows a run: simulated, measured. scaling.json is written after every run."""
    training = Training(
        model, load_hardware(hardware), columns, slashes, density, column_density, parse_tokens(segment_tokens),
        tokens_or_none(chunk_tokens), host_gib, device_gib, steps, liger,
    )  # fmt: skip
    kinds = _chosen("layouts", layouts, LayoutKind), _chosen("indexes", indexes, IndexKind)
    runs = runs_of(training, _numbers(gpus), tokens, *kinds, fastest=fastest)
    place = device or ("cuda" if dry_run or torch.cuda.is_available() else "cpu")
    if place == "cpu" and not device:
        raise SparseRingError(
            "bench scaling: there is no GPU here: give --dry-run for predictions, or --device cpu for a small model"
        )
    results = [_Result(run, output, bf16=place == "cuda") for run in runs]
    print(table(results), flush=True)
    if dry_run:
        print("\n".join(["", *(shlex.join(result.command) for result in results)]))
        return

    def write() -> None:
        fields = {"training": {**asdict(training), "hardware": hardware}, "runs": [result.fields() for result in results]}
        write_result(output / "scaling.json", place, fields)

    write()
    for result in results:
        result.measure()
        write()
    print("\n" + table(results))
    if failed := [result.run.name for result in results if result.missing.startswith("failed")]:
        raise SparseRingError(f"bench scaling: {', '.join(failed)} failed: the table says where to look")


def runs_of(
    training: Training,
    gpus: Sequence[int],
    tokens: str,
    layouts: Sequence[LayoutKind],
    indexes: Sequence[IndexKind],
    *,
    fastest: bool = False,
) -> list[TrainingRun]:
    """All runs of a table; layouts do not differ on one GPU. ``fastest``: of `fitted`.

    Raises:
        SparseRingError: no number of tokens, or a set-up that is impossible.
    """
    found = []
    for index in indexes:
        for world in gpus:
            for layout in layouts[: None if world > 1 else 1]:
                run = TrainingRun(training, world, layout, index, 0 if tokens == "longest" else parse_tokens(tokens))
                found.append(longest(run) if tokens == "longest" else fitted(run, fastest=fastest))
    return found


class _Result:
    """A run with what was predicted for it and, later, measured. ``missing``: why nothing was."""

    def __init__(self, run: TrainingRun, folder: Path, *, bf16: bool) -> None:
        self.run, self.folder, self.bf16 = run, folder, bf16
        self.command = run.command(folder, bf16=bf16)
        self.simulated = run.simulated()
        self.measured: dict[str, float | None] = {}
        self.missing = "not run"

    def measure(self) -> None:
        """Run it, if there are GPUs enough."""
        run, there = self.run, torch.cuda.device_count()
        if self.bf16 and run.gpus > there:
            self.missing = f"not run: needs {run.gpus} GPUs, here are {there}"
            return
        print(f"{run.name}: {shlex.join(self.command)}", flush=True)
        run.prepare(self.folder)
        self.missing = run.launch(self.folder, bf16=self.bf16)
        if not self.missing:
            try:
                self.measured = run.measured(self.folder)
            except SparseRingError as error:
                self.missing = f"failed: {error}"

    def fields(self) -> dict[str, Any]:
        """For the JSON file."""
        run = self.run
        described = {"gpus": run.gpus, "layout": run.layout, "index": run.index, "tokens": run.tokens, "section": run.section()}
        figures = {"simulated": self.simulated, "measured": self.measured or None, "missing": self.missing}
        return {**described, "command": self.command, **figures}


def table(results: Sequence[_Result]) -> str:
    """Two rows for each run: what was simulated, and what was measured with the simulator's relative error in a step's time.

    "times" is the rate over that of the run with the same index and length on the fewest GPUs, in the first layout.
    """
    labels = ["GPUs", "layout", "index", "tokens", "schedule", "", *_SHOWN, "times", "error"]
    lines = [f"| {' | '.join(labels)} |", "|---" * len(labels) + "|"]
    for result in results:
        run = result.run
        first = next(other for other in results if (other.run.index, other.run.tokens) == (run.index, run.tokens))
        offload = f", {run.training.host_gib:g} GiB of host memory" if run.offload else ""
        what = [run.gpus, run.layout, run.index, f"{run.tokens / 1024:g}K", run.schedule.name(run.gpus) + offload]
        lines.append(_row([*what, "simulated"], result.simulated, first.simulated, ""))
        if result.measured:
            step_s = result.measured["step s"]
            error = "" if not step_s else f"{100 * ((result.simulated['step s'] or 0) / step_s - 1):+.1f} %"
            lines.append(_row([""] * 5 + ["measured"], result.measured, first.measured, error))
        else:
            lines.append(_row([""] * 5 + [result.missing], {}, {}, ""))
    return "\n".join(lines)


def _row(what: Sequence[Any], figures: dict[str, float | None], first: dict[str, float | None], error: str) -> str:
    cells = ["" if (value := figures.get(label)) is None else format(value, form) for label, form in _SHOWN.items()]
    rate, of_first = figures.get("tokens/s"), first.get("tokens/s")
    times = f"{rate / of_first:.2f}" if rate and of_first else ""
    return f"| {' | '.join(map(str, [*what, *cells, times, error]))} |"


def _numbers(text: str) -> list[int]:
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = [0]
    if numbers[0] < 1:
        raise SparseRingError(f"bench scaling: --gpus {text}: give numbers of GPUs with commas between, for example 1,2,4,8")
    return numbers


def _chosen(option: str, text: str, kinds: Any) -> list[Any]:
    chosen = text.split(",")
    if unknown := [part for part in chosen if part not in get_args(kinds)]:
        raise SparseRingError(f"bench scaling: --{option} {unknown[0]}: give some of {','.join(get_args(kinds))}")
    return chosen


if __name__ == "__main__":
    typer.run(main)
