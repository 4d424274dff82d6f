"""``ds-sparse-ring plan --compare LOG``: a measured step beside the simulated one."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from ds_sparse_ring.errors import SparseRingError
from ds_sparse_ring.estimate import Estimate, estimate
from ds_sparse_ring.hardware import load_hardware, profile_of_device
from ds_sparse_ring.job import Job, Schedule
from ds_sparse_ring.meter import SENT
from ds_sparse_ring.run_log import RunLog, log_of, read_run
from ds_sparse_ring.units import GIB

_MOST_HOPS = 64
"""Of one pass that are shown."""

_SENT = {name.replace("_", " ").replace("bytes", "GiB"): name for name in SENT}
"""Labels of what a rank sends, and its names in the log."""


def print_comparison(log: Path, hardware: str | None) -> None:
    """Simulate the step that a log has measured, with the density that was measured, and print both.

    Args:
        log: a metrics.jsonl, or the output folder that holds it.
        hardware: as for `load_hardware`; None: the profile of the device that the log names.

    Raises:
        SparseRingError: not the log of a run, or a device without a profile.
    """
    run = read_run(log_of(log))
    name = hardware or profile_of_device(run.job.device)
    if name is None:
        raise SparseRingError(
            f"plan: the log is of {run.job.device}, for which there is no profile: give --hardware a name or a file"
        )
    job = job_of(run, name)
    e = estimate(job, Schedule(run.config.ulysses_degree, run.config.inner_degree, run.config.inner))
    steps = [line["step"] for line in run.lines]
    title = f"{log}: {job.tokens} tokens, {job.world} x {run.job.device}, ZeRO-{job.zero_stage}; simulated with {name}"
    table = Table("", "measured", "simulated", "error", title=title, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for label, measured, simulated in rows(run, e):
        error = f"{100 * (simulated / measured - 1):+.1f} %" if measured else "-"
        table.add_row(label, "-" if measured is None else f"{measured:.4g}", f"{simulated:.4g}", error)
    console = Console(width=None if Console().is_terminal else 120)
    console.print(table)
    console.print(_hop_table(run, e))
    if (spread := run.median("head_imbalance")) is not None:
        console.print(f"measured alone: the busiest pattern has {spread:.3f} times the mean one's pairs, mean over layers")
    console.print(
        f"measured: medians of {len(steps)} logged steps, {steps[0]} to {steps[-1]}; a step has {run.job.accumulation} x "
        f"{run.job.micro_batch} sequences a ring. simulated: density {job.density:.4f} of the triangle, {job.columns:.4f} of it "
        f"columns, as measured; rates of {name}: {job.hardware.source}"
    )


def _hop_table(run: RunLog, e: Estimate) -> Table:
    table = Table("hop", title="of one step, all layers, mean over ranks", title_justify="left")
    for name in ("forward s", "simulated", "wait s", "backward s", "simulated", "wait s"):
        table.add_column(name, justify="right")
    for hop, figures in enumerate(hop_rows(run, e)):
        if hop < _MOST_HOPS:
            table.add_row(str(hop), *("-" if figure is None else f"{figure:.3f}" for figure in figures))
    return table


def hop_rows(run: RunLog, e: Estimate) -> list[tuple[float | None, ...]]:
    """Of each hop and of one optimizer step, seconds: compute measured and simulated, and measured waiting; forward, backward.

    Outputs that are not kept are attended to twice.
    """
    found = []
    passes = [("forward", e.forward, e.layers + e.memory.again), ("backward", e.backward, e.layers)]
    for hop in range(len(e.forward.by_hop)):
        row: list[float | None] = []
        for name, simulated, times in passes:
            compute_s, wait_s = (run.median_of_hop(name, what, hop) for what in ("compute_s", "wait_s"))
            row += [compute_s, times * run.job.accumulation * simulated.by_hop[hop] / 1e3, wait_s]
        found.append(tuple(row))
    return found


def job_of(run: RunLog, hardware: str) -> Job:
    """What the simulator takes. Documents and sequences of a micro-batch are one triangle that is active in fewer places."""
    ran = run.job
    inside = min(1.0, run.median("causal_share") or 1.0)
    density, columns = ((run.median(key) or 0.0) * inside for key in ("density", "column_density"))
    tokens = ran.micro_batch * ran.sequence_tokens
    profile = load_hardware(hardware)
    tile = ran.loss_tile_tokens or tokens
    return Job(ran.model, profile, run.config, tokens, ran.world, density, columns, ran.zero_stage, tile, liger=ran.liger)


def rows(run: RunLog, e: Estimate) -> list[tuple[str, float | None, float]]:
    """Label, measured, simulated; of one optimizer step, seconds unless the label says otherwise."""
    measured, simulated = measured_figures(run), simulated_figures(e, run.job.accumulation)
    return [(label, measured[label], figure) for label, figure in simulated.items()]


def measured_figures(run: RunLog) -> dict[str, float | None]:
    """Medians of a run's logged steps; None where the log has no such figure."""
    step_s, attention_s, index_s = (run.median(key) for key in ("step_s", "attention_s", "index_s"))
    rest_s = None if step_s is None or attention_s is None or index_s is None else step_s - attention_s - index_s
    return {
        "step s": step_s,
        "attention s": attention_s,
        "index s": index_s,
        "rest s": rest_s,
        "exposed s": run.median("exposed_s"),
        "worker imbalance": run.median("time_imbalance"),
        "hop imbalance": run.median("hop_imbalance"),
        "peak memory GiB": run.median("peak_memory_gib"),
        **{label: _gib(run.median(name)) for label, name in _SENT.items()},
    }


def _gib(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / GIB


def simulated_figures(e: Estimate, accumulation: int = 1) -> dict[str, float]:
    """The same of an estimate; ``accumulation``: micro-batches of a step."""
    of_step = accumulation / 1e3
    of_layers = e.layers * of_step
    waiting = e.exchange_ms + e.columns_ms
    return {
        "step s": of_step * e.step_ms,
        "attention s": of_step * e.attention_ms - of_layers * e.index_ms,
        "index s": of_layers * e.index_ms,
        "rest s": of_step * (e.rest_ms + e.copies_ms),
        "exposed s": of_layers * (e.forward.exposed + e.backward.exposed + waiting),
        "worker imbalance": e.backward.imbalance,
        "hop imbalance": (e.forward.hop_imbalance + e.backward.hop_imbalance) / 2,
        "peak memory GiB": e.memory.device / GIB,
        **{label: accumulation * e.sent_bytes[name] / GIB for label, name in _SENT.items()},
    }
